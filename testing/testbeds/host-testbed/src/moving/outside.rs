//! A peer outside of the cluster: a host without a directory, whose guest is connected with each VM by frames on their common segment. It
//! learns of no migration. The segment is simulated here: it passes frames from VMs' current hosts to the NIC with the destination address,
//! and loses some.

use std::collections::BTreeMap;
use std::sync::Arc;

use dma::MappedMemory;
use hca::names::DeviceId;
use host::transport::{Transports, WirePort};
use nomad::VmId;
use pvrdma_testbed::guest::QpOptions;
use pvrdma_testbed::{Cq, Guest, Host};
use vmxnet3::Companion;

use super::directory::{OUTSIDE, config, gid, memory};
use super::traffic::{End, REGION};
use super::{ALL, Cluster, SEGMENT, SEGMENT_NAME};

/// A NIC's port, and the segment's end of it.
pub(super) struct Port {
    pub port: Arc<WirePort>,
    end: Box<dyn Companion>,
}

impl Port {
    /// A port that isn't in its segment yet.
    pub fn new() -> Self {
        let port = Arc::new(WirePort::default());
        Self { end: port.end(), port }
    }

    pub fn connect(&self) {
        self.port.connect(Box::new(|| {}));
    }
}

/// The ports of a host's devices.
pub(super) type Ports = BTreeMap<DeviceId, Port>;

/// Counts of the segment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Frames {
    /// RoCEv2 frames that arrived.
    pub passed: u64,
    /// RoCEv2 frames that were lost.
    pub lost: u64,
    /// Other frames: announcements of arrived VMs.
    pub announced: u64,
    /// Frames with a VM's address from a host where it doesn't run.
    pub strays: u64,
}

/// The host, its guest, and the segment.
pub(super) struct Outside {
    host: Host<MappedMemory>,
    transports: Transports,
    port: Port,
    guest: Guest<MappedMemory>,
    cq: Cq,
    pub ends: BTreeMap<VmId, End>,
    loss_percent: u64,
    pub frames: Frames,
}

impl Outside {
    /// The peer with a queue pair for each VM.
    pub fn new(vms: u32, loss_percent: u64) -> Self {
        let mut host = Host::default();
        let mut transports = Transports::without_directory().unwrap();
        let size = (u64::from(vms) * (REGION + (64 << 10)) + (512 << 10)).next_multiple_of(1 << 16);
        let mut guest = Guest::new(&mut host, config(OUTSIDE), memory(size), size);
        transports.attach(&mut host.engine, guest.id, "outside", SEGMENT_NAME, SEGMENT);
        let port = Port::new();
        transports.attach_wire(&mut host.engine, guest.id, SEGMENT, Arc::clone(&port.port));
        port.connect();
        guest.probe(&mut host);
        guest.bind(&mut host, 0, gid(OUTSIDE)).unwrap();
        let context = guest.context(&mut host);
        let pd = guest.pd(&mut host, context.1);
        let cq = guest.cq(&mut host, context, 1024);
        let mut ends = BTreeMap::new();
        for vm in (1..=vms).map(VmId) {
            let qp = guest.qp(&mut host, context.0, pd, (&cq, &cq), None, QpOptions::default()).unwrap();
            guest.to_init(&mut host, &qp, ALL).unwrap();
            let region =
                guest.register(&mut host, pd, 0x7000_0000 + u64::from(vm.0) * 0x10_0000, REGION, ALL);
            ends.insert(vm, End::new(qp, region));
        }
        Self { host, transports, port, guest, cq, ends, loss_percent, frames: Frames::default() }
    }

    fn turn(&mut self, now: u64, most: u64) {
        self.host.now = now;
        self.transports.receive(&mut self.host.engine, now);
        self.host.turn(std::iter::once((self.guest.id, &self.guest.uar)));
        self.host.now = now;
        self.transports.carry(&mut self.host.engine, now);
        while let Some(entry) = self.guest.take(&self.cq) {
            let qp = u32::try_from(entry.qp.get()).unwrap();
            let end = self.ends.values_mut().find(|end| end.qp.handle == qp).unwrap();
            end.complete(&self.guest, entry.wr_id.get(), entry.opcode.get(), entry.status.get());
        }
        for end in self.ends.values_mut() {
            end.post(&self.guest, most);
        }
    }

    pub fn check_words(&mut self, operations: u64) {
        for end in self.ends.values_mut() {
            end.check_words(&self.guest, operations);
        }
    }
}

/// Frames that a port sends now.
fn sent(port: &mut Port) -> Vec<Vec<u8>> {
    let (mut frames, mut frame) = (Vec::new(), Vec::new());
    while port.end.next(&mut frame) {
        frames.push(std::mem::take(&mut frame));
    }
    frames
}

fn give(port: &mut Port, frame: &[u8]) -> bool {
    let wants = port.end.wants(&frame[..frame.len().min(256)]);
    if wants {
        port.end.take(frame);
    }
    wants
}

impl Cluster {
    /// As [`Cluster::new`]; each VM is also connected with a peer outside of the cluster by frames, of which `loss_percent` are lost.
    #[must_use]
    pub fn with_outside(hosts: usize, vms: u32, seed: u64, loss_percent: u64) -> Self {
        Self::make(hosts, vms, seed, Some(Outside::new(vms, loss_percent)), false)
    }

    /// Counts of the segment.
    #[must_use]
    pub fn frames(&self) -> Frames {
        self.outside.as_ref().map(|outside| outside.frames).unwrap_or_default()
    }

    /// Connects a VM's queue pair with the peer outside.
    pub(super) fn connect_outside(&mut self, vm: VmId) {
        let Some(outside) = &mut self.outside else { return };
        let found = self.vms.get_mut(&vm).unwrap();
        let (there, here) = (outside.ends.get_mut(&vm).unwrap(), found.ends.get_mut(&OUTSIDE).unwrap());
        here.remote = (there.region.address, there.region.rkey);
        there.remote = (here.region.address, here.region.rkey);
        let machine = &mut self.machines[found.on];
        found.guest.connect(&mut machine.host, &here.qp, there.qp.qpn, gid(OUTSIDE)).unwrap();
        outside.guest.connect(&mut outside.host, &there.qp, here.qp.qpn, gid(vm)).unwrap();
    }

    /// Runs the peer, and forwards frames on the segment.
    pub(super) fn turn_outside(&mut self, most: u64) {
        let now = self.now();
        let Some(mut outside) = self.outside.take() else { return };
        outside.turn(now, most);
        let mut frames = outside.frames;
        for index in 0..self.machines.len() {
            let here = self.machines[index].here.clone();
            let mut ports = std::mem::take(&mut self.machines[index].ports);
            for (device, port) in &mut ports {
                let runs = here.iter().any(|(vm, at)| {
                    let found = &self.vms[vm];
                    at == device && found.on == index && found.running
                });
                for frame in sent(port) {
                    frames.strays += u64::from(!runs);
                    if frame[12..14] == [0x08, 0x06] {
                        frames.announced += 1;
                    } else if self.roll(100) < outside.loss_percent {
                        frames.lost += 1;
                    } else {
                        assert!(give(&mut outside.port, &frame), "a frame is for nobody");
                        frames.passed += 1;
                    }
                }
            }
            self.machines[index].ports = ports;
        }
        for frame in sent(&mut outside.port) {
            if self.roll(100) < outside.loss_percent {
                frames.lost += 1;
                continue;
            }
            // As a bridge without learnt addresses: to all, of which one has the address, or none while the VM is on its way.
            for machine in &mut self.machines {
                for port in machine.ports.values_mut() {
                    frames.passed += u64::from(give(port, &frame));
                }
            }
        }
        outside.frames = frames;
        self.outside = Some(outside);
    }
}
