//! How other threads reach a vCPU thread: what it is wanted to do, and how it is brought out of the guest.
//!
//! A vCPU thread looks at `attention` before each entry into the guest. Whoever wants something sets the wish under the
//! lock, then `attention`, then KVM's `immediate_exit` byte, then sends a signal. Whatever the thread does at that
//! moment, it notices: before its look at `attention` by that, between the look and KVM_RUN by `immediate_exit`, and
//! inside the guest by the signal.
#![allow(unsafe_code)] // The shared run page, signals to threads.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvm_ioctls::VcpuFd;
use rustix::mm::{MapFlags, ProtFlags};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use super::run::Command;

const RUN_PAGE: usize = 4096;

/// The first page of a vCPU's kvm_run, mapped once more, for its `immediate_exit` byte alone.
#[derive(Debug)]
pub(super) struct RunPage(NonNull<u8>);

// SAFETY: the byte is only accessed atomically.
unsafe impl Send for RunPage {}
// SAFETY: as above.
unsafe impl Sync for RunPage {}

impl RunPage {
    pub(super) fn map(fd: &VcpuFd) -> io::Result<Self> {
        // SAFETY: KVM_RUN state is mapped with File's descriptor, which lives as long as `fd`.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(fd)) };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice; it keeps the vCPU's file open by itself.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                RUN_PAGE,
                protection,
                MapFlags::SHARED,
                borrowed.as_fd(),
                0,
            )
        }?;
        NonNull::new(address.cast()).map(Self).ok_or_else(|| io::ErrorKind::Other.into())
    }

    pub(super) fn set_immediate_exit(&self, on: bool) {
        let offset = std::mem::offset_of!(kvm_bindings::kvm_run, immediate_exit);
        // SAFETY: a byte of the mapping, which lives as long as `self`. The kernel reads it at any time; in this process
        // nobody accesses it but through here.
        let byte = unsafe { AtomicU8::from_ptr(self.0.as_ptr().add(offset)) };
        byte.store(u8::from(on), Ordering::Release);
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `map`; nobody else knows it.
        if let Err(error) = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), RUN_PAGE) } {
            tracing::error!(%error, "The run page of a vCPU could not be released");
        }
    }
}

/// The thread is in neither of the other places.
const OUTSIDE: u8 = 0;
/// In KVM_RUN, or about to enter it.
const IN_GUEST: u8 = 1;
/// In [`Control::wait_for_kick`].
const WAITING: u8 = 2;

/// What a vCPU is wanted to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    Pause,
    Run,
    Stop,
}

pub(super) struct State {
    pub(super) want: Want,
    /// The thread waits, outside guest and devices.
    pub(super) parked: bool,
    /// An event ended the vCPU; it waits for new state.
    pub(super) ended: bool,
    /// The thread is gone, or about to go.
    pub(super) gone: bool,
    pub(super) command: Option<Command>,
}

/// What the thread is to do next.
pub(super) enum Order {
    Run { was_parked: bool },
    Command(Command),
    Stop,
}

/// Shared between a vCPU thread and those who direct it.
pub(super) struct Control {
    state: Mutex<State>,
    changed: Condvar,
    attention: AtomicBool,
    /// It is to take a machine check.
    check: AtomicBool,
    /// A local APIC outside of KVM has something for it, since it last looked.
    kicked: AtomicBool,
    /// Where the thread is: [`OUTSIDE`], [`IN_GUEST`] or [`WAITING`].
    place: AtomicU8,
    page: RunPage,
}

impl Control {
    pub(super) fn new(page: RunPage) -> Self {
        let state = State { want: Want::Pause, parked: false, ended: false, gone: false, command: None };
        let no = || AtomicBool::new(false);
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            attention: no(),
            check: no(),
            kicked: no(),
            place: AtomicU8::new(OUTSIDE),
            page,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody wants something; looked at before each entry into the guest.
    pub(super) fn attention(&self) -> bool {
        self.attention.load(Ordering::Acquire)
    }

    pub(super) fn set_immediate_exit(&self, on: bool) {
        self.page.set_immediate_exit(on);
    }

    /// Sets a wish; unless the vCPU waits anyway, the caller must send the signal afterwards.
    pub(super) fn want(&self, want: Want) {
        let mut state = self.lock();
        // Stopping is final.
        if state.want != Want::Stop {
            state.want = want;
        }
        self.call_attention(state);
    }

    /// Makes it come out and look, without a new wish.
    pub(super) fn nudge(&self) {
        self.call_attention(self.lock());
    }

    /// As [`Control::nudge`], and then it takes a machine check.
    pub(super) fn owe_check(&self) {
        self.check.store(true, Ordering::Release);
        self.nudge();
    }

    /// Whether it is to take a machine check: one that was parked when it was asked to has forgotten the nudge.
    pub(super) fn owes_check(&self) -> bool {
        self.check.load(Ordering::Acquire)
    }

    /// The same, and then not any more.
    pub(super) fn take_check(&self) -> bool {
        self.check.swap(false, Ordering::AcqRel)
    }

    /// From any thread, after an interrupt was latched. Whether the kick signal has to be sent. Kicks that the vCPU hasn't looked at are one.
    pub(super) fn kick(&self) -> bool {
        if self.kicked.swap(true, Ordering::SeqCst) {
            return false;
        }
        self.page.set_immediate_exit(true);
        // Against the fence in `enter_guest`: either the place is seen here, or KVM sees `immediate_exit`.
        fence(Ordering::SeqCst);
        match self.place.load(Ordering::SeqCst) {
            IN_GUEST => true,
            WAITING => {
                // Once the lock was had, the thread either waits already or will see `kicked`.
                drop(self.lock());
                self.changed.notify_all();
                false
            }
            _ => false,
        }
    }

    /// On the vCPU thread, before it looks for interrupts: forgets kicks until now. Whether somebody wants something else.
    pub(super) fn forget_kicks(&self) -> bool {
        self.kicked.store(false, Ordering::SeqCst);
        self.page.set_immediate_exit(false);
        // A wish whose `immediate_exit` was just taken back is seen here.
        fence(Ordering::SeqCst);
        self.attention()
    }

    /// On the vCPU thread, around KVM_RUN.
    pub(super) fn enter_guest(&self) {
        self.place.store(IN_GUEST, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The end of [`Control::enter_guest`].
    pub(super) fn leave_guest(&self) {
        self.place.store(OUTSIDE, Ordering::SeqCst);
    }

    /// On the vCPU thread: waits for a kick, for somebody who wants something else, or until the time is over.
    pub(super) fn wait_for_kick(&self, most: Option<Duration>) {
        let until = most.and_then(|most| Instant::now().checked_add(most));
        self.place.store(WAITING, Ordering::SeqCst);
        let mut state = self.lock();
        while !self.kicked.load(Ordering::SeqCst) && !self.attention() {
            state = match until {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left == Duration::ZERO {
                        break;
                    }
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        drop(state);
        self.place.store(OUTSIDE, Ordering::SeqCst);
    }

    fn call_attention(&self, state: MutexGuard<'_, State>) {
        // Under the lock, so that the thread can't clear them for an older wish.
        self.attention.store(true, Ordering::Release);
        self.page.set_immediate_exit(true);
        drop(state);
        self.changed.notify_all();
    }

    /// Gives a parked thread something to do.
    pub(super) fn command(&self, command: Command) -> bool {
        let mut state = self.lock();
        if !state.parked || state.gone {
            return false;
        }
        state.command = Some(command);
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Waits until the thread is parked or gone.
    pub(super) fn wait_parked(&self, until: Instant) -> bool {
        let mut state = self.lock();
        while !state.parked && !state.gone {
            let left = until.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Waits until the thread is gone.
    pub(super) fn wait_gone(&self, until: Instant) -> bool {
        let mut state = self.lock();
        while !state.gone {
            let left = until.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// On the vCPU thread: what to do next; waits while there is nothing.
    pub(super) fn next_order(&self) -> Order {
        let mut state = self.lock();
        loop {
            if state.want == Want::Stop {
                return Order::Stop;
            }
            if let Some(command) = state.command.take() {
                return Order::Command(command);
            }
            if state.want == Want::Run && !state.ended {
                self.attention.store(false, Ordering::Release);
                self.page.set_immediate_exit(false);
                return Order::Run { was_parked: std::mem::take(&mut state.parked) };
            }
            if !state.parked {
                state.parked = true;
                self.changed.notify_all();
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// It ended: on the vCPU thread, or while that is parked.
    pub(super) fn set_ended(&self) {
        self.lock().ended = true;
    }

    /// On the vCPU thread, as the last thing.
    pub(super) fn set_gone(&self) {
        self.lock().gone = true;
        self.changed.notify_all();
    }
}

/// The signal that brings vCPUs out of the guest.
pub(super) fn kick_signal() -> i32 {
    SIGRTMIN() + 4
}

extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Installs the handler of the kick signal, once per process. It does nothing; what counts is that KVM_RUN returns.
pub(super) fn install_kick_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let result =
        INSTALLED.get_or_init(|| register_signal_handler(kick_signal(), on_kick).map_err(|e| e.errno()));
    result.map_err(io::Error::from_raw_os_error)
}

/// Sends the kick signal to a thread that hasn't been joined.
pub(super) fn kick(thread: &std::thread::JoinHandle<()>) {
    let id = std::os::unix::thread::JoinHandleExt::as_pthread_t(thread);
    // SAFETY: the thread isn't joined as long as its handle exists, so the id is valid; the signal has a handler. A thread
    // that has ended meanwhile makes this an error of no interest.
    unsafe { libc::pthread_kill(id, kick_signal()) };
}

/// On a vCPU thread: leaves it only the kick signal and those that report its own faults, so that the process's signals
/// go to threads that wait for them.
pub(super) fn mask_signals() -> io::Result<()> {
    let open =
        [kick_signal(), libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGSYS, libc::SIGTRAP];
    // SAFETY: a plain struct of the C library, filled next.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is ours and outlives the calls.
    let result = unsafe {
        libc::sigfillset(&raw mut set);
        for signal in open {
            libc::sigdelset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
}
