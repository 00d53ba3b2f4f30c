//! Common parts of the sandboxes of the monitor and the host daemon. [`Arguments`] checks the arguments of system
//! calls, [`trap`] ends the process after a refused call, [`signals`] keeps signals
//! from confined threads, and [`landlock_state`] reports Landlock's state. Each process
//! defines its own calls and paths.

mod arguments;
pub mod signals;
pub mod trap;

pub use arguments::{Arguments, BackendError, PROT_EXEC, compare, no_clone3};

use landlock::{LandlockStatus, RestrictionStatus, RulesetStatus};

/// Returns Landlock's state on this kernel, for inspection. Logs a warning if Landlock has no effect.
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
