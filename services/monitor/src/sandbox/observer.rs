//! Log mode: a thread without a filter receives every system call that would be refused, logs it once per thread and call, and lets it
//! continue.
#![allow(unsafe_code)] // The ioctls of a seccomp listener have no safe wrapper.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags};

use super::SandboxError;
use super::seccomp::{Program, kernel_logged};

/// The call continues as if there were no filter. The kernel's field has 32 bits, the constant 64.
#[allow(clippy::cast_possible_truncation)]
const CONTINUE: u32 = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
const _: () = assert!(size_of::<libc::seccomp_notif>() == 80 && size_of::<libc::seccomp_notif_resp>() == 24);

/// Receives the filters' notifications.
#[derive(Debug)]
pub(super) struct Observer {
    new: Mutex<Vec<OwnedFd>>,
    /// Signaled when `new` has entries.
    wake: OwnedFd,
}

impl Observer {
    /// Starts the thread. It ends with the process, since the last notification may be for the process's own end.
    pub(super) fn start() -> Result<Arc<Self>, SandboxError> {
        let failed = |source| SandboxError::Privileges { what: "watch its own system calls", source };
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let observer = Arc::new(Self { new: Mutex::default(), wake });
        let shared = Arc::clone(&observer);
        std::thread::Builder::new()
            .name("sandbox-log".to_owned())
            .stack_size(256 << 10)
            .spawn(move || shared.run())
            .map_err(failed)?;
        Ok(observer)
    }

    /// Confines the calling thread with notifications to this observer.
    pub(super) fn watch(&self, program: &Program) -> io::Result<()> {
        match program.install_with_listener() {
            Ok(listener) => {
                // From here on this thread is observed. Its next calls (lock, eventfd) are allowed to every thread.
                self.new.lock().unwrap_or_else(PoisonError::into_inner).push(listener);
                rustix::io::write(&self.wake, &1_u64.to_ne_bytes())?;
                Ok(())
            }
            // The creator of this thread is observed, so this one is, too, by the creator's rules. A thread has one listener at most, so
            // only the kernel's log can show its own narrower rules.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => kernel_logged(program).install(),
            Err(error) => Err(error),
        }
    }

    fn run(&self) {
        let mut listeners: Vec<OwnedFd> = Vec::new();
        let mut reported = BTreeSet::new();
        loop {
            let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
            fds.extend(listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
            match rustix::event::poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "The sandbox's log has stopped");
                    return;
                }
            }
            let events: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
            drop(fds);
            let mut ready = events.iter().skip(1);
            listeners.retain(|listener| {
                let events = ready.next().copied().unwrap_or(PollFlags::empty());
                if events.contains(PollFlags::IN) {
                    serve(listener, &mut reported);
                }
                // Hung up: all threads of the filter have ended.
                events.contains(PollFlags::IN) || !events.intersects(PollFlags::HUP | PollFlags::ERR)
            });
            if events.first().is_some_and(|events| events.contains(PollFlags::IN)) {
                let _ = rustix::io::read(self.wake.as_fd(), &mut [0_u8; 8]);
                listeners.append(&mut self.new.lock().unwrap_or_else(PoisonError::into_inner));
            }
        }
    }
}

/// Receives one notification, logs it, and lets its call continue.
fn serve(listener: &OwnedFd, reported: &mut BTreeSet<(String, i32, u64)>) {
    // SAFETY: all zeros is a valid seccomp_notif, as the kernel requires before it writes one.
    let mut report: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the request writes one seccomp_notif (its size is asserted above).
    if unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut report) } != 0 {
        // ENOENT: a signal has interrupted the call. The thread will repeat it, and it will be reported again.
        return;
    }
    let mut answer = libc::seccomp_notif_resp { id: report.id, val: 0, error: 0, flags: CONTINUE };
    // SAFETY: the request reads one seccomp_notif_resp (its size is asserted above).
    if unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) } != 0 {
        return;
    }
    let number = report.data.nr;
    // An ioctl or fcntl is identified by its request, prctl and others by their first argument.
    let detail = match i64::from(number) {
        libc::SYS_ioctl | libc::SYS_fcntl => report.data.args[1],
        libc::SYS_prctl | libc::SYS_seccomp => report.data.args[0],
        libc::SYS_mmap | libc::SYS_mprotect => report.data.args[2],
        _ => 0,
    };
    let thread = std::fs::read_to_string(format!("/proc/self/task/{}/comm", report.pid))
        .map_or_else(|_| format!("thread {}", report.pid), |name| name.trim_end().to_owned());
    let name = u32::try_from(number).map_or("unknown", confinement::trap::name_of);
    if reported.insert((thread.clone(), number, detail)) {
        tracing::warn!(
            thread,
            syscall = name,
            number,
            detail = format_args!("{detail:#x}"),
            "The sandbox would refuse this system call"
        );
    }
}
