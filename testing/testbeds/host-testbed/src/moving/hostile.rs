//! Hostile saved state at a destination. Whatever the bytes are, each object is refused or restored, and an engine that runs the restored
//! objects does no harm.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use host::migration::{Destination, MigrationError, Parts, Place, Source};
use host::transport::Transports;
use nomad::objects::Piece;
use nomad::{HostId, VmId};
use pvrdma_testbed::{Host, Lines};

use super::{Cluster, LiveDirectory, SEGMENT, SEGMENT_NAME, config, memory};

/// Size of the guest's memory, bytes.
const SIZE: u64 = 1 << 20;
/// Polls of an engine that runs restored objects.
const POLLS: u32 = 64;

/// The pieces of a VM's HCA with everything in use: remote and local connections, with requests in flight.
pub fn pieces(seed: u64) -> Vec<Piece> {
    let mut cluster = Cluster::new(2, 3, seed);
    for _ in 0..200 {
        cluster.turn(10_000);
    }
    let vm = VmId(1);
    let mut pieces = Vec::new();
    let machine = &mut cluster.machines[0];
    let device = machine.here[&vm];
    let mut source = Source::begin(&mut machine.parts(), device);
    source.stop(&mut machine.parts(), &cluster.vms[&vm].guest.uar, &Lines::default()).unwrap();
    source.round(&mut machine.parts(), |piece| pieces.push(piece));
    pieces
}

/// Passes these pieces to a destination, and runs the restored device.
///
/// # Errors
/// The refusal.
pub fn arrive(pieces: &[Piece]) -> Result<(), MigrationError> {
    let vm = VmId(1);
    let address = "127.0.0.1:0".parse().unwrap();
    let places = Mutex::new(HashMap::new());
    let directory = Arc::new(LiveDirectory { hosts: vec![address], places, pin: None });
    for other in (1..4).map(VmId) {
        directory.set(other, HostId(1));
    }
    let mut transports = Transports::open(Arc::clone(&directory) as _, address, None).unwrap();
    let mut host = Host::default();
    let place =
        Place { vm: host::transport::VmId(vm.0), segment: SEGMENT_NAME.to_owned(), segment_id: SEGMENT };
    let Host { engine, devices, now, .. } = &mut host;
    let mut parts = Parts { engine, devices, transports: &mut transports, now: *now };
    let mut arrival = Destination::begin(&mut parts, config(vm), memory(SIZE), &place)?;
    for piece in pieces {
        if let Err(refused) = arrival.take(&mut parts, piece.clone()) {
            arrival.discard(&mut parts);
            return Err(refused);
        }
    }
    let device = arrival.start(&mut parts)?;
    host.lines.insert(device, Lines::default());
    let uar = dma::HeapMemory::new(1 << 16);
    for _ in 0..POLLS {
        transports.receive(&mut host.engine, host.now);
        host.turn([(device, &uar)]);
        transports.carry(&mut host.engine, host.now);
        host.now += 1_000_000;
    }
    Ok(())
}
