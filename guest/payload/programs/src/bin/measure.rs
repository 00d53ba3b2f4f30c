//! Runs what the host asks for, one job after the other: the guest's side of `make bench`.
//!
//! vCPU *i* reads [`PORT_HOST`]` + i`; the host answers when it has written a job into the page *i* of free
//! RAM (answer 1) or wants no more (answer 0). The ticks it took lie after the job, and the next read says
//! that they are there. While it waits, a vCPU uses no processor.

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
        // SAFETY: the page lies in free RAM; the host wrote it before it answered.
        let Some(job) = Job::from_bytes(&unsafe { job_at.read_volatile() }) else {
            println!("vCPU {port} was given a job that this program doesn't know");
            return 2;
        };
        // SAFETY: the host gives addresses in free RAM, doorbells and ports that bear it.
        let ticks = unsafe { job.run() };
        // SAFETY: aligned and in the same page.
        unsafe { result_at.write_volatile(ticks) };
    }
    0
}
