//! One VM: state that belongs to neither memory, interrupts nor vCPUs.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvm_bindings::{
    KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME, kvm_clock_data, kvm_ioeventfd, kvm_ioeventfd_flag_nr_datamatch,
    kvm_ioeventfd_flag_nr_deassign, kvm_ioeventfd_flag_nr_pio,
};
use kvm_ioctls::{Cap, Kvm, VmFd};

use crate::coalesced::{CoalescedWrites, CoalescedZone};
pub use crate::io_event::{IoEvent, IoSpace};
use crate::slots::Slots;
use crate::state::{CLOCK_STATE_VERSION, SavedClock};
use crate::stats::{KernelStats, StatsReader};
use crate::sys;
use crate::x86::mtrr;

/// Guest-physical address of the real-mode TSS (three pages) of KVM on Intel; inside the PCI hole, where no RAM lies.
pub const TSS_ADDRESS: u64 = 0xfffb_d000;
/// Guest-physical address of the identity map (one page) of KVM on Intel.
pub const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// Hyper-V's MSRs. The monitor doesn't offer Hyper-V's interfaces, so KVM refuses guests these MSRs. KVM still lists them for user space,
/// and some are free-running counters.
const HYPERV_MSRS: std::ops::RangeInclusive<u32> = 0x4000_0000..=0x4000_01ff;

/// KVM refused an operation on a VM.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// An ioctl failed.
    #[error("KVM refused to {what}")]
    Refused {
        /// What was tried, with its values.
        what: String,
        /// Error of the ioctl.
        #[source]
        source: io::Error,
    },
    /// The fields of an ioeventfd contradict each other.
    #[error("No eventfd can be attached to {space} address {address:#x} with width {width}: {reason}")]
    BadIoEvent {
        /// `port` or `memory`.
        space: &'static str,
        /// Port number, or guest-physical address.
        address: u64,
        /// Width in bytes.
        width: u8,
        /// Rule that the fields break.
        reason: &'static str,
    },
    /// A newer program saved the state.
    #[error("Saved state of the {what} has version {found}, but this program reads up to {known}")]
    Version {
        /// What was saved.
        what: &'static str,
        /// Version found.
        found: u32,
        /// Newest known.
        known: u32,
    },
}

impl VmError {
    /// For `map_err`: `refused("do this", error)`.
    pub(crate) fn refused(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Refused { what: what.into(), source: source.into() }
    }
}

/// Converts an error of kvm-ioctls.
pub(crate) fn errno(error: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

/// One VM. Thread-safe.
#[derive(Debug)]
pub struct Vm {
    fd: Arc<VmFd>,
    slots: Slots,
    coalesced: CoalescedWrites,
    kernel_irqchip: AtomicBool,
    user_local_apics: AtomicBool,
    irq_routes: usize,
    max_vcpus: usize,
    /// Result of KVM_CAP_XSAVE2: bytes that KVM_GET_XSAVE2 returns, 4096 or more. `None` where KVM lacks the ioctl.
    xsave2_bytes: Option<usize>,
    /// Whether vCPUs have extended control registers; processors without XSAVE have none.
    xcrs: bool,
    /// MSRs that belong to a vCPU's state.
    msr_indices: Vec<u32>,
}

impl Vm {
    pub(crate) fn create(kvm: &Kvm) -> Result<Arc<Self>, VmError> {
        let fd = loop {
            match kvm.create_vm() {
                Ok(fd) => break Arc::new(fd),
                // A signal interrupted KVM while it registered its MMU notifier.
                Err(error) if error.errno() == libc::EINTR => {}
                Err(error) => return Err(VmError::refused("create a VM", errno(error))),
            }
        };
        fd.set_identity_map_address(IDENTITY_MAP_ADDRESS).map_err(|e| {
            VmError::refused(format!("put its identity map at {IDENTITY_MAP_ADDRESS:#x}"), errno(e))
        })?;
        fd.set_tss_address(usize::try_from(TSS_ADDRESS).unwrap_or(usize::MAX))
            .map_err(|e| VmError::refused(format!("put its TSS at {TSS_ADDRESS:#x}"), errno(e)))?;
        let listed =
            kvm.get_msr_index_list().map_err(|e| VmError::refused("list the MSRs of a vCPU", errno(e)))?;
        let msr_indices = state_msrs(listed.as_slice());
        let number = |cap| usize::try_from(fd.check_extension_int(cap)).unwrap_or(0);
        let (irq_routes, xsave, memslots) =
            (number(Cap::IrqRouting), number(Cap::Xsave2), number(Cap::NrMemslots));
        Ok(Arc::new(Self {
            slots: Slots::new(Arc::clone(&fd), memslots),
            coalesced: CoalescedWrites::default(),
            kernel_irqchip: AtomicBool::new(false),
            user_local_apics: AtomicBool::new(false),
            irq_routes,
            max_vcpus: kvm.get_max_vcpus(),
            xcrs: fd.check_extension(Cap::Xcrs),
            xsave2_bytes: (xsave >= 4096).then_some(xsave),
            msr_indices,
            fd,
        }))
    }

    /// The VM's memslots.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// The VM's deferred (coalesced) MMIO and port writes.
    pub fn coalesced(&self) -> &CoalescedWrites {
        &self.coalesced
    }

    /// From now on KVM defers writes to these bytes ([`crate::coalesced`]).
    pub fn add_coalesced_zone(&self, zone: &CoalescedZone) -> Result<(), VmError> {
        self.set_coalesced_zone(zone, true)?;
        self.coalesced.count_zone();
        Ok(())
    }

    /// Writes that begin afterwards exit again. The caller drains the ring before it registers another device at these addresses.
    pub fn remove_coalesced_zone(&self, zone: &CoalescedZone) -> Result<(), VmError> {
        self.set_coalesced_zone(zone, false)
    }

    fn set_coalesced_zone(&self, zone: &CoalescedZone, there: bool) -> Result<(), VmError> {
        sys::set_coalesced_zone(&*self.fd, &zone.request(), there).map_err(|source| {
            let (space, address, length) = (zone.space.name(), zone.address, zone.length);
            let let_ = if there { "let" } else { "no longer let" };
            VmError::refused(
                format!("{let_} writes to {length} bytes at {space} address {address:#x} wait"),
                source,
            )
        })
    }

    /// Limit for the number of vCPUs of this VM.
    pub fn max_vcpus(&self) -> usize {
        self.max_vcpus
    }

    pub(crate) fn fd(&self) -> &VmFd {
        &self.fd
    }

    pub(crate) fn irq_routes(&self) -> usize {
        self.irq_routes
    }

    pub(crate) fn xsave2_bytes(&self) -> Option<usize> {
        self.xsave2_bytes
    }

    pub(crate) fn has_xcrs(&self) -> bool {
        self.xcrs
    }

    pub(crate) fn msr_indices(&self) -> &[u32] {
        &self.msr_indices
    }

    pub(crate) fn set_kernel_irqchip(&self) {
        self.kernel_irqchip.store(true, Ordering::Release);
    }

    pub(crate) fn set_user_local_apics(&self) {
        self.user_local_apics.store(true, Ordering::Release);
    }

    /// Whether local APICs are in the monitor ([`crate::local_apic`]). If so, HLT and accesses to x2APIC MSRs exit.
    pub(crate) fn has_user_local_apics(&self) -> bool {
        self.user_local_apics.load(Ordering::Acquire)
    }

    /// Whether local APICs are in the kernel. If so, HLT doesn't exit.
    pub fn has_kernel_irqchip(&self) -> bool {
        self.kernel_irqchip.load(Ordering::Acquire)
    }

    /// Attaches an ioeventfd. Fails as `Refused` with EEXIST when one with the same address, width and value exists.
    pub fn add_ioevent(&self, event: &IoEvent) -> Result<(), VmError> {
        self.ioevent(event, "attach", 0)
    }

    /// Detaches an ioeventfd. All fields must be equal to those of [`Self::add_ioevent`].
    pub fn remove_ioevent(&self, event: &IoEvent) -> Result<(), VmError> {
        self.ioevent(event, "detach", 1 << kvm_ioeventfd_flag_nr_deassign)
    }

    fn ioevent(&self, event: &IoEvent, verb: &str, flags: u32) -> Result<(), VmError> {
        let IoEvent { space, address, width, datamatch, .. } = *event;
        event.check().map_err(|reason| VmError::BadIoEvent {
            space: space.name(),
            address,
            width,
            reason,
        })?;
        let port = if space == IoSpace::Port { 1 << kvm_ioeventfd_flag_nr_pio } else { 0 };
        let matching = if datamatch.is_some() { 1 << kvm_ioeventfd_flag_nr_datamatch } else { 0 };
        let request = kvm_ioeventfd {
            datamatch: datamatch.unwrap_or(0),
            addr: address,
            len: u32::from(width),
            fd: event.fd.as_raw_fd(),
            flags: flags | port | matching,
            ..Default::default()
        };
        sys::ioeventfd(&*self.fd, &request).map_err(|source| {
            VmError::refused(
                format!("{verb} an eventfd at {} address {address:#x} with width {width}", space.name()),
                source,
            )
        })
    }

    /// Saves the paravirtual clock, while all vCPUs are paused.
    pub fn save_clock(&self) -> Result<SavedClock, VmError> {
        let data =
            self.fd.get_clock().map_err(|e| VmError::refused("read the paravirtual clock", errno(e)))?;
        Ok(SavedClock {
            version: CLOCK_STATE_VERSION,
            clock_ns: data.clock,
            realtime_ns: (data.flags & KVM_CLOCK_REALTIME != 0).then_some(data.realtime),
            host_tsc: (data.flags & KVM_CLOCK_HOST_TSC != 0).then_some(data.host_tsc),
        })
    }

    /// Sets the paravirtual clock of a fresh VM, before any vCPU runs. Where the saved state has the wall-clock time, the function adds
    /// the time since then, so that the guest's clock doesn't fall behind.
    pub fn restore_clock(&self, saved: &SavedClock) -> Result<(), VmError> {
        if saved.version > CLOCK_STATE_VERSION {
            return Err(VmError::Version {
                what: "paravirtual clock",
                found: saved.version,
                known: CLOCK_STATE_VERSION,
            });
        }
        let plain = kvm_clock_data { clock: saved.clock_ns, ..Default::default() };
        if let Some(realtime) = saved.realtime_ns {
            let data = kvm_clock_data { flags: KVM_CLOCK_REALTIME, realtime, ..plain };
            match self.fd.set_clock(&data) {
                Ok(()) => return Ok(()),
                // Kernels before 5.16 accept no flags.
                Err(error) if error.errno() == libc::EINVAL => {}
                Err(error) => return Err(VmError::refused("set the paravirtual clock", errno(error))),
            }
        }
        self.fd.set_clock(&plain).map_err(|e| VmError::refused("set the paravirtual clock", errno(e)))
    }

    /// KVM's own statistics of the VM.
    pub fn kernel_stats(&self) -> KernelStats {
        StatsReader::open(&*self.fd).read()
    }
}

/// The MSRs of a vCPU's state: KVM's list without Hyper-V's, with the MTRRs at the end.
fn state_msrs(listed: &[u32]) -> Vec<u32> {
    let mut indices: Vec<u32> = listed.iter().copied().filter(|index| !HYPERV_MSRS.contains(index)).collect();
    indices.retain(|index| !mtrr::msrs().any(|mtrr| mtrr == *index));
    indices.extend(mtrr::msrs());
    indices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtrrs_belong_to_the_state_once_whether_listed_or_not() {
        let mtrrs: Vec<u32> = mtrr::msrs().collect();
        for listed in [vec![0x10, 0x4000_0020], vec![0x2ff, 0x10, 0x250]] {
            let indices = state_msrs(&listed);
            assert_eq!((indices[0], &indices[1..]), (0x10, mtrrs.as_slice()));
        }
    }

    fn event(space: IoSpace, address: u64, width: u8, datamatch: Option<u64>) -> IoEvent {
        IoEvent { space, address, width, datamatch, fd: Arc::new(sys::eventfd().unwrap()) }
    }

    #[test]
    fn impossible_ioeventfds_are_refused_before_kvm_sees_them() {
        for (bad, good) in [
            (event(IoSpace::Memory, 0, 3, None), event(IoSpace::Memory, 0, 4, None)),
            (event(IoSpace::Memory, 0, 0, Some(1)), event(IoSpace::Memory, 0, 0, None)),
            (event(IoSpace::Memory, 0, 1, Some(256)), event(IoSpace::Memory, 0, 1, Some(255))),
            (event(IoSpace::Port, 0, 8, None), event(IoSpace::Memory, 0, 8, Some(u64::MAX))),
            (event(IoSpace::Port, 0xffff, 2, None), event(IoSpace::Port, 0xffff, 1, None)),
            (event(IoSpace::Memory, u64::MAX, 2, None), event(IoSpace::Memory, u64::MAX, 0, None)),
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
            assert_eq!(good.check(), Ok(()), "{good:?}");
        }
    }
}
