//! Privileges of the process: capabilities, set-user-id programs, core dumps.

use std::io;

use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::SandboxError;

fn failed(what: &'static str) -> impl Fn(rustix::io::Errno) -> SandboxError {
    move |errno| SandboxError::Privileges { what, source: io::Error::from(errno) }
}

/// Keeps programs that this process executes from gaining privileges. Seccomp and Landlock require it.
pub(super) fn forbid_new() -> Result<(), SandboxError> {
    rustix::thread::set_no_new_privs(true).map_err(failed("give up new privileges"))
}

/// Disables core dumps, which would contain guest memory. A process that isn't dumpable also keeps other processes of its user from
/// attaching, and from reopening guest memory through /proc.
pub(super) fn forbid_core_dumps() -> Result<(), SandboxError> {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(Resource::Core, none).map_err(failed("turn off core dumps"))?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(failed("turn off core dumps"))
}

/// Drops all capabilities except `kept`, for good: also from the bounding set, if permitted.
pub(super) fn drop_capabilities(kept: CapabilitySet) -> Result<(), SandboxError> {
    let held = rustix::thread::capabilities(None).map_err(failed("read its capabilities"))?;
    if held.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // The kernel doesn't know this capability.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(errno) => return Err(failed("drop its bounding capabilities")(errno)),
            }
        }
    }
    rustix::thread::clear_ambient_capability_set().map_err(failed("drop its ambient capabilities"))?;
    let (effective, permitted) = (held.effective & kept, held.permitted & kept);
    let left = CapabilitySets { effective, permitted, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, left).map_err(failed("drop its capabilities"))
}
