//! What a device offers, and what its VM may use of it.

/// What the guest ABI promises. Fixed for the life of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Capabilities {
    /// Queue pair handles are below it; at most 65535, since handles fill 16 bits of a queue pair number.
    pub max_qp: u32,
    /// Work requests per queue.
    pub max_qp_wr: u32,
    /// Scatter-gather elements per request; at most [`crate::work::MAX_SGE`].
    pub max_sge: u32,
    /// Completion queue handles are below it.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Memory region handles are below it; at most 2^24.
    pub max_mr: u32,
    /// Bytes of a memory region.
    pub max_mr_size: u64,
    /// Pages of a fast-register region.
    pub max_fast_register_pages: u32,
    /// Protection domain handles are below it.
    pub max_pd: u32,
    /// Contexts that user processes may open.
    pub max_contexts: u32,
    /// Reads and atomics outstanding per queue pair, either direction.
    pub max_qp_rd_atom: u8,
    /// Shared receive queue handles are below it.
    pub max_srq: u32,
    /// Requests of a shared receive queue.
    pub max_srq_wr: u32,
    /// Scatter-gather elements of a shared receive queue's requests.
    pub max_srq_sge: u32,
    /// Entries of the GID table.
    pub gid_table_len: u32,
    /// Bytes of a message.
    pub max_message_bytes: u32,
    /// Bytes that a datagram carries at most.
    pub port_mtu: u32,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            max_qp: 32_768,
            max_qp_wr: 8192,
            max_sge: 16,
            max_cq: 32_768,
            max_cqe: 65_536,
            max_mr: 65_536,
            max_mr_size: 1 << 30,
            max_fast_register_pages: 128,
            max_pd: 4096,
            max_contexts: 1024,
            max_qp_rd_atom: 16,
            max_srq: 1024,
            max_srq_wr: 8192,
            max_srq_sge: 16,
            gid_table_len: 128,
            max_message_bytes: 1 << 30,
            port_mtu: 4096,
        }
    }
}

/// What a VM may use; changeable at run time. What it has already stays when a limit falls below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Limits {
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Completion queues.
    pub completion_queues: u32,
    /// Shared receive queues.
    pub shared_receive_queues: u32,
    /// Memory regions.
    pub memory_regions: u32,
    /// Protection domains.
    pub protection_domains: u32,
    /// User contexts.
    pub contexts: u32,
    /// Bytes in user memory regions.
    pub registered_bytes: u64,
    /// Messages per second that its queue pairs start; `None` is no limit.
    pub messages_per_second: Option<u64>,
    /// Bytes per second that its queue pairs move as initiators; `None` is no limit.
    pub bytes_per_second: Option<u64>,
}

impl Default for Limits {
    /// Nothing beyond what the capabilities say.
    fn default() -> Self {
        Self {
            queue_pairs: u32::MAX,
            completion_queues: u32::MAX,
            shared_receive_queues: u32::MAX,
            memory_regions: u32::MAX,
            protection_domains: u32::MAX,
            contexts: u32::MAX,
            registered_bytes: u64::MAX,
            messages_per_second: None,
            bytes_per_second: None,
        }
    }
}

/// A token bucket, kept as the time at which all that was spent is paid (generic cell rate algorithm): one word, and
/// nothing to refill.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bucket {
    per_second: Option<u64>,
    paid_at: u64,
}

/// What a bucket may run ahead, nanoseconds: bursts of a millisecond's worth.
const AHEAD: u64 = 1_000_000;

impl Bucket {
    pub fn set_rate(&mut self, per_second: Option<u64>) {
        self.per_second = per_second;
        self.paid_at = 0;
    }

    /// `None` when something may be spent now, else from when on.
    #[inline]
    pub fn blocked_until(&self, now: u64) -> Option<u64> {
        self.per_second?;
        let free = self.paid_at.saturating_sub(AHEAD);
        (free > now).then_some(free)
    }

    /// Spends; may go into debt, which [`Bucket::blocked_until`] then makes the caller sit out.
    #[inline]
    pub fn spend(&mut self, now: u64, units: u64) {
        if let Some(rate) = self.per_second {
            let cost = u128::from(units) * 1_000_000_000 / u128::from(rate.max(1));
            let cost = u64::try_from(cost).unwrap_or(u64::MAX);
            self.paid_at = self.paid_at.max(now).saturating_add(cost);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_rate_and_no_more() {
        let mut bucket = Bucket::default();
        assert_eq!(bucket.blocked_until(0), None);
        bucket.set_rate(Some(1_000_000));
        let (mut now, mut spent) = (5_000_000_000, 0);
        let end = now + 1_000_000_000;
        while now < end {
            match bucket.blocked_until(now) {
                Some(then) => now = then,
                None => {
                    bucket.spend(now, 10);
                    spent += 10;
                }
            }
        }
        assert!((1_000_000..1_002_000).contains(&spent), "{spent}");
    }
}
