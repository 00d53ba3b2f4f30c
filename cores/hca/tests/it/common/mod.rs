//! Two guests with a connection.

#![allow(dead_code)] // Each test program uses its part.
#![allow(clippy::unwrap_used)] // For tests only.

use dma::{Dma, HeapMemory};
use hca::MrInfo;
use hca::attributes::{Access, QpAttributes, QpKind, QpState};
use hca::work::{SendRequest, Sge, Status};
use hca_testbed::{Connected, Guest, World};

/// RAM of a guest, bytes.
pub const SIZE: u64 = 1 << 20;

pub fn sge(address: u64, length: u32, lkey: u32) -> Sge {
    Sge { address, length, lkey }
}

/// Consumes completions: their `wr_id` and status.
pub fn statuses(at: &Connected) -> Vec<(u64, Status)> {
    at.completions.drain().into_iter().map(|done| (done.wr_id, done.status)).collect()
}

/// Two guests, a queue pair each, all their RAM registered.
pub struct Pair {
    pub world: World,
    pub a: Guest,
    pub b: Guest,
    pub left: Connected,
    pub right: Connected,
    pub left_mr: MrInfo,
    pub right_mr: MrInfo,
    kind: QpKind,
}

impl Pair {
    /// Not connected.
    pub fn raw(kind: QpKind) -> Self {
        let mut world = World::default();
        let size = usize::try_from(SIZE).unwrap();
        let (a, b) = (world.guest(HeapMemory::new(size)), world.guest(HeapMemory::new(size)));
        let access = Access::all() - Access::ZERO_BASED;
        let (left_mr, right_mr) = (world.register(&a, 0, SIZE, access), world.register(&b, 0, SIZE, access));
        let (left, right) = (world.queue_pair(&a, kind, None), world.queue_pair(&b, kind, None));
        Self { world, a, b, left, right, left_mr, right_mr, kind }
    }

    /// Connected, in RTS.
    pub fn new(kind: QpKind) -> Self {
        let mut pair = Self::raw(kind);
        pair.world.join(&pair.a, &pair.left, &pair.b, &pair.right, kind);
        pair
    }

    pub fn raise_left(&mut self, to: QpState, with: &QpAttributes) {
        self.world.raise(self.left.device, self.left.qp.handle, self.kind, to, with);
    }

    pub fn raise_right(&mut self, to: QpState) {
        let with = World::<HeapMemory>::attributes(self.a.gid, self.left.qp.qpn);
        self.world.raise(self.right.device, self.right.qp.handle, self.kind, to, &with);
    }

    pub fn left_sge(&self, address: u64, length: u32) -> Sge {
        sge(address, length, self.left_mr.lkey)
    }

    /// Posts on the left, and polls until the engine is idle.
    pub fn send(&mut self, request: SendRequest) {
        let left = self.left.clone();
        self.world.send(&left, request);
        self.world.settle();
    }

    /// Posts a receive on the right.
    pub fn receive(&mut self, wr_id: u64, buffers: &[(u64, u32)]) {
        let lkey = self.right_mr.lkey;
        let sges: Vec<Sge> = buffers.iter().map(|(address, length)| sge(*address, *length, lkey)).collect();
        let right = self.right.clone();
        self.world.receive(&right, wr_id, &sges);
    }

    pub fn fill_left(&self, address: u64, bytes: &[u8]) {
        self.a.memory.write(address, bytes).unwrap();
    }

    pub fn fill_right(&self, address: u64, bytes: &[u8]) {
        self.b.memory.write(address, bytes).unwrap();
    }

    pub fn left_bytes(&self, address: u64, len: usize) -> Vec<u8> {
        bytes(&self.a.memory, address, len)
    }

    pub fn right_bytes(&self, address: u64, len: usize) -> Vec<u8> {
        bytes(&self.b.memory, address, len)
    }
}

fn bytes(memory: &HeapMemory, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.read(address, &mut bytes).unwrap();
    bytes
}
