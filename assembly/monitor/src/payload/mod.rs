//! Payload guests: `causeway run --payload prog.elf [args]`, and a library for benchmarks.
//!
//! A payload is a static ELF64 program that every vCPU runs in ring 3 from its first instruction; no kernel.
//! `guest/payload/README.md` describes what it finds, the crate `payload_abi` has the constants.
//!
//! ```text
//! PayloadVm::builder(name, file) --settings--> build() --> start() --> wait() -> exit code
//!      elf::Program (checked)                    |            |          exceptions -> report::ExceptionReport
//!      layout::Layout (tables)                   |            '-> memory, doorbells, exit counts while it runs
//!                                                '-> machine: Vm, GuestRam, VcpuManager
//! ```

mod arguments;
mod build;
mod elf;
mod layout;
mod ports;
mod report;
mod vm;
mod whole;

pub(crate) use build::Definition;
pub use build::PayloadBuilder;
pub use elf::ElfError;
pub use layout::{ADDRESS_LIMIT, MAX_VCPUS, TooLarge};
pub use ports::HostPorts;
pub use report::ExceptionReport;
pub use vm::{PayloadVm, Stopper, process_status};
pub use whole::{Whole, vcpus_of};

/// A payload program could not be started, or did not end by itself.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The file can't be read.
    #[error("The payload program {path} can't be read")]
    Read {
        /// Its path.
        path: std::path::PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is no payload program.
    #[error("{name} is not a payload program")]
    Program {
        /// The program's name.
        name: String,
        /// Why.
        #[source]
        source: ElfError,
    },
    /// A setting that can't be.
    #[error("A payload VM can't have {what}: {reason}")]
    Setting {
        /// The setting, with its value.
        what: String,
        /// What to choose.
        reason: String,
    },
    /// More memory than is mapped.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// Program, arguments and stacks need more than there is.
    #[error(
        "The payload VM's memory of {memory:#x} bytes is too small for {what}; give it more with --memory, or choose smaller stacks or fewer vCPUs"
    )]
    TooSmall {
        /// Bytes below 3 GiB.
        memory: u64,
        /// What doesn't fit.
        what: String,
    },
    /// KVM can't be used.
    #[error("The payload VM needs KVM")]
    Host(#[from] machine::kvm::HostError),
    /// RAM could not be had.
    #[error("The payload VM's memory could not be set up")]
    Memory(#[from] machine::memory::MemoryError),
    /// Guest memory refused an address that lies in it.
    #[error("The payload VM's memory could not be written")]
    Write(#[from] machine::memory::GuestMemoryError),
    /// Memory of a VM that spans hosts.
    #[error("The payload VM's memory could not be shared between nodes")]
    Shared(#[from] machine::memory::shared::SharedRamError),
    /// A memslot was refused.
    #[error("The payload VM's memory could not be mapped")]
    Slot(#[from] machine::slots::SlotError),
    /// An address range was refused.
    #[error("A device of the payload VM could not be placed")]
    Bus(#[from] machine::bus::BusError),
    /// The VM could not be made.
    #[error("The payload VM could not be made")]
    Vm(#[from] machine::vm::VmError),
    /// A vCPU could not be made, started or read.
    #[error("A vCPU of the payload VM failed")]
    Vcpu(#[from] machine::vcpu::VcpuError),
    /// The topology is impossible.
    #[error("The payload VM's vCPUs can't be arranged")]
    Topology(#[from] machine::x86::TopologyError),
    /// The host refused an eventfd.
    #[error("An eventfd for doorbell {index} could not be created")]
    Doorbell {
        /// Which doorbell.
        index: u32,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The program did something that the processor refuses.
    #[error("{0}")]
    Exception(Box<ExceptionReport>),
    /// All vCPUs ended themselves, and nobody is left to end the VM.
    #[error(
        "All {vcpus} vCPUs of the payload program parked without giving an exit code; vCPU 0 should exit instead"
    )]
    AllParked {
        /// How many.
        vcpus: u32,
    },
    /// KVM gave up on a vCPU, or a handler of ours failed.
    #[error("vCPU {vcpu} of the payload VM can't go on: {what}")]
    Failed {
        /// vCPU.
        vcpu: u32,
        /// What happened.
        what: String,
    },
    /// The console's other end is gone or full.
    #[error("The payload program's output could not be written")]
    Console(#[source] std::io::Error),
}
