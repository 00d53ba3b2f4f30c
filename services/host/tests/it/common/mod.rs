//! A VM for tests: a monitor's side of vfio-user with doorbell mode, and a guest's driver on top.
#![allow(dead_code, clippy::unwrap_used, clippy::missing_panics_doc)] // Tests' other half; each uses its part.

pub mod adding;
pub mod cluster;
pub mod late;
pub mod moving;
pub mod relay;
pub mod vm;

pub use host_testbed::{driver, monitor};

use std::path::Path;
use std::time::{Duration, Instant};

use host::{Daemon, DaemonConfig};

/// A daemon with a socket in `folder`.
pub fn daemon(folder: &Path) -> Daemon {
    start(DaemonConfig::new(folder.join("host.sock")))
}

/// Starts a daemon in its sandbox, like `causeway host`. Only its own threads are confined: the one that starts it ends.
pub fn start(config: DaemonConfig) -> Daemon {
    let config = DaemonConfig { sandbox: true, ..config };
    std::thread::spawn(move || Daemon::start(&config).unwrap()).join().unwrap()
}

/// Waits up to a minute; longer means a hang, even on a busy machine.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
