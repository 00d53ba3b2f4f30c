//! Cost of an idle daemon.
#![allow(clippy::unwrap_used)] // A test that can't continue has failed.

#[path = "it/common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use common::driver::Guest;
use common::monitor::Machine;
use common::{daemon, wait_until};

/// Number of the guest's queue pairs, besides the one that was in use.
const QUEUE_PAIRS: u32 = 30_000;
/// Duration of the measurement.
const WHILE: Duration = Duration::from_secs(10);
/// Limit, as a share of one CPU: less rounds to 0.0 %.
const NOTHING: f64 = 0.000_5;

fn gid(last: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    (gid[10], gid[11], gid[12], gid[15]) = (0xFF, 0xFF, 10, last);
    gid
}

/// CPU time of this process: the daemon's with all its threads, and that of both monitors, which wait.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

/// 30,000 connected queue pairs, after traffic that made the engine poll: no CPU time once the traffic has ended.
#[test]
fn an_idle_daemon_with_thirty_thousand_queue_pairs_uses_no_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(folder.path());
    let [(a, mut guest_a), (b, mut guest_b)] = ["a", "b"].map(|name| {
        let machine = Machine::new(name, "blue");
        (machine.connect(daemon.socket(), true), Guest::new(&machine))
    });
    guest_a.probe(&a, gid(1));
    guest_b.probe(&b, gid(2));
    let (left, right) = (guest_a.endpoint(&a, 1, 4), guest_b.endpoint(&b, 1, 4));
    guest_a.connect(&a, &left, right.qp.1, gid(2));
    guest_b.connect(&b, &right, left.qp.1, gid(1));
    let began = Instant::now();
    guest_a.idle_queue_pairs(&a, &left, QUEUE_PAIRS, right.qp.1, gid(2));
    println!("{QUEUE_PAIRS} queue pairs made and connected in {:.1?}", began.elapsed());

    let mut wr_id = 0;
    wait_until("doorbells in memory", || {
        assert!(guest_a.post_write(&a, &left, wr_id, 64, (right.buffer.address, right.buffer.rkey)));
        wait_until("a completion", || {
            guest_a.poll(&a, &left).is_some_and(|entry| (entry.status.get(), entry.wr_id.get()) == (0, wr_id))
        });
        wr_id += 1;
        a.doorbells.is_mapped()
    });
    wait_until("trapped doorbells", || !a.doorbells.is_mapped() && !b.doorbells.is_mapped());
    // Earlier work is complete.
    std::thread::sleep(Duration::from_secs(1));

    let (began, before) = (Instant::now(), cpu_time());
    std::thread::sleep(WHILE);
    let (used, elapsed) = (cpu_time() - before, began.elapsed());
    let share = used.as_secs_f64() / elapsed.as_secs_f64();
    println!(
        "idle daemon, {QUEUE_PAIRS} queue pairs: {used:.1?} of CPU in {elapsed:.1?}, {:.3} % of one CPU",
        share * 100.0
    );
    assert!(share < NOTHING, "{:.3} %", share * 100.0);
}
