//! Measures memory copy bandwidth. Arguments: size (64K), total bytes to copy (1G), variant (all of them).

#![no_std]
#![no_main]
#![allow(unsafe_code)] // Copies between raw addresses in free RAM.

use payload_runtime::loops::copy::{self, BLOCK, Variant};
use payload_runtime::{Vcpu, println};

payload_runtime::entry!(main);

/// Buffers start at a 2 MiB boundary.
const ALIGNMENT: u64 = 2 << 20;

fn main(vcpu: Vcpu) -> u32 {
    if vcpu.index() != 0 {
        return 0;
    }
    let size = vcpu.number(1, 64 << 10);
    let total = vcpu.number(2, 1 << 30);
    let wanted = vcpu.arguments().nth(3);
    if size == 0 || !size.is_multiple_of(BLOCK) {
        println!("Size {size} isn't a positive multiple of {BLOCK}");
        return 2;
    }
    if wanted.is_some_and(|name| Variant::from_name(name).is_none()) {
        println!(
            "There is no variant '{}'; there are rep_movsb, sse_stream, avx and avx_stream",
            wanted.unwrap_or("")
        );
        return 2;
    }
    let free = vcpu.info().free;
    let source = free.start.next_multiple_of(ALIGNMENT);
    let fits = size
        .checked_next_multiple_of(ALIGNMENT)
        .and_then(|room| Some((source.checked_add(room)?, source.checked_add(room.checked_mul(2)?)?)))
        .filter(|(_, end)| *end <= free.start + free.size);
    let Some((target, _)) = fits else {
        println!(
            "Two buffers of {size} bytes don't fit into the {} bytes of free RAM; give the VM more",
            free.size
        );
        return 2;
    };
    let repeats = (total / size).max(1);
    for variant in Variant::ALL {
        if wanted.is_some_and(|name| name != variant.name()) {
            continue;
        }
        if variant.needs_avx() && !vcpu.has_avx() {
            println!("{}: not on this processor", variant.name());
            continue;
        }
        // SAFETY: both ranges are in free RAM, which only this program uses, and don't overlap. Size and alignment were checked. The
        // first copy maps the pages.
        let ticks = unsafe {
            copy::once(variant, target, source, size);
            copy::repeat(variant, target, source, size, repeats)
        };
        let nanoseconds = vcpu.nanoseconds(ticks);
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let rate = (size * repeats) as f64 / nanoseconds;
        println!("{:10} {size:>10} bytes: {rate:.2} GB/s", variant.name());
    }
    0
}
