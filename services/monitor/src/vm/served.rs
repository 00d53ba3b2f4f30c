//! Devices that other processes serve: connected before the sandbox is entered, plugged with the others.

use std::sync::Arc;

use control_api::host::NicRequest;
use machine::memory::{GuestRam, RamRegion};
use pci::function::PciFunction;
use pci::interrupt::Msi;
use pci::root::{FunctionAddress, PciRoot};

use super::ThreadHook;
use super::error::Error;
use crate::description::VmDescription;
use crate::migration::shape::ShapeDevice;
use crate::migration::state::SavedDevices;
use crate::vfio_user::{
    Connector, DmaRange, IncomingFunction, Nic, NicConnector, OpenedFunction, SocketConnector,
    VfioUserFunction,
};

/// An RDMA NIC has an Ethernet function (vmxnet3) and an RDMA function (PVRDMA), as the guest's driver expects.
const NIC_FUNCTIONS: u8 = 2;

/// The functions of one PCI slot, in order.
pub struct OpenedSlot {
    slot: Option<u8>,
    functions: Vec<OpenedFunction>,
}

/// Connects to the servers that the description names. With `incoming`, the NICs are those of a VM that migrates here.
pub fn open(description: &VmDescription, incoming: bool) -> Result<Vec<OpenedSlot>, Error> {
    let mut slots = Vec::new();
    for nic in &description.rdma {
        let request = NicRequest {
            vm: description.name.clone(),
            name: nic.name.clone(),
            mac: Some(nic.mac.octets()),
            segment: nic.segment.clone(),
            tap: nic.tap.clone(),
            incoming,
        };
        let shared = Nic::new(&nic.host, request);
        let functions = (0..NIC_FUNCTIONS)
            .map(|function| {
                let connector = NicConnector { nic: Arc::clone(&shared), function };
                open_function(&format!("{}.{function}", nic.name), Box::new(connector))
            })
            .collect::<Result<Vec<_>, _>>()?;
        slots.push(OpenedSlot { slot: nic.slot, functions });
    }
    for device in &description.vfio_user {
        let connector = SocketConnector { path: device.socket.clone() };
        slots.push(OpenedSlot {
            slot: device.slot,
            functions: vec![open_function(&device.name, Box::new(connector))?],
        });
    }
    Ok(slots)
}

/// The guest-visible shape of served devices.
pub fn shapes(slots: &[OpenedSlot]) -> Vec<ShapeDevice> {
    let functions = slots.iter().flat_map(|slot| &slot.functions);
    functions
        .map(|function| ShapeDevice {
            name: function.name().to_owned(),
            device_id: function.device_id(),
            queues: Vec::new(),
        })
        .collect()
}

/// Passes the guest's memory to the servers. Returns the receivers for the state of an incoming VM.
pub fn connect_incoming(slots: &mut [OpenedSlot], ram: &GuestRam) -> Result<Vec<IncomingFunction>, Error> {
    let ranges = ranges(ram);
    let functions = slots.iter_mut().flat_map(|slot| &mut slot.functions);
    functions
        .map(|function| {
            let incoming = function.connect_incoming(&ranges);
            incoming.map_err(|error| Error::device(function.name(), error))
        })
        .collect()
}

fn ranges(ram: &GuestRam) -> Vec<DmaRange> {
    let range = |region: &RamRegion| DmaRange {
        file: Arc::clone(&region.file),
        offset: region.file_offset,
        address: region.range.start,
        size: region.range.size,
    };
    ram.regions().iter().map(range).collect()
}

/// Splits the slots into those with a requested number and those without.
pub fn by_slot(slots: Vec<OpenedSlot>) -> (Vec<OpenedSlot>, Vec<OpenedSlot>) {
    slots.into_iter().partition(|slot| slot.slot.is_some())
}

fn open_function(name: &str, connector: Box<dyn Connector>) -> Result<OpenedFunction, Error> {
    OpenedFunction::open(name, connector).map_err(|error| Error::device(name, error))
}

/// Passes the guest's memory to the servers, plugs their functions and starts their threads: at power-on state, or with their saved
/// state.
pub fn plug(
    slots: Vec<OpenedSlot>,
    root: &Arc<PciRoot>,
    ram: &GuestRam,
    msi: &dyn Msi,
    on_start: &ThreadHook,
    saved: Option<&SavedDevices>,
) -> Result<Vec<Arc<VfioUserFunction>>, Error> {
    let ranges = ranges(ram);
    let mut functions_of_all = Vec::new();
    for OpenedSlot { slot, functions } in slots {
        let mut at = slot;
        for (number, opened) in (0_u8..).zip(functions) {
            let name = opened.name().to_owned();
            let failed = |error| Error::device(&name, error);
            let (function, address) = match saved {
                None => {
                    let function = VfioUserFunction::new(opened, ranges.clone(), msi).map_err(failed)?;
                    let plugged = Arc::clone(&function) as Arc<dyn PciFunction>;
                    let address = match at {
                        Some(slot) => {
                            let address = FunctionAddress::new(slot, number)?;
                            root.plug(address, plugged)?;
                            address
                        }
                        None => root.plug_next(plugged)?,
                    };
                    (function, address)
                }
                Some(saved) => {
                    let place = saved.functions.iter().find(|place| place.name == name);
                    let place = place.ok_or_else(|| Error::NoSavedDevice(name.clone()))?;
                    let function = VfioUserFunction::restore(opened, ranges.clone(), msi, &place.function);
                    let function = function.map_err(failed)?;
                    let address = FunctionAddress::from_devfn(place.devfn);
                    root.plug(address, Arc::clone(&function) as Arc<dyn PciFunction>)?;
                    (function, address)
                }
            };
            at = Some(address.slot());
            let bus = Arc::downgrade(root);
            let refresh = Box::new(move || {
                if let Some(bus) = bus.upgrade() {
                    bus.refresh(address);
                }
            });
            function.start(refresh, Arc::clone(on_start)).map_err(|error| Error::device(&name, error))?;
            functions_of_all.push(function);
        }
    }
    Ok(functions_of_all)
}
