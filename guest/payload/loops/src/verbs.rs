//! Work requests as a guest's verbs provider posts them, and polls for their completions: rings in plain memory, and one doorbell
//! store per post. No assembly: the measurement is the device's, not these instructions'.

use core::ptr::{read_volatile, write_volatile};
use core::sync::atomic::{Ordering, fence};

/// [`run`]'s result after a completion with an error.
pub const FAILED: u64 = u64::MAX;
/// [`run`]'s result if no completion arrives for billions of polls.
pub const STUCK: u64 = u64::MAX - 1;

/// Limit of polls without a completion: about ten seconds.
const MAX_EMPTY_POLLS: u64 = 2_000_000_000;
/// Doorbell flag: a send was posted.
const SEND: u32 = 1 << 30;
/// Doorbell flag: a poll found nothing.
const POLL: u32 = 1 << 31;
/// Size of a completion in bytes.
const COMPLETION: u64 = 64;
/// Offset of the status in a completion.
const STATUS: u64 = 20;

/// A queue pair's send side, in guest memory's format for [`run`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SendQueue {
    /// Address of the first slot.
    pub slots: u64,
    /// Address of the tail that the guest writes. The head that the device writes is 4 bytes after it.
    pub indices: u64,
    /// Number of slots; a power of two.
    pub entries: u32,
    /// Size of a slot in bytes.
    pub slot_size: u32,
    /// Address of the request that is posted repeatedly.
    pub template: u64,
    /// Its length in bytes, a multiple of 16.
    pub template_len: u32,
    /// Handle for the doorbell.
    pub handle: u32,
    /// Tail of the last post; starts at the ring's.
    pub tail: u32,
    /// Padding to 64 bytes.
    pub reserved: [u32; 5],
}

/// A completion queue, in guest memory's format for [`run`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CompletionQueue {
    /// Address of the first entry.
    pub entries_at: u64,
    /// Address of the tail that the device writes. The head that the guest writes is 4 bytes after it.
    pub indices: u64,
    /// Number of entries; a power of two.
    pub entries: u32,
    /// Handle for the doorbell.
    pub handle: u32,
    /// Address of the doorbell page of all queues.
    pub doorbells: u64,
}

const _: () = {
    assert!(size_of::<SendQueue>() == 64);
    assert!(size_of::<CompletionQueue>() == 32);
};

/// Posts `operations` requests to the `count` queues in turn, with at most `window` outstanding, and polls the completion queue until
/// all are complete. Returns the ticks, [`FAILED`] or [`STUCK`].
///
/// # Safety
/// `queues` must be an array of `count` [`SendQueue`]s and `completions` a [`CompletionQueue`], with valid addresses. No other code
/// may post or poll meanwhile. `window` must not exceed the entries of any queue.
pub unsafe fn run(queues: u64, count: u64, completions: u64, operations: u64, window: u64) -> u64 {
    // SAFETY: the caller vouches for all addresses; the alignment is that of the structures.
    unsafe {
        let queues = at::<SendQueue>(queues);
        let cq = read_volatile(at::<CompletionQueue>(completions));
        let (cq_tail, cq_head) = (at::<u32>(cq.indices), at::<u32>(cq.indices + 4));
        let qp_doorbell = at::<u32>(cq.doorbells);
        let cq_doorbell = at::<u32>(cq.doorbells + 4);
        let mut head = read_volatile(cq_head);
        let (mut posted, mut done, mut next, mut idle) = (0_u64, 0_u64, 0_u64, 0_u64);
        let started = crate::tsc::start();
        while done < operations {
            while posted < operations && posted - done < window {
                let Ok(index) = usize::try_from(next) else { return FAILED };
                let queue = queues.add(index);
                post(&mut *queue);
                write_volatile(qp_doorbell, SEND | (*queue).handle);
                posted += 1;
                next += 1;
                if next == count {
                    next = 0;
                }
            }
            let tail = read_volatile(cq_tail);
            fence(Ordering::Acquire);
            if tail == head {
                write_volatile(cq_doorbell, POLL | cq.handle);
                idle += 1;
                if idle > MAX_EMPTY_POLLS {
                    return STUCK;
                }
                core::hint::spin_loop();
                continue;
            }
            idle = 0;
            while head != tail {
                let entry = cq.entries_at + u64::from(head & (cq.entries - 1)) * COMPLETION;
                if read_volatile(at::<u32>(entry + STATUS)) != 0 {
                    return FAILED;
                }
                head = (head + 1) & (2 * cq.entries - 1);
                done += 1;
            }
            write_volatile(cq_head, head);
        }
        crate::tsc::end().wrapping_sub(started)
    }
}

/// Writes one request and publishes it.
///
/// # Safety
/// As for [`run`].
#[inline]
unsafe fn post(queue: &mut SendQueue) {
    // SAFETY: the slot is in the ring, and the template has its bytes.
    unsafe {
        let slot = queue.slots + u64::from(queue.tail & (queue.entries - 1)) * u64::from(queue.slot_size);
        let (from, to) = (at::<u128>(queue.template), at::<u128>(slot));
        for block in 0..usize::try_from(queue.template_len / 16).unwrap_or(0) {
            to.add(block).write(from.add(block).read());
        }
        fence(Ordering::Release);
        queue.tail = (queue.tail + 1) & (2 * queue.entries - 1);
        write_volatile(at::<u32>(queue.indices), queue.tail);
    }
}

fn at<T>(address: u64) -> *mut T {
    // x86-64 has 64-bit pointers.
    core::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}
