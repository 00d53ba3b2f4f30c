//! Measures the cost of leaving the guest: a port write and a store to device memory, which exit to the monitor, and a doorbell,
//! which stays in the kernel. Argument: number of each (1000).

#![no_std]
#![no_main]
#![allow(unsafe_code)] // Stores to device memory.

use payload_runtime::loops::access;
use payload_runtime::{Vcpu, abi, println};

payload_runtime::entry!(main);

fn main(vcpu: Vcpu) -> u32 {
    if vcpu.index() != 0 {
        return 0;
    }
    let times = vcpu.number(1, 1000).max(1);
    let info = vcpu.info();
    let show = |what: &str, ticks: u64| {
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let each = vcpu.nanoseconds(ticks) / times as f64 / 1000.0;
        println!("{what}: {each:.2} us");
    };
    // SAFETY: an unserved port of the payload machine; writes have no effect.
    show("port write, to the monitor", unsafe { access::port_out(abi::PORT_HOST, times) });
    // SAFETY: the last word of the doorbell page is never a doorbell; stores there have no effect.
    let store = unsafe { access::store(info.doorbell.start + info.doorbell.size - 4, times) };
    show("store, to the monitor", store);
    if info.doorbell_count > 0 {
        // SAFETY: the first doorbell.
        show("doorbell, in the kernel", unsafe { access::store(info.doorbell.start, times) });
    }
    0
}
