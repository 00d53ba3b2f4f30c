//! Configuration of a device, and its capabilities.

use hca::DeviceConfig;
use hca::VerbsError;
use hca::names::SegmentId;
use hca::{Capabilities, Limits};

use super::doorbells::DoorbellMode;
use crate::abi::pci;
use crate::abi::shared_region::{DeviceCapabilities, GID_TYPE_ROCE_V2};
use crate::decode::MAX_FAST_REGISTER_PAGES;

/// Configuration of a device.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name in logs and reports.
    pub name: String,
    /// The isolated network of the device.
    pub segment: SegmentId,
    /// Node GUID, unique per device; usually the EUI-64 of the MAC.
    pub node_guid: u64,
    /// MAC of the paired Ethernet function.
    pub mac: [u8; 6],
    /// MTU of the paired Ethernet function, bytes.
    pub mtu: u32,
    /// Number of UAR pages: a power of two, at most 2^16. One is the guest kernel's, each other one is for a user context.
    /// [`Capabilities::max_contexts`] follows it.
    pub max_uar: u32,
    /// Capabilities of the device.
    pub capabilities: Capabilities,
    /// Quotas and rates of the VM.
    pub limits: Limits,
    /// How doorbells reach the device.
    pub doorbells: DoorbellMode,
    /// Interval at which the queues of all live contexts are polled, nanoseconds. The guest's kernel posts requests without a doorbell when
    /// posting fails half-way.
    pub full_scan_interval: u64,
}

impl Config {
    /// A device with the default capabilities and no quotas, whose node GUID derives from its MAC.
    #[must_use]
    pub fn new(name: impl Into<String>, segment: SegmentId, mac: [u8; 6]) -> Self {
        let [a, b, c, d, e, f] = mac;
        Self {
            name: name.into(),
            segment,
            node_guid: u64::from_be_bytes([a ^ 2, b, c, 0xFF, 0xFE, d, e, f]),
            mac,
            mtu: 1500,
            max_uar: 512,
            capabilities: Capabilities {
                max_qp: 32_768,
                max_cq: 65_536,
                max_pd: 32_768,
                ..Capabilities::default()
            },
            limits: Limits::default(),
            doorbells: DoorbellMode::Shared,
            full_scan_interval: 500_000_000,
        }
    }

    /// Size of BAR2, bytes.
    #[must_use]
    pub fn uar_bar_size(&self) -> u64 {
        pci::uar_bar_size(self.max_uar)
    }

    /// Refuses values that the guest's driver can't handle.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let capabilities = &self.capabilities;
        let range = |what, value: u32, from: u32, to: u32| {
            if (from..=to).contains(&value) {
                Ok(())
            } else {
                Err(ConfigError::Range { what, value, from, to })
            }
        };
        if !self.max_uar.is_power_of_two() {
            return Err(ConfigError::UarPages(self.max_uar));
        }
        range("the number of UAR pages", self.max_uar, 2, 1 << 16)?;
        // The provider indexes a table of max_qp & 0xFFFF entries with 16 bits of the handle.
        range("max_qp", capabilities.max_qp, 2, 32_768)?;
        range("max_cq", capabilities.max_cq, 2, 1 << 24)?;
        range("max_srq", capabilities.max_srq, 0, 1 << 24)?;
        // Handles are packed with a port number into address vectors.
        range("max_pd", capabilities.max_pd, 2, 1 << 24)?;
        range("max_mr", capabilities.max_mr, 2, 1 << 24)?;
        range("max_sge", capabilities.max_sge, 2, u32::try_from(hca::work::MAX_SGE).unwrap_or(u32::MAX))?;
        range("max_srq_sge", capabilities.max_srq_sge, 0, capabilities.max_sge)?;
        // Linux's `ib_mad` needs these.
        range("max_qp_wr", capabilities.max_qp_wr, 512, 1 << 16)?;
        range("max_cqe", capabilities.max_cqe, 1024, 1 << 22)?;
        range("gid_table_len", capabilities.gid_table_len, 1, 256)?;
        range("max_fast_register_pages", capabilities.max_fast_register_pages, 0, MAX_FAST_REGISTER_PAGES)
    }

    pub(super) fn for_engine(&self) -> DeviceConfig {
        DeviceConfig {
            name: self.name.clone(),
            segment: self.segment,
            limits: self.limits,
            // The engine's handles are below its limit and never 0; the number of UAR pages bounds contexts besides.
            capabilities: Capabilities { max_contexts: self.max_uar, ..self.capabilities },
        }
    }

    /// The capabilities that the guest reads. None changes while a driver is loaded.
    pub(super) fn guest_capabilities(&self) -> DeviceCapabilities {
        let offered = &self.capabilities;
        let atomics = u32::from(offered.max_qp_rd_atom);
        DeviceCapabilities {
            firmware_version: (1 << 32).into(),
            node_guid: self.node_guid.into(),
            system_image_guid: self.node_guid.into(),
            max_mr_size: offered.max_mr_size.into(),
            page_sizes: 0x1000.into(),
            atomic_argument_sizes: 8.into(),
            extended_mask: 0.into(),
            flags2: 0.into(),
            max_fa_bit_boundary: 0.into(),
            log_max_atomic_inline: 0.into(),
            vendor_id: u32::from(pci::VENDOR).into(),
            vendor_part_id: u32::from(pci::DEVICE).into(),
            hardware_version: 1.into(),
            max_qp: offered.max_qp.into(),
            max_qp_wr: offered.max_qp_wr.into(),
            flags: 0.into(),
            max_sge: offered.max_sge.into(),
            max_sge_rd: offered.max_sge.into(),
            max_cq: offered.max_cq.into(),
            max_cqe: offered.max_cqe.into(),
            max_mr: offered.max_mr.into(),
            max_pd: offered.max_pd.into(),
            max_qp_rd_atom: atomics.into(),
            max_ee_rd_atom: 0.into(),
            max_res_rd_atom: 0.into(),
            max_qp_init_rd_atom: atomics.into(),
            unused: [0.into(); 9],
            max_ah: 65_536.into(),
            max_fmr: 0.into(),
            max_map_per_fmr: 0.into(),
            max_srq: offered.max_srq.into(),
            max_srq_wr: offered.max_srq_wr.into(),
            max_srq_sge: offered.max_srq_sge.into(),
            max_uar: self.max_uar.into(),
            gid_table_len: offered.gid_table_len.into(),
            max_pkeys: 1.into(),
            ack_delay: 0,
            ports: 1,
            mode: 0,
            atomic_operations: 3,
            memory_management: if offered.max_fast_register_pages > 0 { 7 } else { 0 },
            gid_types: GID_TYPE_ROCE_V2,
            max_fast_register_pages: offered.max_fast_register_pages.into(),
        }
    }
}

/// A configuration that no driver can handle.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not a power of two.
    #[error("The number of UAR pages can't be {0}; the driver takes powers of two only")]
    UarPages(u32),
    /// Out of range.
    #[error("{what} can't be {value}; it must be from {from} to {to}")]
    Range {
        /// Name of the value.
        what: &'static str,
        /// Value as given.
        value: u32,
        /// Lower bound.
        from: u32,
        /// Upper bound.
        to: u32,
    },
    /// The engine has no room, or refuses the capabilities.
    #[error("The engine doesn't take the device")]
    Engine(
        #[from]
        #[source]
        VerbsError,
    ),
}
