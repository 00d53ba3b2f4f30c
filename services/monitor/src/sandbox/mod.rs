//! Confinement of the monitor process: it limits an attacker in control of a device model.
//!
//! ```text
//! Sandbox::prepare        compiles filters, opens paths             so that errors occur before anything runs
//! enter_process           once all files are open, before the first thread is created:
//!                         no core dumps, no capabilities, no new privileges, Landlock, process-wide seccomp rules
//! thread_filter().apply() first on each thread: its own seccomp filter
//! ```
//!
//! A refused system call ends the process with [`REFUSED_EXIT_CODE`] and a line that names the call and the thread. In log mode the call is
//! logged to standard error, and succeeds. Protection that an old kernel can't enforce is reported in the log and in [`Report`].

mod allocator;
mod allow_lists;
mod device_syscalls;
mod filesystem;
mod node;
mod observer;
mod privileges;
mod seccomp;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::thread::CapabilitySet;
use serde::Serialize;

use crate::description::{SandboxMode, VmDescription};
pub(crate) use allocator::use_one_arena;
use observer::Observer;
use seccomp::Program;

pub use confinement::trap::REFUSED_EXIT_CODE;
pub use filesystem::landlock_abi;
pub use node::{NodePlaces, privileges_used, raise_limits_for_rdma};

/// Kinds of threads of the monitor, by their permissions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ThreadKind {
    /// Waits for the VM's end.
    Main,
    /// Runs guest code.
    Vcpu,
    /// Serves queues of a device.
    DeviceWorker,
    /// Serves the API.
    Api,
    /// Transfers the console's bytes.
    Console,
    /// Waits for signals that end the VM.
    Signals,
    /// Delivers interrupts that eventfds and timers signal.
    Interrupts,
    /// Supervises a device that another process serves.
    VfioUser,
    /// Migrates the VM to or from another monitor.
    Migration,
    /// Any thread of a node of a VM that spans several.
    Node,
}

impl ThreadKind {
    /// Kinds of a VM with one node.
    pub const ALL: [Self; 9] = [
        Self::Main,
        Self::Vcpu,
        Self::DeviceWorker,
        Self::Api,
        Self::Console,
        Self::Signals,
        Self::Interrupts,
        Self::VfioUser,
        Self::Migration,
    ];
}

/// Signals that end the VM. Their handler writes to a socket, which only the main thread and the signal thread may do.
pub const END_SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Why the sandbox can't be prepared or entered.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A seccomp filter can't be compiled.
    #[error("The seccomp filter of {kind:?} threads can't be compiled")]
    Compile {
        /// Kind of the thread.
        kind: ThreadKind,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The kernel refused a filter.
    #[error("The kernel refused the seccomp filter of {whose}; --sandbox off runs without")]
    Seccomp {
        /// A kind of thread, or the process.
        whose: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A path that the monitor needs later can't be opened.
    #[error("The sandbox can't open {} to let the monitor use it", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Landlock failed on a kernel that supports it.
    #[error("Landlock can't be put in force; --sandbox off runs without")]
    Landlock {
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Privileges can't be dropped.
    #[error("The monitor can't {what}; --sandbox off runs without")]
    Privileges {
        /// The operation.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Restores the user's terminal before the end: `_exit` skips the exit handler that does it otherwise. Every filter allows it.
const ENDING: confinement::trap::Ending = confinement::trap::Ending {
    advice: "the VM is stopped. --sandbox log lists such calls instead.",
    last: platform_devices::console::terminal::restore,
};

/// The confinement in force, for the log and `causeway inspect`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The mode in the description.
    pub mode: SandboxMode,
    /// `enforced`, `logged` or `off`.
    pub seccomp: &'static str,
    /// What Landlock enforces, and what the kernel lacks.
    pub landlock: String,
    /// Whether executed programs are kept from gaining privileges.
    pub no_new_privileges: bool,
    /// Whether all capabilities were dropped.
    pub capabilities_dropped: bool,
    /// Whether core dumps are possible.
    pub core_dumps: bool,
}

/// The prepared confinement of this process.
#[derive(Debug)]
pub struct Sandbox {
    mode: SandboxMode,
    programs: BTreeMap<ThreadKind, Arc<Program>>,
    process: [Program; 2],
    filesystem: filesystem::Filesystem,
    /// Capabilities that threads drop themselves, as soon as they can ([`privileges_used`]).
    kept: CapabilitySet,
    observer: Option<Arc<Observer>>,
}

impl Sandbox {
    /// Compiles the filters for a VM, before the process has other threads. In log mode, starts the observer's thread.
    pub fn prepare(description: &VmDescription) -> Result<Self, SandboxError> {
        let filesystem = filesystem::Filesystem::prepare(description);
        Self::of(description, &ThreadKind::ALL, filesystem, CapabilitySet::empty(), false)
    }

    /// The same for a node of a VM that spans several. All its threads are [`ThreadKind::Node`].
    pub fn prepare_node(description: &VmDescription, places: &NodePlaces) -> Result<Self, SandboxError> {
        let filesystem = filesystem::Filesystem::of_node(places);
        let kept = if places.rdma.is_some() { CapabilitySet::empty() } else { CapabilitySet::SYS_NICE };
        Self::of(description, &[ThreadKind::Node], filesystem, kept, places.rdma.is_some())
    }

    fn of(
        description: &VmDescription,
        kinds: &[ThreadKind],
        filesystem: filesystem::Filesystem,
        kept: CapabilitySet,
        rdma: bool,
    ) -> Result<Self, SandboxError> {
        let mode = description.sandbox;
        // Requested once, since rustix caches it: its method isn't allowed later.
        let _ = rustix::param::page_size();
        let mut programs = BTreeMap::new();
        if mode != SandboxMode::Off {
            use_one_arena();
            for &kind in kinds {
                programs.insert(kind, Arc::new(seccomp::thread_program(kind, description, rdma)?));
            }
        }
        let observer = match mode {
            SandboxMode::Log => Some(Observer::start()?),
            _ => None,
        };
        Ok(Self { mode, programs, process: seccomp::process_programs()?, filesystem, kept, observer })
    }

    /// Confines the calling thread and all threads that it creates. To be called once, on the main thread, after every file, socket and tap
    /// is open and before any other thread exists.
    pub fn enter_process(&self) -> Result<Report, SandboxError> {
        let report = match self.mode {
            SandboxMode::Off => Report {
                mode: self.mode,
                seccomp: "off",
                landlock: "off".to_owned(),
                no_new_privileges: false,
                capabilities_dropped: false,
                core_dumps: true,
            },
            SandboxMode::Log => {
                // Later steps would hide calls from the log, so only what seccomp needs is done.
                privileges::forbid_new()?;
                Report {
                    mode: self.mode,
                    seccomp: "logged",
                    landlock: "off: it can't log without refusing; opening a file shows as a system call"
                        .to_owned(),
                    no_new_privileges: true,
                    capabilities_dropped: false,
                    core_dumps: true,
                }
            }
            SandboxMode::On => {
                confinement::trap::install(ENDING).map_err(|source| SandboxError::Privileges {
                    what: "handle refused system calls",
                    source,
                })?;
                privileges::forbid_core_dumps()?;
                privileges::drop_capabilities(self.kept)?;
                privileges::forbid_new()?;
                let landlock = self.filesystem.enforce()?;
                for program in &self.process {
                    program.install().map_err(|source| SandboxError::Seccomp {
                        whose: "the process".to_owned(),
                        source,
                    })?;
                }
                Report {
                    mode: self.mode,
                    seccomp: "enforced",
                    landlock,
                    no_new_privileges: true,
                    capabilities_dropped: true,
                    core_dumps: false,
                }
            }
        };
        tracing::info!(mode = ?report.mode, seccomp = report.seccomp, landlock = report.landlock, "Sandbox");
        Ok(report)
    }

    /// The filter for a kind of thread. Cheap to clone.
    pub fn thread_filter(&self, kind: ThreadKind) -> ThreadFilter {
        ThreadFilter { kind, program: self.programs.get(&kind).cloned(), observer: self.observer.clone() }
    }
}

/// The seccomp filter for one kind of thread.
#[derive(Debug, Clone)]
pub struct ThreadFilter {
    kind: ThreadKind,
    program: Option<Arc<Program>>,
    observer: Option<Arc<Observer>>,
}

impl ThreadFilter {
    /// Confines the calling thread, and threads that it creates from now on. [`END_SIGNALS`] are blocked where the handler's system
    /// calls aren't allowed. With `--sandbox off`, that is all.
    pub fn apply(&self) -> Result<(), SandboxError> {
        if !matches!(self.kind, ThreadKind::Main | ThreadKind::Signals | ThreadKind::Node) {
            confinement::signals::block(&END_SIGNALS).map_err(|source| self.refused(source))?;
        }
        let Some(program) = &self.program else { return Ok(()) };
        let applied = match &self.observer {
            None => program.install(),
            Some(observer) => observer.watch(program),
        };
        applied.map_err(|source| self.refused(source))
    }

    /// The same, for a thread that must not run unconfined: on failure the process ends.
    pub fn apply_or_end(&self) {
        if let Err(error) = self.apply() {
            tracing::error!(error = &error as &dyn std::error::Error, "A thread can't be confined; ending");
            std::process::exit(1);
        }
    }

    fn refused(&self, source: io::Error) -> SandboxError {
        SandboxError::Seccomp { whose: format!("{:?} threads", self.kind), source }
    }
}

#[cfg(test)]
mod tests;
