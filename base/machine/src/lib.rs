//! KVM, guest memory, vCPU threads and interrupt controllers, wrapped once.
//!
//! No other crate depends on `kvm-ioctls`, `kvm-bindings` or `vm-memory`; this crate wraps them for all.
//!
//! ```text
//! kvm::Host --create_vm--> vm::Vm --+-- slots::Slots        memslots, dirty log
//!                                   +-- irqchip::KernelIrqchip (interrupt::InterruptController), or local_apic::LocalApics in the monitor
//!                                   +-- ioeventfds
//!                                   +-- coalesced::CoalescedWrites    deferred (coalesced) MMIO and port writes
//! memory::RamLayout -> memory::GuestRam (sealed memfds) --> Slots::add_ram
//! bus::AddressSpace (ports), bus::AddressSpace (memory) --+
//! x86::guest_cpuid, vcpu::VcpuStart --------------------- +--> vcpu::VcpuManager: one thread per vCPU
//!                                                              exits::ExitAccounting, state::SavedVcpu
//! a device's answer to a vCPU's access may be machine_check::raise
//! ```

pub mod bus;
pub mod coalesced;
pub mod exits;
pub mod interrupt;
mod io_event;
pub mod irqchip;
mod irqchip_kind;
pub mod kvm;
pub mod local_apic;
pub mod machine_check;
pub mod memory;
pub mod probe;
pub mod scheduling;
pub mod slots;
pub mod state;
pub mod stats;
mod sys;
pub mod vcpu;
pub mod vm;
pub mod x86;
