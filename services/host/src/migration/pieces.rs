//! One object as bytes, and back. Bytes may come from anywhere: each part checks what it counts on.

use dma::Dma;
use hca::engine::SavedQp;
use hca::names::{DeviceId, QpHandle};
use hca::saved::{self, InvalidState, Kind, Name, decode, encode};
use nomad::objects::{Kind as ObjectKind, Object};
use pvrdma::Pvrdma;
use pvrdma::saved::{Device as SavedFunction, QpRecord};

use super::{MigrationError, Parts};
use crate::transport::SavedConnection;

/// A queue pair: the engine's part, the function's, and its connection.
type SavedQueuePair<M> = (SavedQp<Pvrdma<M>>, Option<QpRecord>, Option<SavedConnection>);

pub(super) fn object(name: Name) -> Object {
    let kind = match name.kind {
        Kind::Device => ObjectKind::Device,
        Kind::Context => ObjectKind::Context,
        Kind::ProtectionDomain => ObjectKind::ProtectionDomain,
        Kind::MemoryRegion => ObjectKind::MemoryRegion,
        Kind::CompletionQueue => ObjectKind::CompletionQueue,
        Kind::SharedReceiveQueue => ObjectKind::SharedReceiveQueue,
        Kind::QueuePair => ObjectKind::QueuePair,
    };
    Object { kind, handle: name.handle }
}

/// The other way; address handles, which this device doesn't have, count as objects of the device.
pub(super) fn name(object: Object) -> Name {
    let kind = match object.kind {
        ObjectKind::Device | ObjectKind::AddressHandle => Kind::Device,
        ObjectKind::Context => Kind::Context,
        ObjectKind::ProtectionDomain => Kind::ProtectionDomain,
        ObjectKind::MemoryRegion => Kind::MemoryRegion,
        ObjectKind::CompletionQueue => Kind::CompletionQueue,
        ObjectKind::SharedReceiveQueue => Kind::SharedReceiveQueue,
        ObjectKind::QueuePair => Kind::QueuePair,
    };
    Name { kind, handle: object.handle }
}

/// Whether an object is there; `None`: it isn't to be saved now.
pub(super) fn exists<M: Dma + Clone + 'static>(
    parts: &Parts<'_, M>,
    device: DeviceId,
    name: Name,
) -> Option<bool> {
    if name.kind == Kind::Device {
        return parts.engine.is_stopped(device).then_some(true);
    }
    Some(parts.engine.has(device, name))
}

pub(super) fn save<M: Dma + Clone + 'static>(parts: &Parts<'_, M>, device: DeviceId, name: Name) -> Vec<u8> {
    let Name { kind, handle } = name;
    let engine = &*parts.engine;
    let function = parts.devices.get(device);
    match kind {
        Kind::Device => encode(&(engine.save_device(device), function.map(pvrdma::Device::save))),
        Kind::Context => encode(&engine.save_context(device, handle)),
        Kind::ProtectionDomain => encode(&engine.save_pd(device, handle)),
        Kind::MemoryRegion => encode(&engine.save_region(device, handle)),
        Kind::CompletionQueue => encode(&engine.save_cq(device, handle)),
        Kind::SharedReceiveQueue => encode(&engine.save_srq(device, handle)),
        Kind::QueuePair => {
            let saved = engine.save_qp(device, handle);
            let record = function.and_then(|function| function.save_qp(handle));
            let connection = parts.transports.save_connection(device, QpHandle(handle), parts.now);
            encode(&saved.map(|saved| (saved, record, connection)))
        }
    }
}

pub(super) fn restore<M: Dma + Clone + 'static>(
    parts: &mut Parts<'_, M>,
    device: DeviceId,
    name: Name,
    bytes: Option<&[u8]>,
) -> Result<(), MigrationError> {
    let Parts { engine, devices, transports, now } = parts;
    let function = devices.get_mut(device).ok_or(MigrationError::NoDevice(device))?;
    let Name { kind, handle } = name;
    let Some(bytes) = bytes else {
        if kind == Kind::QueuePair {
            transports.restore_connection(
                engine,
                device,
                (QpHandle(handle), hca::names::Qpn(0)),
                None,
                *now,
            )?;
        }
        function.restore_gone(name);
        engine.restore_gone(device, name)?;
        return Ok(());
    };
    let absent = InvalidState::Damaged(bytes.len());
    match kind {
        Kind::Device => {
            let (saved, own): (Option<saved::Device>, Option<SavedFunction>) = decode(bytes)?;
            let (saved, own) = saved.zip(own).ok_or(absent)?;
            function.restore(&own)?;
            engine.restore_device(device, &saved)?;
        }
        Kind::Context => {
            let saved: Option<saved::Context> = decode(bytes)?;
            engine.restore_context(device, handle, &saved.ok_or(absent)?)?;
        }
        Kind::ProtectionDomain => {
            let saved: Option<saved::Pd> = decode(bytes)?;
            let saved = saved.ok_or(absent)?;
            engine.restore_pd(device, handle, saved)?;
            function.restore_pd(handle, saved.context);
        }
        Kind::MemoryRegion => {
            let saved: Option<saved::Region> = decode(bytes)?;
            engine.restore_region(device, handle, saved.ok_or(absent)?)?;
        }
        Kind::CompletionQueue => {
            let saved: Option<hca::engine::SavedCq<Pvrdma<M>>> = decode(bytes)?;
            engine.restore_cq(device, handle, saved.ok_or(absent)?)?;
        }
        Kind::SharedReceiveQueue => {
            let saved: Option<hca::engine::SavedSrq<Pvrdma<M>>> = decode(bytes)?;
            engine.restore_srq(device, handle, saved.ok_or(absent)?)?;
        }
        Kind::QueuePair => {
            let saved: Option<SavedQueuePair<M>> = decode(bytes)?;
            let (saved, record, connection) = saved.ok_or(absent)?;
            let qpn = saved.qpn;
            engine.restore_qp(device, handle, saved)?;
            if let Some(record) = record {
                function.restore_qp(handle, record);
            }
            let at = (QpHandle(handle), qpn);
            transports.restore_connection(engine, device, at, connection.as_ref(), *now)?;
        }
    }
    Ok(())
}
