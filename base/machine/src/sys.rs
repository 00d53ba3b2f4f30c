//! The few system calls that no crate wraps as this one needs them.
#![allow(unsafe_code)] // Raw ioctls and system calls; each block says why it is sound.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use kvm_bindings::{
    KVMIO, kvm_coalesced_mmio_zone, kvm_interrupt, kvm_ioeventfd, kvm_irqfd, kvm_userspace_memory_region,
    kvm_x86_mce,
};
use vmm_sys_util::ioctl::{ioctl, ioctl_with_ref};
use vmm_sys_util::{ioctl_io_nr, ioctl_iow_nr};

ioctl_iow_nr!(KVM_SET_USER_MEMORY_REGION, KVMIO, 0x46, kvm_userspace_memory_region);
ioctl_iow_nr!(KVM_REGISTER_COALESCED_MMIO, KVMIO, 0x67, kvm_coalesced_mmio_zone);
ioctl_iow_nr!(KVM_UNREGISTER_COALESCED_MMIO, KVMIO, 0x68, kvm_coalesced_mmio_zone);
ioctl_iow_nr!(KVM_IRQFD, KVMIO, 0x76, kvm_irqfd);
ioctl_iow_nr!(KVM_INTERRUPT, KVMIO, 0x86, kvm_interrupt);
ioctl_iow_nr!(KVM_IOEVENTFD, KVMIO, 0x79, kvm_ioeventfd);
ioctl_iow_nr!(KVM_X86_SET_MCE, KVMIO, 0x9e, kvm_x86_mce);
ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);

/// Repeats a system call while it returns EINTR.
fn retry(mut call: impl FnMut() -> i32) -> io::Result<i32> {
    loop {
        let result = call();
        if result >= 0 {
            return Ok(result);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// KVM_SET_USER_MEMORY_REGION. The caller keeps `region.userspace_addr` mapped until the slot is gone.
///
/// # Safety
/// The host range must be mapped, and stay so while the slot exists.
pub(crate) unsafe fn set_memory_region(
    vm: &impl AsRawFd,
    region: &kvm_userspace_memory_region,
) -> io::Result<()> {
    // SAFETY: the ioctl's argument points to this struct, which outlives the call; the caller guarantees the range.
    retry(|| unsafe { ioctl_with_ref(vm, KVM_SET_USER_MEMORY_REGION(), region) }).map(drop)
}

/// KVM_IOEVENTFD: attaches an eventfd to an address, or detaches it.
pub(crate) fn ioeventfd(vm: &impl AsRawFd, event: &kvm_ioeventfd) -> io::Result<()> {
    // SAFETY: the ioctl's argument points to this struct, which outlives the call. KVM acquires its own reference to the descriptor.
    retry(|| unsafe { ioctl_with_ref(vm, KVM_IOEVENTFD(), event) }).map(drop)
}

/// KVM_REGISTER_COALESCED_MMIO, or KVM_UNREGISTER_COALESCED_MMIO.
pub(crate) fn set_coalesced_zone(
    vm: &impl AsRawFd,
    zone: &kvm_coalesced_mmio_zone,
    there: bool,
) -> io::Result<()> {
    let request = if there { KVM_REGISTER_COALESCED_MMIO() } else { KVM_UNREGISTER_COALESCED_MMIO() };
    // SAFETY: the ioctl's argument points to this struct, which outlives the call.
    retry(|| unsafe { ioctl_with_ref(vm, request, zone) }).map(drop)
}

/// KVM_IRQFD: attaches an eventfd to a GSI, or detaches it.
pub(crate) fn irqfd(vm: &impl AsRawFd, irqfd: &kvm_irqfd) -> io::Result<()> {
    // SAFETY: the ioctl's argument points to this struct, which outlives the call. KVM acquires its own reference to the descriptor.
    retry(|| unsafe { ioctl_with_ref(vm, KVM_IRQFD(), irqfd) }).map(drop)
}

/// KVM_INTERRUPT of a vCPU: injects this vector when the vCPU enters the guest next.
pub(crate) fn interrupt(vcpu: &impl AsRawFd, vector: u8) -> io::Result<()> {
    let request = kvm_interrupt { irq: vector.into() };
    // SAFETY: the ioctl's argument points to this struct, which outlives the call.
    retry(|| unsafe { ioctl_with_ref(vcpu, KVM_INTERRUPT(), &request) }).map(drop)
}

/// KVM_X86_SET_MCE of a vCPU.
pub(crate) fn machine_check(vcpu: &impl AsRawFd, record: &kvm_x86_mce) -> io::Result<()> {
    // SAFETY: the ioctl's argument points to this struct, which outlives the call.
    retry(|| unsafe { ioctl_with_ref(vcpu, KVM_X86_SET_MCE(), record) }).map(drop)
}

/// KVM_GET_STATS_FD of a VM or vCPU.
pub(crate) fn stats_fd(vm_or_vcpu: &impl AsRawFd) -> io::Result<OwnedFd> {
    // SAFETY: the ioctl has no argument.
    let fd = retry(|| unsafe { ioctl(vm_or_vcpu, KVM_GET_STATS_FD()) })?;
    // SAFETY: the kernel returned a new descriptor, which no other code has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// An eventfd, non-blocking and closed on exec.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(
        0,
        rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
    )?)
}
