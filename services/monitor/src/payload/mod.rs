//! Payload guests: `causeway run --payload prog.elf [args]`, and a library for benchmarks.
//!
//! A payload is a static ELF64 program that every vCPU runs in ring 3 from its first instruction, without a kernel.
//! `guest/payload/README.md` describes the program's environment, and the crate `payload_abi` has the constants.
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
mod start;
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

/// Why a payload program could not be started, or did not end by itself.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The file can't be read.
    #[error("The payload program {path} can't be read")]
    Read {
        /// Path of the file.
        path: std::path::PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The file isn't a payload program.
    #[error("{name} is not a payload program")]
    Program {
        /// Name of the program.
        name: String,
        /// The cause.
        #[source]
        source: ElfError,
    },
    /// A setting is invalid.
    #[error("A payload VM can't have {what}: {reason}")]
    Setting {
        /// The setting, with its value.
        what: String,
        /// What to choose instead.
        reason: String,
    },
    /// The memory exceeds the address limit.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// Program, arguments and stacks don't fit into RAM.
    #[error(
        "The payload VM's memory of {memory:#x} bytes is too small for {what}; give it more with --memory, or choose smaller stacks or fewer vCPUs"
    )]
    TooSmall {
        /// RAM below 3 GiB, bytes.
        memory: u64,
        /// The part that doesn't fit.
        what: String,
    },
    /// KVM isn't usable.
    #[error("The payload VM needs KVM")]
    Host(#[from] machine::kvm::HostError),
    /// RAM can't be allocated.
    #[error("The payload VM's memory could not be set up")]
    Memory(#[from] machine::memory::MemoryError),
    /// A write to guest memory failed.
    #[error("The payload VM's memory could not be written")]
    Write(#[from] machine::memory::GuestMemoryError),
    /// Memory of a VM that spans hosts can't be shared.
    #[error("The payload VM's memory could not be shared between nodes")]
    Shared(#[from] machine::memory::shared::SharedRamError),
    /// KVM refused a memslot.
    #[error("The payload VM's memory could not be mapped")]
    Slot(#[from] machine::slots::SlotError),
    /// The bus refused an address range.
    #[error("A device of the payload VM could not be placed")]
    Bus(#[from] machine::bus::BusError),
    /// The VM can't be created.
    #[error("The payload VM could not be made")]
    Vm(#[from] machine::vm::VmError),
    /// A vCPU can't be created, started or read.
    #[error("A vCPU of the payload VM failed")]
    Vcpu(#[from] machine::vcpu::VcpuError),
    /// The topology is impossible.
    #[error("The payload VM's vCPUs can't be arranged")]
    Topology(#[from] machine::x86::TopologyError),
    /// The host refused an eventfd.
    #[error("An eventfd for doorbell {index} could not be created")]
    Doorbell {
        /// Number of the doorbell.
        index: u32,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The program caused an exception.
    #[error("{0}")]
    Exception(Box<ExceptionReport>),
    /// All vCPUs parked, so no vCPU is left to end the VM.
    #[error(
        "All {vcpus} vCPUs of the payload program parked without giving an exit code; vCPU 0 should exit instead"
    )]
    AllParked {
        /// Number of vCPUs.
        vcpus: u32,
    },
    /// KVM can't continue a vCPU, or an exit handler of the monitor failed.
    #[error("vCPU {vcpu} of the payload VM can't run any further: {what}")]
    Failed {
        /// Id of the vCPU.
        vcpu: u32,
        /// What happened.
        what: String,
    },
    /// The console's output failed.
    #[error("The payload program's output could not be written")]
    Console(#[source] std::io::Error),
}
