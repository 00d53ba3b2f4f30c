//! Complete vCPU state: reading it from KVM, and restoring it in the order that KVM needs.
#![allow(unsafe_code)] // XSAVE areas end in an array whose length only KVM knows.

use std::collections::BTreeSet;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_RUNNABLE, KVM_MP_STATE_UNINITIALIZED, Msrs, Xsave,
    kvm_cpuid_entry2, kvm_mp_state, kvm_msr_entry, kvm_xsave,
};
use kvm_ioctls::VcpuFd;

use super::{StartRegisters, VcpuError, VcpuStart};
use crate::state::{SavedMsr, SavedVcpu, VCPU_STATE_VERSION};
use crate::vm::{Vm, errno};
use crate::x86::mtrr;

const MSR_IA32_TSC: u32 = 0x10;
const MSR_IA32_TSC_ADJUST: u32 = 0x3b;
const MSR_IA32_TSC_DEADLINE: u32 = 0x6e0;
const MSR_IA32_ARCH_CAPABILITIES: u32 = 0x10a;
/// Bit of IA32_ARCH_CAPABILITIES: IA32_XAPIC_DISABLE_STATUS exists.
const XAPIC_DISABLE_STATUS_IS_THERE: u64 = 1 << 21;
/// MSRs per ioctl.
const MSR_BATCH: usize = 64;

/// Arguments of the ioctls of one vCPU.
pub(super) struct Vcpu<'a> {
    pub(super) id: u32,
    pub(super) fd: &'a VcpuFd,
    pub(super) vm: &'a Vm,
}

impl Vcpu<'_> {
    fn refused(&self, what: &str) -> impl FnOnce(kvm_ioctls::Error) -> VcpuError {
        let (vcpu, what) = (self.id, what.to_owned());
        move |error| VcpuError::Refused { vcpu, what, source: errno(error) }
    }

    fn bad(&self, reason: impl Into<String>) -> VcpuError {
        VcpuError::BadState { vcpu: self.id, reason: reason.into() }
    }

    /// Saves the whole state. The vCPU must have completed its last port or memory access.
    pub(super) fn save(&self) -> Result<SavedVcpu, VcpuError> {
        let fd = self.fd;
        // First, because KVM processes pending INIT and SIPI here, which changes registers.
        let mp_state = fd.get_mp_state().map_err(self.refused("read the run state of"))?;
        let cpuid = fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(self.refused("read CPUID of"))?;
        if offers_virtualisation(&cpuid) {
            let reason =
                "its CPUID offers nested virtualisation, whose state Causeway doesn't save".to_owned();
            return Err(VcpuError::NotSaveable { vcpu: self.id, reason });
        }
        let lapic = if self.vm.has_kernel_irqchip() {
            Some(fd.get_lapic().map_err(self.refused("read the local APIC of"))?)
        } else {
            None
        };
        let xcrs = if self.vm.has_xcrs() {
            Some(fd.get_xcrs().map_err(self.refused("read the XCRs of"))?)
        } else {
            None
        };
        Ok(SavedVcpu {
            version: VCPU_STATE_VERSION,
            id: self.id,
            cpuid: cpuid.as_slice().to_vec(),
            regs: fd.get_regs().map_err(self.refused("read the registers of"))?,
            sregs: fd.get_sregs().map_err(self.refused("read the system registers of"))?,
            xsave: self.save_xsave()?,
            xcrs,
            debugregs: fd.get_debug_regs().map_err(self.refused("read the debug registers of"))?,
            lapic,
            mp_state,
            msrs: self.save_msrs()?,
            // After the APIC, so that an interrupt in delivery is saved in at least one of the two.
            events: fd.get_vcpu_events().map_err(self.refused("read pending events of"))?,
            // KVM reports no frequency for an unstable TSC of the host.
            tsc_khz: fd.get_tsc_khz().ok().filter(|khz| *khz > 0),
        })
    }

    fn save_xsave(&self) -> Result<Vec<u8>, VcpuError> {
        let Some(bytes) = self.vm.xsave2_bytes() else {
            let area = self.fd.get_xsave().map_err(self.refused("read the XSAVE area of"))?;
            return Ok(area.region.iter().flat_map(|word| word.to_ne_bytes()).collect());
        };
        let mut area = self.new_xsave(bytes)?;
        // SAFETY: the area has as many bytes as this VM's KVM_CAP_XSAVE2 reports, which is what KVM writes.
        unsafe { self.fd.get_xsave2(&mut area) }.map_err(self.refused("read the XSAVE area of"))?;
        let legacy = &area.as_fam_struct_ref().xsave.region;
        Ok(legacy.iter().chain(area.as_slice()).flat_map(|word| word.to_ne_bytes()).collect())
    }

    fn new_xsave(&self, bytes: usize) -> Result<Xsave, VcpuError> {
        let extra = bytes.saturating_sub(size_of::<kvm_xsave>()).div_ceil(4);
        Xsave::new(extra)
            .map_err(|error| self.bad(format!("no room for an XSAVE area of {bytes} bytes: {error:?}")))
    }

    fn restore_xsave(&self, saved: &[u8]) -> Result<(), VcpuError> {
        let room = self.vm.xsave2_bytes().unwrap_or(4096);
        if saved.len() > room || saved.len() < 4096 || !saved.len().is_multiple_of(4) {
            return Err(self.bad(format!(
                "its XSAVE area has {} bytes, but this host's processor features take {room}",
                saved.len()
            )));
        }
        let mut area = self.new_xsave(room)?;
        let words = saved.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap_or_default()));
        // SAFETY: only `region` is written; the length of the array behind it stays.
        let legacy = unsafe { &mut area.as_mut_fam_struct().xsave.region };
        legacy.iter_mut().zip(words.clone()).for_each(|(to, word)| *to = word);
        area.as_mut_slice().iter_mut().zip(words.skip(1024)).for_each(|(to, word)| *to = word);
        // SAFETY: the area has as many bytes as this VM's KVM_CAP_XSAVE2 reports (4096 without it), which is what KVM reads.
        unsafe { self.fd.set_xsave2(&area) }.map_err(self.refused("set the XSAVE area of"))
    }

    /// Reads the MSRs that this vCPU has. KVM also lists some that its CPUID excludes; those can't be read and have no state.
    fn save_msrs(&self) -> Result<Vec<SavedMsr>, VcpuError> {
        let mut saved = Vec::new();
        let mut left = self.vm.msr_indices();
        while !left.is_empty() {
            let batch = &left[..left.len().min(MSR_BATCH)];
            let entries: Vec<_> =
                batch.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
            let mut msrs = self.msr_list(&entries)?;
            let read = self.fd.get_msrs(&mut msrs).map_err(self.refused("read the MSRs of"))?;
            saved.extend(
                msrs.as_slice().iter().take(read).map(|m| SavedMsr { index: m.index, value: m.data }),
            );
            // KVM stops at the first MSR that can't be read.
            let skip = if read < batch.len() { read + 1 } else { read };
            left = &left[skip..];
        }
        Ok(saved)
    }

    fn msr_list(&self, entries: &[kvm_msr_entry]) -> Result<Msrs, VcpuError> {
        Msrs::from_entries(entries)
            .map_err(|error| self.bad(format!("{} MSRs don't fit: {error:?}", entries.len())))
    }

    fn set_msrs(&self, entries: &[kvm_msr_entry]) -> Result<(), VcpuError> {
        let mut left = entries;
        while !left.is_empty() {
            let batch = &left[..left.len().min(MSR_BATCH)];
            let set = self.fd.set_msrs(&self.msr_list(batch)?).map_err(self.refused("set MSRs of"))?;
            if let Some(refused) = batch.get(set) {
                // A read-only MSR that already has the right value is no error.
                let mut present =
                    self.msr_list(&[kvm_msr_entry { index: refused.index, ..Default::default() }])?;
                let read = self.fd.get_msrs(&mut present).map_err(self.refused("read the MSRs of"))?;
                if read != 1 || present.as_slice()[0].data != refused.data {
                    return Err(
                        self.bad(format!("MSR {:#x} doesn't take value {:#x}", refused.index, refused.data))
                    );
                }
                left = &left[set + 1..];
            } else {
                left = &left[batch.len()..];
            }
        }
        Ok(())
    }

    /// Announces IA32_XAPIC_DISABLE_STATUS, by which guests detect that they can't leave x2APIC mode. Only where CPUID has
    /// IA32_ARCH_CAPABILITIES.
    pub(super) fn announce_locked_x2apic(&self) -> Result<(), VcpuError> {
        let index = MSR_IA32_ARCH_CAPABILITIES;
        let cpuid = self.fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(self.refused("read CPUID of"))?;
        let has_capabilities = cpuid
            .as_slice()
            .iter()
            .any(|leaf| leaf.function == 7 && leaf.index == 0 && leaf.edx & 1 << 29 != 0);
        let mut present = self.msr_list(&[kvm_msr_entry { index, ..Default::default() }])?;
        let read = self.fd.get_msrs(&mut present).map_err(self.refused("read the MSRs of"))?;
        if !has_capabilities || read != 1 {
            return Ok(());
        }
        let data = present.as_slice()[0].data | XAPIC_DISABLE_STATUS_IS_THERE;
        self.set_msrs(&[kvm_msr_entry { index, data, ..Default::default() }])
    }

    /// Enables MTRRs, with write-back as the type of all memory.
    pub(super) fn enable_mtrrs(&self) -> Result<(), VcpuError> {
        let entry = kvm_msr_entry {
            index: mtrr::MSR_MTRR_DEF_TYPE,
            data: mtrr::MTRR_WRITE_BACK,
            ..Default::default()
        };
        self.set_msrs(&[entry])
    }

    /// Restores saved state. With `keep_time` the time-stamp counter keeps running instead of being set back.
    pub(super) fn restore(&self, saved: &SavedVcpu, keep_time: bool) -> Result<(), VcpuError> {
        if saved.version == 0 || saved.version > VCPU_STATE_VERSION {
            return Err(VcpuError::Version {
                vcpu: self.id,
                found: saved.version,
                known: VCPU_STATE_VERSION,
            });
        }
        if saved.id != self.id {
            return Err(self.bad(format!("it is the state of vCPU {}", saved.id)));
        }
        if saved.lapic.is_some() != self.vm.has_kernel_irqchip() {
            return Err(self.bad("it was saved with local APICs in another place (kernel or user space)"));
        }
        let fd = self.fd;
        self.restore_cpuid(saved)?;
        self.restore_tsc_frequency(saved.tsc_khz)?;
        if self.vm.has_kernel_irqchip() {
            fd.set_mp_state(saved.mp_state).map_err(self.refused("set the run state of"))?;
        }
        fd.set_regs(&saved.regs).map_err(self.refused("set the registers of"))?;
        // The APIC base in these registers determines how KVM interprets the APIC page.
        fd.set_sregs(&saved.sregs).map_err(self.refused("set the system registers of"))?;
        self.restore_xsave(&saved.xsave)?;
        match &saved.xcrs {
            Some(xcrs) if self.vm.has_xcrs() => fd.set_xcrs(xcrs).map_err(self.refused("set the XCRs of"))?,
            Some(_) => return Err(self.bad("it uses XSAVE, which this host's processor doesn't have")),
            None => {}
        }
        fd.set_debug_regs(&saved.debugregs).map_err(self.refused("set the debug registers of"))?;
        if let Some(lapic) = &saved.lapic {
            fd.set_lapic(lapic).map_err(self.refused("set the local APIC of"))?;
        }
        self.set_msrs(&in_order(&saved.msrs, keep_time))?;
        fd.set_vcpu_events(&saved.events).map_err(self.refused("set pending events of"))
    }

    /// CPUID determines which registers and MSRs exist, so it is the first. Once a vCPU has run, KVM accepts only the same leaves again,
    /// and refuses a difference even in bits that change by themselves.
    fn restore_cpuid(&self, saved: &SavedVcpu) -> Result<(), VcpuError> {
        let present = self.fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(self.refused("read CPUID of"))?;
        let difference = cpuid_difference(present.as_slice(), &saved.cpuid);
        if difference.is_empty() {
            return Ok(());
        }
        self.fd.set_cpuid2(&cpuid_of(saved)?).map_err(|error| {
            let leaves: Vec<String> =
                difference.iter().map(|(leaf, index)| format!("{leaf:#x}.{index}")).collect();
            let leaves = leaves.join(", ");
            let source = errno(error);
            VcpuError::Refused { vcpu: self.id, what: format!("change CPUID leaves {leaves} of"), source }
        })
    }

    fn restore_tsc_frequency(&self, saved: Option<u32>) -> Result<(), VcpuError> {
        let Some(khz) = saved else { return Ok(()) };
        let present = self.fd.get_tsc_khz().ok();
        // Guests don't notice a difference within KVM's own tolerance of 250 parts per million.
        if present.is_some_and(|present| u64::from(present.abs_diff(khz)) * 4000 <= u64::from(khz)) {
            return Ok(());
        }
        self.fd.set_tsc_khz(khz).map_err(|error| {
            self.bad(format!(
                "its time-stamp counter runs at {khz} kHz, this host's at {present:?} kHz: {error}"
            ))
        })
    }

    /// Sets the start state of a vCPU. `power_on` is the state saved right after its creation.
    pub(super) fn start(
        &self,
        power_on: &SavedVcpu,
        start: &VcpuStart,
        fresh: bool,
    ) -> Result<(), VcpuError> {
        if !fresh && !matches!(start, VcpuStart::Restored(_)) {
            self.restore(power_on, true)?;
        }
        match start {
            VcpuStart::Registers(registers) => self.set_registers(registers),
            // Its local APIC keeps the vCPU from running.
            VcpuStart::WaitForSipi if self.vm.has_user_local_apics() => Ok(()),
            VcpuStart::WaitForSipi if !self.vm.has_kernel_irqchip() => {
                Err(self.bad("it can wait for SIPI only with a local APIC; give it registers"))
            }
            VcpuStart::WaitForSipi => self.set_mp_state(KVM_MP_STATE_UNINITIALIZED),
            VcpuStart::Restored(saved) => self.restore(saved, false),
        }
    }

    fn set_mp_state(&self, mp_state: u32) -> Result<(), VcpuError> {
        self.fd.set_mp_state(kvm_mp_state { mp_state }).map_err(self.refused("set the run state of"))
    }

    fn set_registers(&self, start: &StartRegisters) -> Result<(), VcpuError> {
        let fd = self.fd;
        if self.vm.has_kernel_irqchip() {
            self.set_mp_state(KVM_MP_STATE_RUNNABLE)?;
        }
        let mut sregs = start.sregs;
        sregs.apic_base = fd.get_sregs().map_err(self.refused("read the system registers of"))?.apic_base;
        fd.set_sregs(&sregs).map_err(self.refused("set the system registers of"))?;
        fd.set_regs(&start.regs).map_err(self.refused("set the registers of"))?;
        if let Some(fpu) = &start.fpu {
            fd.set_fpu(fpu).map_err(self.refused("set the floating-point registers of"))?;
        }
        self.set_msrs(&start.msrs)
    }
}

/// The saved CPUID leaves in KVM's format.
pub(super) fn cpuid_of(saved: &SavedVcpu) -> Result<CpuId, VcpuError> {
    CpuId::from_entries(&saved.cpuid).map_err(|error| VcpuError::BadState {
        vcpu: saved.id,
        reason: format!("{} CPUID leaves don't fit: {error:?}", saved.cpuid.len()),
    })
}

/// A leaf without the bits that depend on the vCPU's own registers: OSXSAVE, MONITOR and the APIC's bit, OSPKE, and the size of the XSAVE
/// area.
fn without_running_bits(leaf: &kvm_cpuid_entry2) -> kvm_cpuid_entry2 {
    let mut leaf = *leaf;
    match (leaf.function, leaf.index) {
        (1, _) => {
            leaf.ecx &= !(1 << 27 | 1 << 3);
            leaf.edx &= !(1 << 9);
        }
        (7, 0) => leaf.ecx &= !(1 << 4),
        (0xd, 0 | 1) => leaf.ebx = 0,
        (0x8000_0001, _) => leaf.edx &= !(1 << 9),
        _ => {}
    }
    leaf
}

/// Leaves and subleaves in which two sets differ, apart from bits that change by themselves.
fn cpuid_difference(present: &[kvm_cpuid_entry2], wanted: &[kvm_cpuid_entry2]) -> BTreeSet<(u32, u32)> {
    let lacks = |set: &[kvm_cpuid_entry2], leaf: &kvm_cpuid_entry2| {
        !set.iter().any(|other| without_running_bits(other) == without_running_bits(leaf))
    };
    let name = |leaf: &kvm_cpuid_entry2| (leaf.function, leaf.index);
    let gone = present.iter().filter(|leaf| lacks(wanted, leaf)).map(name);
    let new = wanted.iter().filter(|leaf| lacks(present, leaf)).map(name);
    gone.chain(new).collect()
}

/// VMX (leaf 1, ECX bit 5) or SVM (leaf 0x8000_0001, ECX bit 2).
fn offers_virtualisation(cpuid: &CpuId) -> bool {
    cpuid.as_slice().iter().any(|leaf| match leaf.function {
        1 => leaf.ecx & 1 << 5 != 0,
        0x8000_0001 => leaf.ecx & 1 << 2 != 0,
        _ => false,
    })
}

/// Whether an MSR holds the time-stamp counter or its adjustment.
pub(crate) fn is_time(index: u32) -> bool {
    matches!(index, MSR_IA32_TSC | MSR_IA32_TSC_ADJUST)
}

/// Orders MSRs: the time-stamp counter first, the deadline that depends on it last.
fn in_order(saved: &[SavedMsr], keep_time: bool) -> Vec<kvm_msr_entry> {
    let rank = |index: u32| match index {
        MSR_IA32_TSC => 0,
        MSR_IA32_TSC_DEADLINE => 2,
        _ => 1,
    };
    let mut entries: Vec<_> = saved
        .iter()
        .filter(|msr| !(keep_time && is_time(msr.index)))
        .map(|msr| kvm_msr_entry { index: msr.index, data: msr.value, ..Default::default() })
        .collect();
    entries.sort_by_key(|entry| rank(entry.index));
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_that_change_by_themselves_are_no_difference() {
        let leaf = |function, index, ecx| kvm_cpuid_entry2 { function, index, ecx, ..Default::default() };
        let before = [leaf(1, 0, 1 << 3 | 1), leaf(7, 0, 0), leaf(4, 1, 1 << 27)];
        let after = [leaf(1, 0, 1 << 27 | 1), leaf(7, 0, 1 << 4), leaf(4, 1, 1 << 27)];
        assert!(cpuid_difference(&before, &after).is_empty());
        let other = [leaf(1, 0, 3), leaf(7, 0, 0), leaf(4, 1, 0), leaf(5, 0, 0)];
        assert_eq!(cpuid_difference(&before, &other), BTreeSet::from([(1, 0), (4, 1), (5, 0)]));
    }

    #[test]
    fn the_counter_is_restored_before_the_deadline() {
        let saved = [MSR_IA32_TSC_DEADLINE, 0x174, MSR_IA32_TSC, MSR_IA32_TSC_ADJUST]
            .map(|index| SavedMsr { index, value: 1 });
        let order = |keep| in_order(&saved, keep).iter().map(|entry| entry.index).collect::<Vec<_>>();
        assert_eq!(order(false), [MSR_IA32_TSC, 0x174, MSR_IA32_TSC_ADJUST, MSR_IA32_TSC_DEADLINE]);
        assert_eq!(order(true), [0x174, MSR_IA32_TSC_DEADLINE]);
    }
}
