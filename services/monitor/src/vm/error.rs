//! Errors that prevent a VM's start or end the VM.

use crate::sandbox::SandboxError;

/// A VM could not be started, or had to be ended. The text names the operation; the sources name the cause.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// KVM's device node, /dev/kvm.
    #[error(transparent)]
    Host(#[from] machine::kvm::HostError),
    /// KVM's VM object.
    #[error(transparent)]
    Vm(#[from] machine::vm::VmError),
    /// Guest RAM.
    #[error(transparent)]
    Memory(#[from] machine::memory::MemoryError),
    /// Memslots of guest RAM and of devices' memory.
    #[error(transparent)]
    Slot(#[from] machine::slots::SlotError),
    /// A vCPU or its thread.
    #[error(transparent)]
    Vcpu(#[from] machine::vcpu::VcpuError),
    /// Processor topology.
    #[error(transparent)]
    Topology(#[from] machine::x86::TopologyError),
    /// Fixed addresses.
    #[error(transparent)]
    Bus(#[from] machine::bus::BusError),
    /// Kernel, initrd, command line, ACPI tables.
    #[error(transparent)]
    Firmware(#[from] firmware::FirmwareError),
    /// Kernel and initrd files.
    #[error(transparent)]
    Kernel(#[from] firmware::KernelError),
    /// The serial console.
    #[error(transparent)]
    Console(#[from] platform_devices::console::ConsoleError),
    /// The PCI bus.
    #[error(transparent)]
    Pci(#[from] pci::root::RootError),
    /// A PCI function.
    #[error(transparent)]
    Function(#[from] pci::function::FunctionError),
    /// A device could not be created.
    #[error("Device {name} could not be set up")]
    Device {
        /// Its name.
        name: String,
        /// Error of the device.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The API.
    #[error(transparent)]
    Api(#[from] crate::api::ApiError),
    /// Confinement of the process.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// An interrupt controller or thread of this process.
    #[error("The monitor could not {what}")]
    Monitor {
        /// What was tried.
        what: &'static str,
        /// Error of the host.
        #[source]
        source: std::io::Error,
    },
    /// A platform device can't be restored.
    #[error(transparent)]
    Platform(#[from] platform_devices::RestoreError),
    /// The saved state lacks one of the devices.
    #[error("The VM's saved state has no device {0}, which is described here")]
    NoSavedDevice(String),
    /// A device's saved state can't be used.
    #[error("Device {0} can't be restored here: {1}")]
    BadSavedDevice(String, String),
    /// The saved state doesn't fit the machine.
    #[error("The VM can't be restored here: {0}")]
    BadSavedMachine(String),
    /// The VM's state doesn't allow a migration.
    #[error("The VM is {0}, so it can't be moved now")]
    NotNow(control_api::types::VmState),
    /// The incoming migration failed.
    #[error("The VM did not come here; start this monitor again to try it once more")]
    IncomingFailed(#[source] crate::migration::MigrationError),
    /// The VM was lost during its migration.
    #[error("The VM is lost")]
    Lost(#[source] crate::migration::MigrationError),
    /// Membership in the neighbourhood.
    #[error(transparent)]
    Neighbour(#[from] crate::neighbour::NeighbourError),
    /// `--net fd:N` names a descriptor that isn't open.
    #[error(
        "There is no open file descriptor {number} for the network device; open the tap in the parent process and let it be inherited"
    )]
    InheritedFd {
        /// Its number.
        number: i32,
        /// Error of the system call.
        #[source]
        source: std::io::Error,
    },
    /// The guest can't run further.
    #[error("The guest can't run any further: {0}")]
    GuestFailed(String),
    /// A device's policy stops the VM.
    #[error(
        "The VM was stopped by policy `stop` of {device}: {what}; with `policy=ignore` or `policy=device-error` it keeps running"
    )]
    Refused {
        /// The device.
        device: String,
        /// The request that was refused, and why.
        what: String,
    },
    /// The description has a payload where a kernel is needed.
    #[error("VM {0} is described as a payload guest, which has no devices and boots no kernel")]
    NotLinux(String),
}

impl Error {
    /// A device error with its source boxed.
    pub fn device(name: &str, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Device { name: name.to_owned(), source: Box::new(source) }
    }
}
