//! The peers: the same loops in host threads, and system calls as the reference of exits.

#![allow(unsafe_code)] // Jobs carry addresses; system calls are made without the C library's wrappers.

use anyhow::{Context, bail};
use payload_loops::job::Job;
use payload_loops::line::Side;
use payload_loops::tsc;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Barrier;
use std::time::Instant;

/// Pins the calling thread to one CPU.
pub fn pin(cpu: usize) -> anyhow::Result<()> {
    if core_affinity::set_for_current(core_affinity::CoreId { id: cpu }) {
        Ok(())
    } else {
        bail!("A measuring thread can't be put on CPU {cpu}; is it online and allowed?")
    }
}

/// Keeps the machine's CPUs from idling while the file is open: Linux's PM QoS with a wake-up latency of 0. In a VM, the host may
/// move a briefly idle CPU to another's core for some 0.2 s. That one then takes 1.2 to 1.8 times as long. Use it for both sides of a
/// comparison. Returns `None` if unavailable.
pub fn keep_awake() -> Option<std::fs::File> {
    let mut file = std::fs::File::options().write(true).open("/dev/cpu_dma_latency").ok()?;
    std::io::Write::write_all(&mut file, &0_i32.to_ne_bytes()).ok()?;
    Some(file)
}

/// Gives this thread, and later threads (including vCPU threads), priority over ordinary ones, so that other load disturbs less.
/// Returns the outcome; needs privileges.
pub fn prefer_this_process() -> &'static str {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: the structure is read only; 0 is the calling thread.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) };
    if result == 0 { "real-time (SCHED_FIFO 1), both sides" } else { "ordinary" }
}

/// Runs one job per entry, each on a pinned thread, with a common start. Returns the ticks of each.
///
/// # Safety
/// As for [`Job::run`], with addresses of this process.
pub unsafe fn run(jobs: &[(usize, Job)]) -> anyhow::Result<Vec<u64>> {
    let barrier = Barrier::new(jobs.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = jobs
            .iter()
            .map(|(cpu, job)| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let pinned = pin(*cpu);
                    barrier.wait();
                    pinned?;
                    // SAFETY: the caller vouches for the job.
                    Ok(unsafe { job.run() })
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| match thread.join() {
                Ok(ticks) => ticks,
                Err(_) => bail!("A measuring thread panicked"),
            })
            .collect()
    })
}

/// A word on a separate cache line.
#[repr(align(64))]
struct Word(std::sync::atomic::AtomicU64);

/// Returns ticks of `rounds` round trips of a cache line between two CPUs.
pub fn ping_pong(first: usize, second: usize, rounds: u64) -> anyhow::Result<u64> {
    let word = Word(std::sync::atomic::AtomicU64::new(0));
    let address = word.0.as_ptr().expose_provenance() as u64;
    let [left, right] = [Side::First, Side::Second].map(|side| Job::PingPong { address, side, rounds });
    // SAFETY: the word lives until both are done, and no other code uses it.
    let ticks = unsafe { run(&[(first, left), (second, right)]) }?;
    // The later side didn't wait for the other.
    ticks.into_iter().min().context("Nobody played ping-pong")
}

/// Returns ticks of `repeats` copies of `length` bytes between two addresses of this process, on one CPU, by `memcpy`. Uses a
/// separate thread: the caller's thread would stay pinned to a CPU that others of the same real-time priority may never leave.
pub fn copy(cpu: usize, target: u64, source: u64, length: u64, repeats: u64) -> anyhow::Result<u64> {
    let (address_of_target, address_of_source) = (usize::try_from(target)?, usize::try_from(source)?);
    let length = usize::try_from(length)?;
    let copies = move || {
        pin(cpu)?;
        let target = std::ptr::with_exposed_provenance_mut::<u8>(address_of_target);
        let source = std::ptr::with_exposed_provenance::<u8>(address_of_source);
        let started = tsc::start();
        for _ in 0..repeats {
            // SAFETY: the caller's buffers: mapped RAM of two VMs that are idle meanwhile.
            unsafe { std::ptr::copy_nonoverlapping(source, target, length) };
            std::hint::black_box(target);
        }
        Ok(tsc::end().wrapping_sub(started))
    };
    match std::thread::scope(|scope| scope.spawn(copies).join()) {
        Ok(ticks) => ticks,
        Err(_) => bail!("The copying thread panicked"),
    }
}

/// Returns ticks of `times` calls of the cheapest system call.
pub fn null_system_calls(times: u64) -> u64 {
    let started = tsc::start();
    for _ in 0..times {
        // SAFETY: getppid takes nothing and can't fail.
        unsafe { libc::syscall(libc::SYS_getppid) };
    }
    tsc::end().wrapping_sub(started)
}

/// Returns ticks of `times` writes to an eventfd.
pub fn eventfd_writes(fd: BorrowedFd<'_>, times: u64) -> anyhow::Result<u64> {
    let one = 1_u64;
    let started = tsc::start();
    for _ in 0..times {
        // SAFETY: the eight bytes are read from a local variable.
        let written = unsafe { libc::write(fd.as_raw_fd(), (&raw const one).cast(), 8) };
        if written != 8 {
            return Err(std::io::Error::last_os_error()).context("An eventfd could not be written");
        }
    }
    Ok(tsc::end().wrapping_sub(started))
}

/// Measures the time stamp counter's frequency in kHz over a fifth of a second.
pub fn tsc_khz() -> f64 {
    let (started, ticks) = (Instant::now(), tsc::start());
    while started.elapsed().as_millis() < 200 {
        std::hint::spin_loop();
    }
    let ticks = tsc::end().wrapping_sub(ticks);
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let khz = ticks as f64 / started.elapsed().as_secs_f64() / 1000.0;
    khz
}
