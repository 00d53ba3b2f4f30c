//! The virtual lab: emulated hosts (QEMU, TCG) that run Causeway on real KVM, scenarios as tests, and their images. The
//! README describes its use.

mod agent;
mod appliance_image;
mod apt;
mod bare_guest;
mod busy;
mod channel;
mod clock;
mod command;
mod console_follower;
pub mod cpio;
pub mod dma_attack;
pub mod dsm_faults;
pub mod emulator_faults;
pub mod growth;
pub mod guest;
pub mod guest_channel;
mod heartbeat;
mod host;
pub mod image;
mod kernel;
mod lab;
pub mod litmus_run;
pub mod measure;
mod module_build;
mod native;
pub mod neighbours_image;
pub mod own_faults;
pub mod paths;
pub mod protocol;
mod qemu;
mod qemu_build;
mod qemu_edits;
pub mod rdma;
mod rdma_image;
pub mod recipe;
pub mod records;
mod run_record;
pub mod scenario;
pub mod scenarios;
mod shell;
pub mod topology;
pub mod traffic;
mod transcript;
pub mod tutorial;
mod unfinished;
pub mod walks_probe;

pub use agent::serve as serve_agent;
pub use channel::{Output, Session, Sink};
pub use host::Host;
pub use lab::Lab;
pub use shell::{interactive, need_terminal, prompt};
pub use transcript::Transcript;

/// Prints a progress line on stderr, with the seconds since the program's start.
#[macro_export]
macro_rules! progress {
    ($($arg:tt)*) => { $crate::say(&format!($($arg)*)) };
}

/// Returns a sink that forwards a session's output to this process' own.
pub fn print_sink() -> channel::Sink {
    Box::new(|kind, bytes| {
        // The reader may have ended.
        let _ = match kind {
            protocol::Kind::Stderr => std::io::Write::write_all(&mut std::io::stderr(), bytes),
            _ => std::io::Write::write_all(&mut std::io::stdout(), bytes)
                .and_then(|()| std::io::Write::flush(&mut std::io::stdout())),
        };
    })
}

static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();

/// Prints a progress line; see [`progress!`].
pub fn say(line: &str) {
    let start = START.get_or_init(std::time::Instant::now);
    // The reader may have ended, which is no reason to end.
    let _ = std::io::Write::write_fmt(
        &mut std::io::stderr(),
        format_args!("[{:7.1}] {line}\n", start.elapsed().as_secs_f64()),
    );
}
