//! A machine whose guest has one queue pair and one buffer.

use std::time::{Duration, Instant};

use super::driver::{Endpoint, Guest};
use super::monitor::{Machine, Monitor};

pub fn gid(last: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    (gid[10], gid[11], gid[12], gid[15]) = (0xFF, 0xFF, 10, last);
    gid
}

/// A machine with its monitor, driver and one endpoint in INIT.
pub struct Vm {
    pub machine: Machine,
    pub monitor: Monitor,
    pub guest: Guest,
    pub endpoint: Endpoint,
    pub gid: [u8; 16],
}

pub fn vm(daemon: &std::path::Path, name: &str, last: u8, doorbell_mode: bool) -> Vm {
    let machine = Machine::new(name, "blue");
    let monitor = machine.connect(daemon, doorbell_mode);
    let mut guest = Guest::new(&machine);
    guest.probe(&monitor, gid(last));
    let endpoint = guest.endpoint(&monitor, 1, 4);
    Vm { machine, monitor, guest, endpoint, gid: gid(last) }
}

pub fn connect(a: &Vm, b: &Vm) {
    a.guest.connect(&a.monitor, &a.endpoint, b.endpoint.qp.1, b.gid);
    b.guest.connect(&b.monitor, &b.endpoint, a.endpoint.qp.1, a.gid);
}

impl Vm {
    /// Posts an RDMA WRITE to a peer's buffer; `false` when the queue is full. [`Vm::poll`] waits for its completion.
    pub fn write(&self, to: &Vm, wr_id: u64, length: u32) -> bool {
        let target = (to.endpoint.buffer.address, to.endpoint.buffer.rkey);
        self.guest.post_write(&self.monitor, &self.endpoint, wr_id, length, target)
    }

    /// Polls busily, as applications do. Returns the completion's status.
    pub fn poll(&self, wr_id: u64) -> u32 {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(entry) = self.guest.poll(&self.monitor, &self.endpoint) {
                assert_eq!(entry.wr_id.get(), wr_id);
                return entry.status.get();
            }
            assert!(Instant::now() < deadline, "no completion of {wr_id}");
            std::thread::yield_now();
        }
    }
}
