//! The run loop of one vCPU thread.
#![allow(unsafe_code)] // Fields of kvm_run's union, chosen by its exit reason.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kvm_bindings::{
    KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_IO, KVM_EXIT_IO_IN, KVM_EXIT_MMIO, KVM_EXIT_SYSTEM_EVENT,
    KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES,
    KVM_INTERNAL_ERROR_SIMUL_EX,
};
use kvm_ioctls::VcpuFd;

use super::apic::Ready;
use super::control::{Control, Order};
use super::manager::VcpuOptions;
use super::{ExitAction, GuestRegisters, VcpuError, VcpuEvent};
use crate::exits::{ExitCause, VcpuExits};
use crate::state::SavedVcpu;
use crate::vm::{Vm, errno};
use crate::x86::kvm_regs;
use crate::{machine_check, sys};

/// Work for a parked vCPU thread.
pub(super) type Command = Box<dyn FnOnce(&mut VcpuThread) + Send>;

/// State that a vCPU thread owns.
pub(super) struct VcpuThread {
    pub(super) id: u32,
    pub(super) fd: VcpuFd,
    pub(super) vm: Arc<Vm>,
    pub(super) power_on: Arc<SavedVcpu>,
    pub(super) control: Arc<Control>,
    pub(super) exits: Arc<VcpuExits>,
    pub(super) options: Arc<VcpuOptions>,
    /// In HLT, where the local APIC is outside KVM.
    pub(super) halted: bool,
}

impl GuestRegisters for VcpuThread {
    fn get(&self) -> Result<kvm_regs, VcpuError> {
        let refused = |error| VcpuError::Refused {
            vcpu: self.id,
            what: "read the registers of".into(),
            source: errno(error),
        };
        self.fd.get_regs().map_err(refused)
    }

    fn set(&self, registers: &kvm_regs) -> Result<(), VcpuError> {
        let refused = |error| VcpuError::Refused {
            vcpu: self.id,
            what: format!("set the registers of, with rip {:#x}", registers.rip),
            source: errno(error),
        };
        self.fd.set_regs(registers).map_err(refused)
    }
}

/// Why a vCPU left the run loop.
pub(super) enum RunExit {
    /// A request is pending; port and memory accesses are complete.
    Attention,
    /// The vCPU can't or must not run further.
    Ended(VcpuEvent),
}

/// Result of an exit for the run loop.
pub(super) enum Next {
    Continue,
    /// KVM_RUN was interrupted: no access is in progress.
    Interrupted,
    End(VcpuEvent),
}

/// Marks the thread as gone, also when it panics.
struct ExitGuard(Arc<Control>);

impl Drop for ExitGuard {
    fn drop(&mut self) {
        self.0.set_exited();
    }
}

impl VcpuThread {
    /// Runs until the stop.
    pub(super) fn work(mut self) {
        let _exit_guard = ExitGuard(Arc::clone(&self.control));
        loop {
            match self.control.next_order() {
                Order::Stop => return,
                // The thread that waits for the result sees the panic.
                Order::Command(command) => drop(catch_unwind(AssertUnwindSafe(|| command(&mut self)))),
                Order::Run { was_parked } => self.run_guarded(was_parked),
            }
        }
    }

    fn run_guarded(&mut self, was_parked: bool) {
        let vcpu = self.id;
        let event = match catch_unwind(AssertUnwindSafe(|| self.run(was_parked))) {
            Ok(RunExit::Attention) => return,
            Ok(RunExit::Ended(event)) => event,
            Err(panic) => VcpuEvent::Panicked { vcpu, what: panic_text(&*panic) },
        };
        self.control.set_ended();
        let report = Arc::clone(&self.options.on_event);
        if catch_unwind(AssertUnwindSafe(|| report(event.clone()))).is_err() {
            tracing::error!(vcpu, ?event, "The handler of vCPU events panicked");
        }
    }

    fn run(&mut self, was_parked: bool) -> RunExit {
        if was_parked {
            // Reports the pause to guests with a paravirtual clock, so that their watchdogs ignore it. EINVAL: the guest doesn't use that
            // clock.
            if let Err(error) = self.fd.kvmclock_ctrl()
                && error.errno() != libc::EINVAL
            {
                tracing::warn!(vcpu = self.id, %error, "KVM could not note the pause in the paravirtual clock");
            }
        }
        let local_apics = self.options.local_apics.clone();
        if was_parked
            && local_apics.is_some()
            // Until it runs, KVM reports interrupt flags of the former state.
            && let RunExit::Ended(event) = self.complete()
        {
            return RunExit::Ended(event);
        }
        if let Some(handler) = self.options.exit_handler.clone() {
            handler.before_run(self.id, self);
        }
        loop {
            if self.control.attention() || machine_check::is_wanted() || self.control.has_machine_check() {
                let mut exit = self.complete();
                let requested = self.control.take_machine_check();
                if (machine_check::take() || requested) && matches!(exit, RunExit::Attention) {
                    exit = self.machine_check();
                }
                self.drain();
                return exit;
            }
            if let Some(local_apics) = &local_apics {
                match self.take_interrupts(&**local_apics) {
                    Ready::Enter => {}
                    Ready::Retry => continue,
                    Ready::End(event) => return RunExit::Ended(event),
                }
            }
            match self.enter() {
                Next::Continue | Next::Interrupted => {}
                Next::End(event) => return self.end(event),
            }
        }
    }

    /// Calls KVM_RUN without entering the guest, so that a handled port or memory access reaches the guest's registers. An access in
    /// several parts exits once per part.
    pub(super) fn complete(&mut self) -> RunExit {
        loop {
            self.control.set_immediate_exit(true);
            match self.enter() {
                Next::Continue => {}
                Next::Interrupted => return RunExit::Attention,
                Next::End(event) => return self.end(event),
            }
        }
    }

    /// Raises a machine check: a device answered the completed access with it.
    fn machine_check(&self) -> RunExit {
        match sys::machine_check(&self.fd, &machine_check::record()) {
            // The caller finds no other request, and resumes the vCPU.
            Ok(()) => RunExit::Attention,
            Err(error) => {
                let what = format!("KVM could not raise a machine check: {error}");
                RunExit::Ended(VcpuEvent::Failed { vcpu: self.id, what })
            }
        }
    }

    /// Passes deferred writes that the guest made before this exit to their devices.
    fn drain(&self) {
        self.vm.coalesced().drain(&self.options.ports, &self.options.memory);
    }

    fn end(&mut self, event: VcpuEvent) -> RunExit {
        // Completes the handler's `out`, which counts as executed.
        if matches!(event, VcpuEvent::Stopped { .. })
            && let RunExit::Ended(worse @ (VcpuEvent::Failed { .. } | VcpuEvent::Shutdown { .. })) =
                self.complete()
        {
            return RunExit::Ended(worse);
        }
        RunExit::Ended(event)
    }

    fn failed(&self, what: String) -> Next {
        Next::End(VcpuEvent::Failed { vcpu: self.id, what })
    }

    fn rip(&self) -> Option<u64> {
        self.fd.get_regs().ok().map(|regs| regs.rip)
    }

    fn at(&self) -> String {
        self.rip().map_or_else(String::new, |rip| format!(" at rip {rip:#x}"))
    }

    /// One KVM_RUN, and the handling of its exit.
    fn enter(&mut self) -> Next {
        let vcpu = self.id;
        let local_apics = self.options.local_apics.clone();
        let reason = match self.run_once(local_apics.as_deref()) {
            Ok(Some((flags, gpa, size))) => {
                self.exits.count(ExitCause::MemoryFault);
                let at = self.at();
                return self.failed(format!(
                    "KVM found no host memory for guest address {gpa:#x} ({size:#x} bytes, flags {flags:#x}){at}"
                ));
            }
            Ok(None) => self.fd.get_kvm_run().exit_reason,
            Err(error) => return self.run_error(errno(error)),
        };
        match reason {
            KVM_EXIT_IO => {
                self.drain();
                self.port()
            }
            KVM_EXIT_MMIO => {
                self.drain();
                self.memory()
            }
            _ => {
                let cause = ExitCause::of_reason(reason);
                self.exits.count(cause);
                match cause {
                    ExitCause::Hlt => {
                        match self.options.exit_handler.as_ref().map(|handler| handler.halt(vcpu)) {
                            Some(ExitAction::Handled) => Next::Continue,
                            Some(ExitAction::Stop) => Next::End(VcpuEvent::Stopped { vcpu }),
                            Some(ExitAction::Pass) | None if local_apics.is_some() => {
                                self.halted = true;
                                Next::Continue
                            }
                            Some(ExitAction::Pass) | None => Next::End(VcpuEvent::Halted { vcpu }),
                        }
                    }
                    ExitCause::ReadMsr | ExitCause::WriteMsr => match &local_apics {
                        Some(local_apics) => self.msr(&**local_apics, cause == ExitCause::WriteMsr),
                        None => self.no_way_on(reason, cause),
                    },
                    ExitCause::Intr | ExitCause::IrqWindow | ExitCause::SetTpr => Next::Continue,
                    ExitCause::Shutdown => Next::End(VcpuEvent::Shutdown { vcpu, rip: self.rip() }),
                    _ => self.no_way_on(reason, cause),
                }
            }
        }
    }

    fn run_error(&mut self, error: std::io::Error) -> Next {
        match error.raw_os_error() {
            Some(libc::EINTR) => {
                self.exits.count(ExitCause::Kick);
                Next::Interrupted
            }
            // The vCPU left its wait for SIPI, or KVM asks for a retry.
            Some(libc::EAGAIN) => {
                self.exits.count(ExitCause::Retry);
                Next::Continue
            }
            Some(libc::EFAULT) => {
                self.exits.count(ExitCause::MemoryFault);
                let at = self.at();
                self.failed(format!(
                    "KVM could not reach the host memory behind guest RAM or a window{at}: {error}"
                ))
            }
            _ => {
                self.exits.count(ExitCause::Other);
                let at = self.at();
                self.failed(format!("KVM refused to run it{at}: {error}"))
            }
        }
    }

    /// A port access, or several at one port (string instructions).
    fn port(&mut self) -> Next {
        let vcpu = self.id;
        let run: *mut kvm_bindings::kvm_run = self.fd.get_kvm_run();
        // SAFETY: for this exit reason, `io` is the valid field of the union.
        let io = unsafe { (*run).__bindgen_anon_1.io };
        let size = usize::from(io.size);
        let bytes = size.saturating_mul(io.count as usize);
        let Ok(offset) = usize::try_from(io.data_offset) else {
            return self.failed("KVM's port data is out of reach".into());
        };
        // SAFETY: KVM puts `count` items of `size` bytes at this offset of the area that is mapped as kvm_run. The slice is dropped
        // before the next KVM_RUN, and nothing else refers to these bytes meanwhile: `fd` isn't used below.
        let data = unsafe { std::slice::from_raw_parts_mut(run.cast::<u8>().add(offset), bytes) };
        let is_read = u32::from(io.direction) == KVM_EXIT_IO_IN;
        self.exits.count(if is_read { ExitCause::IoIn } else { ExitCause::IoOut });
        let handler = self.options.exit_handler.as_deref();
        let ports = &self.options.ports;
        let mut counted = false;
        let mut stop = false;
        for item in data.chunks_exact_mut(size.max(1)) {
            let action = match handler {
                None => ExitAction::Pass,
                Some(handler) if is_read => handler.port_in(vcpu, io.port, item),
                Some(handler) => handler.port_out(vcpu, io.port, item),
            };
            match action {
                ExitAction::Pass => {
                    let address = u64::from(io.port);
                    let range = if is_read { ports.read(address, item) } else { ports.write(address, item) };
                    if !std::mem::replace(&mut counted, true) {
                        self.exits.count_range(range);
                    }
                }
                ExitAction::Handled => {}
                ExitAction::Stop => {
                    stop = true;
                    break;
                }
            }
        }
        if stop { Next::End(VcpuEvent::Stopped { vcpu }) } else { Next::Continue }
    }

    fn memory(&mut self) -> Next {
        // SAFETY: for this exit reason, `mmio` is the valid field of the union.
        let mmio = unsafe { &mut self.fd.get_kvm_run().__bindgen_anon_1.mmio };
        let len = (mmio.len as usize).min(mmio.data.len());
        let data = &mut mmio.data[..len];
        let (cause, range) = if mmio.is_write != 0 {
            (ExitCause::MmioWrite, self.options.memory.write(mmio.phys_addr, data))
        } else {
            (ExitCause::MmioRead, self.options.memory.read(mmio.phys_addr, data))
        };
        self.exits.count(cause);
        self.exits.count_range(range);
        Next::Continue
    }

    /// Handles exits after which the vCPU can't run further.
    fn no_way_on(&mut self, reason: u32, cause: ExitCause) -> Next {
        let at = self.at();
        let run = self.fd.get_kvm_run();
        match reason {
            KVM_EXIT_SYSTEM_EVENT => {
                // SAFETY: for this exit reason, `system_event` is the valid field of the union.
                let kind = unsafe { run.__bindgen_anon_1.system_event.type_ };
                Next::End(VcpuEvent::SystemEvent { vcpu: self.id, kind })
            }
            KVM_EXIT_INTERNAL_ERROR => {
                let text = internal_error(run);
                self.failed(format!("KVM can't run it any further{at}: {text}"))
            }
            kvm_bindings::KVM_EXIT_FAIL_ENTRY => {
                // SAFETY: for this exit reason, `fail_entry` is the valid field of the union.
                let entry = unsafe { run.__bindgen_anon_1.fail_entry };
                let code = entry.hardware_entry_failure_reason;
                self.failed(format!("The processor refused to enter the guest{at}, with reason {code:#x}"))
            }
            _ => self.failed(format!(
                "It left the guest{at} for a reason without a handler: {} ({reason})",
                cause.name()
            )),
        }
    }
}

fn internal_error(run: &kvm_bindings::kvm_run) -> String {
    // SAFETY: for this exit reason, `internal` is the valid field of the union; KVM initializes all of its bytes.
    let internal = unsafe { run.__bindgen_anon_1.internal };
    match internal.suberror {
        KVM_INTERNAL_ERROR_EMULATION => {
            // SAFETY: with this suberror the same bytes have this form; `ndata` is the number of filled words.
            let failure = unsafe { run.__bindgen_anon_1.emulation_failure };
            let has_bytes = failure.ndata >= 3
                && failure.flags & u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES) != 0;
            if !has_bytes {
                return "it could not emulate an instruction".into();
            }
            // SAFETY: the flag shows that KVM has filled these bytes.
            let insn = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
            let bytes = insn.insn_bytes.iter().take(usize::from(insn.insn_size));
            let hex: Vec<String> = bytes.map(|byte| format!("{byte:02x}")).collect();
            format!("it could not emulate the instruction {}", hex.join(" "))
        }
        KVM_INTERNAL_ERROR_SIMUL_EX => "two exceptions came at once".into(),
        suberror => {
            let count = (internal.ndata as usize).min(internal.data.len());
            format!("internal error {suberror} with data {:x?}", &internal.data[..count])
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without text".into())
}
