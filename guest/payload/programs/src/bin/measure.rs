//! Runs the host's jobs in sequence: the guest's side of `make bench`.
//!
//! vCPU *i* reads [`PORT_HOST`]` + i`. The host answers 1 when it has written a job into page *i* of free RAM, and 0 if there are no
//! more. The ticks are stored after the job, and the next read reports them. While it waits, a vCPU uses no processor.

#![no_std]
#![no_main]
#![allow(unsafe_code)] // Jobs and results lie in memory that the host writes.

use payload_runtime::abi::{PORT_HOST, PORT_HOST_COUNT};
use payload_runtime::loops::job::{JOB_SIZE, Job};
use payload_runtime::{Vcpu, pointer_to, ports, println};

payload_runtime::entry!(main);

fn main(vcpu: Vcpu) -> u32 {
    let Some(port) = u16::try_from(vcpu.index()).ok().filter(|index| *index < PORT_HOST_COUNT) else {
        return 0;
    };
    let page = vcpu.info().free.start.next_multiple_of(4096) + u64::from(port) * 4096;
    let job_at = pointer_to::<[u8; JOB_SIZE]>(page);
    let result_at = pointer_to::<u64>(page + JOB_SIZE as u64);
    while ports::read(PORT_HOST + port) == 1 {
        // SAFETY: the page is in free RAM; the host wrote it before its answer.
        let Some(job) = Job::from_bytes(&unsafe { job_at.read_volatile() }) else {
            println!("vCPU {port} was given a job that this program doesn't know");
            return 2;
        };
        // SAFETY: the host's addresses are in free RAM, and its doorbells and ports tolerate the accesses.
        let ticks = unsafe { job.run() };
        // SAFETY: aligned and in the same page.
        unsafe { result_at.write_volatile(ticks) };
    }
    0
}
