//! What the sandboxes of the monitor and of the host's daemon have in common: how the arguments of a system call are
//! judged ([`Arguments`]), how a refused one ends the process ([`trap`]), and how Landlock's state is told
//! ([`landlock_state`]). Which calls and paths a process needs is its own matter.

mod arguments;
pub mod trap;

pub use arguments::{Arguments, BackendError, PROT_EXEC, compare, no_clone3};

use landlock::{LandlockStatus, RestrictionStatus, RulesetStatus};

/// What Landlock does on this kernel, for the log and for inspection. Says so in the log where it does nothing.
pub fn landlock_state(status: &RestrictionStatus) -> String {
    let kernel = match status.landlock {
        LandlockStatus::NotEnabled => "the kernel has it turned off (boot with lsm=landlock,...)".to_owned(),
        LandlockStatus::NotImplemented => "the kernel lacks it (Linux 5.13 or newer has it)".to_owned(),
        LandlockStatus::Available { effective_abi, kernel_abi } => {
            format!("ABI {}", kernel_abi.unwrap_or(effective_abi as i32))
        }
    };
    match status.ruleset {
        RulesetStatus::FullyEnforced => format!("enforced, {kernel}"),
        RulesetStatus::PartiallyEnforced => format!("enforced as far as the kernel can, {kernel}"),
        RulesetStatus::NotEnforced => {
            tracing::warn!("Landlock is not in force: {kernel}; files are guarded by seccomp alone");
            format!("not in force: {kernel}")
        }
    }
}
