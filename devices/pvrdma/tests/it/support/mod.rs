//! Shared by the tests: two guests on an engine.

#![allow(dead_code, clippy::unwrap_used)] // Each test uses its part; failing is what tests do.

use dma::HeapMemory;
use hca::names::SegmentId;
use pvrdma::Config;
use pvrdma_testbed::guest::QpOptions;
use pvrdma_testbed::{Cq, Guest, Host, Qp, Region};

/// Bytes of a guest's memory.
pub const SIZE: usize = 2 << 20;
/// Local write, remote write, remote read, remote atomic.
pub const ALL: u32 = 1 | 2 | 4 | 8;

pub type Memory = HeapMemory;

/// A guest with the objects that most tests need.
pub struct Side {
    pub guest: Guest<Memory>,
    pub context: (u32, u32),
    pub pd: u32,
    pub cq: Cq,
    pub gid: [u8; 16],
}

pub fn gid(last: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xFF, 0xFF, 10, 0, 0, last]);
    gid
}

pub fn bare(host: &mut Host<Memory>, last: u8, change: impl FnOnce(&mut Config)) -> Guest<Memory> {
    let mut config = Config::new(format!("vm{last}"), SegmentId(7), [2, 0, 0, 0, 0, last]);
    config.max_uar = 16;
    change(&mut config);
    Guest::new(host, config, HeapMemory::new(SIZE), SIZE as u64)
}

pub fn side(host: &mut Host<Memory>, last: u8, user: bool) -> Side {
    let mut guest = bare(host, last, |_| ());
    guest.probe(host);
    let gid = gid(last);
    guest.bind(host, 0, gid).unwrap();
    let context = if user { guest.context(host) } else { (0, 0) };
    let pd = guest.pd(host, context.1);
    let cq = guest.cq(host, context, 256);
    Side { guest, context, pd, cq, gid }
}

impl Side {
    pub fn qp(&mut self, host: &mut Host<Memory>, options: QpOptions) -> Qp {
        let cq = self.cq.clone();
        self.guest.qp(host, self.context.0, self.pd, (&cq, &cq), None, options).unwrap()
    }

    pub fn region(&mut self, host: &mut Host<Memory>, address: u64, length: u64) -> Region {
        self.guest.register(host, self.pd, address, length, ALL)
    }

    /// Work request, opcode and status of each completion.
    pub fn completions(&self) -> Vec<(u64, u32, u32)> {
        std::iter::from_fn(|| self.guest.poll(&self.cq))
            .map(|entry| (entry.wr_id.get(), entry.opcode.get(), entry.status.get()))
            .collect()
    }
}

/// Runs the engine until it is idle.
pub fn run(host: &mut Host<Memory>, sides: &[&Side]) {
    let mut idle = 0;
    while idle < 60 {
        let uars = sides.iter().map(|side| (side.guest.id, &side.guest.uar));
        idle = if host.turn(uars) { 0 } else { idle + 1 };
    }
}

/// Two guests with a connection.
pub fn connected(user: bool, options: QpOptions) -> (Host<Memory>, Side, Side, Qp, Qp) {
    let mut host = Host::default();
    let (mut a, mut b) = (side(&mut host, 1, user), side(&mut host, 2, user));
    let (qa, qb) = (a.qp(&mut host, options), b.qp(&mut host, options));
    a.guest.to_init(&mut host, &qa, ALL).unwrap();
    b.guest.to_init(&mut host, &qb, ALL).unwrap();
    a.guest.connect(&mut host, &qa, qb.qpn, b.gid).unwrap();
    b.guest.connect(&mut host, &qb, qa.qpn, a.gid).unwrap();
    (host, a, b, qa, qb)
}

pub fn pattern(length: u64, seed: u64) -> Vec<u8> {
    (0..length).map(|i| u8::try_from((i * 31 + seed * 7 + i / 251) % 256).unwrap()).collect()
}
