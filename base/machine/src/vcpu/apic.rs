//! The part of a vCPU thread that serves a local APIC outside KVM: see [`crate::local_apic`].
#![allow(unsafe_code)] // A field of kvm_run's union, chosen by its exit reason.

use std::io;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_HALTED};
use kvm_ioctls::VcpuExit;

use super::run::{Next, RunExit, VcpuThread};
use super::{VcpuError, VcpuEvent, VcpuStart};
use crate::local_apic::{ApicEvent, LocalApics};
use crate::state::SavedVcpu;
use crate::sys;
use crate::vm::errno;

/// CD and NW, which INIT doesn't change.
const CR0_CACHE_BITS: u64 = 1 << 30 | 1 << 29;

/// Result of [`VcpuThread::take_interrupts`].
pub(super) enum Ready {
    Enter,
    /// The thread slept or got a request; it checks again from the start.
    Retry,
    End(VcpuEvent),
}

impl VcpuThread {
    /// Whether a vCPU with this start state is in HLT.
    pub(super) fn is_halted_by(&self, start: &VcpuStart) -> bool {
        let VcpuStart::Restored(saved) = start else { return false };
        self.options.local_apics.is_some() && saved.mp_state.mp_state == KVM_MP_STATE_HALTED
    }

    /// Saves the vCPU without its local APIC, where that is outside KVM.
    pub(super) fn save(&self) -> Result<SavedVcpu, VcpuError> {
        let mut saved = self.vcpu().save()?;
        if self.halted {
            saved.mp_state.mp_state = KVM_MP_STATE_HALTED;
        }
        Ok(saved)
    }

    /// Calls KVM_RUN, with CR8 in and out where the local APIC is outside KVM. Returns flags, guest-physical address and bytes of a
    /// memory fault.
    pub(super) fn run_once(
        &mut self,
        local_apics: Option<&dyn LocalApics>,
    ) -> Result<Option<(u64, u64, u64)>, kvm_ioctls::Error> {
        if let Some(local_apics) = local_apics {
            self.fd.get_kvm_run().cr8 = local_apics.cr8(self.id).into();
            self.control.enter_guest();
        }
        let result = match self.fd.run() {
            Ok(VcpuExit::MemoryFault { flags, gpa, size }) => Ok(Some((flags, gpa, size))),
            Ok(_) => Ok(None),
            Err(error) => Err(error),
        };
        if let Some(local_apics) = local_apics {
            self.control.leave_guest();
            let [cr8, ..] = self.fd.get_kvm_run().cr8.to_le_bytes();
            local_apics.left_guest(self.id, cr8 & 0xF);
        }
        result
    }

    /// Executes the local APIC's events until the guest can be entered. In HLT and while the vCPU waits for a start-up IPI, the thread
    /// sleeps here.
    pub(super) fn take_interrupts(&mut self, local_apics: &dyn LocalApics) -> Ready {
        let vcpu = self.id;
        if self.control.clear_kicks() {
            return Ready::Retry;
        }
        if self.halted {
            let interruptible = self.fd.get_kvm_run().if_flag != 0;
            if !local_apics.has_event(vcpu, interruptible) {
                self.control.wait_for_kick(local_apics.time_to_timer(vcpu));
                return Ready::Retry;
            }
            self.halted = false;
        }
        let mut interruptible = self.fd.get_kvm_run().ready_for_interrupt_injection != 0;
        loop {
            let event = local_apics.next_event(vcpu, interruptible);
            let done = match event {
                ApicEvent::None | ApicEvent::AwaitInterruptWindow => {
                    let window = event == ApicEvent::AwaitInterruptWindow;
                    self.fd.get_kvm_run().request_interrupt_window = window.into();
                    return Ready::Enter;
                }
                ApicEvent::Nmi => self.fd.nmi().map_err(errno),
                ApicEvent::Interrupt { vector } => {
                    interruptible = false;
                    sys::interrupt(&self.fd, vector)
                }
                ApicEvent::WaitForStartup => {
                    self.control.wait_for_kick(None);
                    return Ready::Retry;
                }
                ApicEvent::Init => {
                    // Completes an in-flight access, which belongs to the registers before INIT.
                    if let RunExit::Ended(event) = self.complete() {
                        return Ready::End(event);
                    }
                    interruptible = false;
                    self.init_registers()
                }
                ApicEvent::Startup { vector } => {
                    interruptible = false;
                    self.start_at(vector)
                }
            };
            if let Err(error) = done {
                let what = format!("KVM refused what its local APIC has for it, {event:?}: {error}");
                return Ready::End(VcpuEvent::Failed { vcpu, what });
            }
        }
    }

    /// Sets registers as INIT does: to their power-on values, without changes to XSAVE state, MSRs and cache control bits.
    fn init_registers(&mut self) -> io::Result<()> {
        self.halted = false;
        let (fd, power_on) = (&self.fd, &self.power_on);
        let before = fd.get_sregs().map_err(errno)?;
        let mut sregs = power_on.sregs;
        sregs.cr0 = sregs.cr0 & !CR0_CACHE_BITS | before.cr0 & CR0_CACHE_BITS;
        sregs.apic_base = before.apic_base;
        fd.set_sregs(&sregs).map_err(errno)?;
        let cpuid = fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(errno)?;
        let signature = cpuid.as_slice().iter().find(|leaf| leaf.function == 1);
        let mut regs = power_on.regs;
        regs.rdx = signature.map_or(regs.rdx, |leaf| leaf.eax.into());
        fd.set_regs(&regs).map_err(errno)?;
        fd.set_debug_regs(&power_on.debugregs).map_err(errno)?;
        fd.set_vcpu_events(&power_on.events).map_err(errno)
    }

    /// Starts the vCPU in real mode at page `vector`.
    fn start_at(&mut self, vector: u8) -> io::Result<()> {
        let mut sregs = self.fd.get_sregs().map_err(errno)?;
        sregs.cs.selector = u16::from(vector) << 8;
        sregs.cs.base = u64::from(vector) << 12;
        self.fd.set_sregs(&sregs).map_err(errno)?;
        let mut regs = self.fd.get_regs().map_err(errno)?;
        regs.rip = 0;
        self.fd.set_regs(&regs).map_err(errno)
    }

    /// Serves an access to an MSR that KVM doesn't handle.
    pub(super) fn msr(&mut self, local_apics: &dyn LocalApics, is_write: bool) -> Next {
        let vcpu = self.id;
        // SAFETY: for this exit reason, `msr` is the valid field of the union.
        let msr = unsafe { &mut self.fd.get_kvm_run().__bindgen_anon_1.msr };
        let allowed = if is_write {
            local_apics.write_msr(vcpu, msr.index, msr.data)
        } else {
            let value = local_apics.read_msr(vcpu, msr.index);
            msr.data = value.unwrap_or(0);
            value.is_some()
        };
        msr.error = u8::from(!allowed);
        Next::Continue
    }
}
