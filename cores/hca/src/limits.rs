//! Capabilities of a device, and quotas and rates of its VM.

/// Capabilities that the guest ABI announces. Fixed for the life of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Capabilities {
    /// Exclusive upper bound of queue pair handles; at most 65535, since handles are 16 bits of a queue pair number.
    pub max_qp: u32,
    /// Limit of work requests per queue.
    pub max_qp_wr: u32,
    /// Limit of scatter-gather elements per request; at most [`crate::work::MAX_SGE`].
    pub max_sge: u32,
    /// Exclusive upper bound of completion queue handles.
    pub max_cq: u32,
    /// Limit of a completion queue's entries.
    pub max_cqe: u32,
    /// Exclusive upper bound of memory region handles; at most 2^24.
    pub max_mr: u32,
    /// Limit of a memory region's length, bytes.
    pub max_mr_size: u64,
    /// Limit of pages of a fast-register region.
    pub max_fast_register_pages: u32,
    /// Exclusive upper bound of protection domain handles.
    pub max_pd: u32,
    /// Limit of contexts of user processes.
    pub max_contexts: u32,
    /// Limit of READs and atomics outstanding per queue pair, in either direction.
    pub max_qp_rd_atom: u8,
    /// Exclusive upper bound of shared receive queue handles.
    pub max_srq: u32,
    /// Limit of requests of a shared receive queue.
    pub max_srq_wr: u32,
    /// Limit of scatter-gather elements of a shared receive queue's requests.
    pub max_srq_sge: u32,
    /// Entries of the GID table.
    pub gid_table_len: u32,
    /// Limit of a message, bytes.
    pub max_message_bytes: u32,
    /// Limit of a datagram's payload, bytes.
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

/// Quotas and rates of a VM, changeable at run time. Objects beyond a lowered quota stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Limits {
    /// Quota of queue pairs.
    pub queue_pairs: u32,
    /// Quota of completion queues.
    pub completion_queues: u32,
    /// Quota of shared receive queues.
    pub shared_receive_queues: u32,
    /// Quota of memory regions.
    pub memory_regions: u32,
    /// Quota of protection domains.
    pub protection_domains: u32,
    /// Quota of user contexts.
    pub contexts: u32,
    /// Quota of bytes in user memory regions.
    pub registered_bytes: u64,
    /// Messages per second that its queue pairs may start; `None` is no limit.
    pub messages_per_second: Option<u64>,
    /// Bytes per second that its queue pairs may move as initiators; `None` is no limit.
    pub bytes_per_second: Option<u64>,
}

impl Default for Limits {
    /// No restriction beyond the capabilities.
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

/// A token bucket, stored as the time at which all debt is paid (generic cell rate algorithm): one word, and no refill.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bucket {
    per_second: Option<u64>,
    paid_at: u64,
}

/// Burst allowance, nanoseconds: a millisecond's worth.
const AHEAD: u64 = 1_000_000;

impl Bucket {
    pub fn set_rate(&mut self, per_second: Option<u64>) {
        self.per_second = per_second;
        self.paid_at = 0;
    }

    /// `None` when units may be spent now, else the time from which on they may be.
    #[inline]
    pub fn blocked_until(&self, now: u64) -> Option<u64> {
        self.per_second?;
        let free = self.paid_at.saturating_sub(AHEAD);
        (free > now).then_some(free)
    }

    /// Spends `units`. May go into debt, which [`Bucket::blocked_until`] makes the caller wait out.
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
