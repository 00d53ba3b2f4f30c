//! How other threads control a vCPU thread: requests to it, and the exit that they force.
//!
//! A vCPU thread checks `attention` before each entry into the guest. A requester sets the request under the lock, then `attention`, then
//! KVM's `immediate_exit` byte, then sends a signal. The thread notices the request at every point: before its check by `attention`,
//! between the check and KVM_RUN by `immediate_exit`, and inside the guest by the signal.
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

/// A second mapping of the first page of a vCPU's kvm_run, for its `immediate_exit` byte alone.
#[derive(Debug)]
pub(super) struct RunPage(NonNull<u8>);

// SAFETY: all accesses to the byte are atomic.
unsafe impl Send for RunPage {}
// SAFETY: as above.
unsafe impl Sync for RunPage {}

impl RunPage {
    pub(super) fn map(fd: &VcpuFd) -> io::Result<Self> {
        // SAFETY: the descriptor belongs to `fd`, which outlives this borrow.
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
        // SAFETY: a byte of the mapping, which lives as long as `self`. The kernel reads it at any time; this process accesses it only
        // here.
        let byte = unsafe { AtomicU8::from_ptr(self.0.as_ptr().add(offset)) };
        byte.store(u8::from(on), Ordering::Release);
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `map`; no other code has its address.
        if let Err(error) = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), RUN_PAGE) } {
            tracing::error!(%error, "The run page of a vCPU could not be released");
        }
    }
}

/// The thread is neither in the guest nor waiting.
const OUTSIDE: u8 = 0;
/// In KVM_RUN, or about to call it.
const IN_GUEST: u8 = 1;
/// In [`Control::wait_for_kick`].
const WAITING: u8 = 2;

/// Requested run state of a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunState {
    Pause,
    Run,
    Stop,
}

pub(super) struct State {
    pub(super) requested: RunState,
    /// The thread waits, outside the guest and outside device handlers.
    pub(super) parked: bool,
    /// An event ended the vCPU; it stays parked until it gets new state.
    pub(super) ended: bool,
    /// The thread has ended, or is about to.
    pub(super) exited: bool,
    pub(super) command: Option<Command>,
}

/// The thread's next action.
pub(super) enum Order {
    Run { was_parked: bool },
    Command(Command),
    Stop,
}

/// State shared between a vCPU thread and the threads that control it.
pub(super) struct Control {
    state: Mutex<State>,
    changed: Condvar,
    attention: AtomicBool,
    /// A machine check is pending for the vCPU.
    machine_check: AtomicBool,
    /// A local APIC outside KVM has kicked the vCPU since its last check for interrupts.
    kicked: AtomicBool,
    /// State of the thread: [`OUTSIDE`], [`IN_GUEST`] or [`WAITING`].
    place: AtomicU8,
    page: RunPage,
}

impl Control {
    pub(super) fn new(page: RunPage) -> Self {
        let state =
            State { requested: RunState::Pause, parked: false, ended: false, exited: false, command: None };
        let no = || AtomicBool::new(false);
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            attention: no(),
            machine_check: no(),
            kicked: no(),
            place: AtomicU8::new(OUTSIDE),
            page,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request is pending; checked before each entry into the guest.
    pub(super) fn attention(&self) -> bool {
        self.attention.load(Ordering::Acquire)
    }

    pub(super) fn set_immediate_exit(&self, on: bool) {
        self.page.set_immediate_exit(on);
    }

    /// Sets a request. Unless the vCPU is parked, the caller must send the signal afterwards.
    pub(super) fn request(&self, requested: RunState) {
        let mut state = self.lock();
        // Stopping is final.
        if state.requested != RunState::Stop {
            state.requested = requested;
        }
        self.signal_attention(state);
    }

    /// Makes the thread leave the guest and check for requests, without a new one.
    pub(super) fn request_attention(&self) {
        self.signal_attention(self.lock());
    }

    /// Works as [`Control::request_attention`], and makes a machine check pending.
    pub(super) fn request_machine_check(&self) {
        self.machine_check.store(true, Ordering::Release);
        self.request_attention();
    }

    /// Whether a machine check is pending. The flag is separate from the nudge, because a parked thread clears the nudge when it resumes.
    pub(super) fn has_machine_check(&self) -> bool {
        self.machine_check.load(Ordering::Acquire)
    }

    /// Whether a machine check is pending; clears it.
    pub(super) fn take_machine_check(&self) -> bool {
        self.machine_check.swap(false, Ordering::AcqRel)
    }

    /// To be called from any thread, after it latched an interrupt. Returns whether the caller must send the kick signal. Kicks that the
    /// vCPU hasn't handled yet are merged.
    pub(super) fn kick(&self) -> bool {
        if self.kicked.swap(true, Ordering::SeqCst) {
            return false;
        }
        self.page.set_immediate_exit(true);
        // Pairs with the fence in `enter_guest`: either this thread sees the new state, or KVM sees `immediate_exit`.
        fence(Ordering::SeqCst);
        match self.place.load(Ordering::SeqCst) {
            IN_GUEST => true,
            WAITING => {
                // After this lock the thread either waits already or will see `kicked`.
                drop(self.lock());
                self.changed.notify_all();
                false
            }
            _ => false,
        }
    }

    /// On the vCPU thread, before it checks for interrupts: clears earlier kicks. Returns whether another request is pending.
    pub(super) fn clear_kicks(&self) -> bool {
        self.kicked.store(false, Ordering::SeqCst);
        self.page.set_immediate_exit(false);
        // If the line above cleared the `immediate_exit` of a request, the check below sees that request.
        fence(Ordering::SeqCst);
        self.attention()
    }

    /// On the vCPU thread, before KVM_RUN.
    pub(super) fn enter_guest(&self) {
        self.place.store(IN_GUEST, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// On the vCPU thread, after KVM_RUN.
    pub(super) fn leave_guest(&self) {
        self.place.store(OUTSIDE, Ordering::SeqCst);
    }

    /// On the vCPU thread: waits for a kick, another request, or until `timeout` has passed.
    pub(super) fn wait_for_kick(&self, timeout: Option<Duration>) {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
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

    fn signal_attention(&self, state: MutexGuard<'_, State>) {
        // Set under the lock, so that the thread can't clear them while it handles an older request.
        self.attention.store(true, Ordering::Release);
        self.page.set_immediate_exit(true);
        drop(state);
        self.changed.notify_all();
    }

    /// Passes a command to a parked thread. `false`: the thread isn't parked.
    pub(super) fn command(&self, command: Command) -> bool {
        let mut state = self.lock();
        if !state.parked || state.exited {
            return false;
        }
        state.command = Some(command);
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Waits until the thread is parked or has ended. `false`: `until` has passed.
    pub(super) fn wait_parked(&self, until: Instant) -> bool {
        let mut state = self.lock();
        while !state.parked && !state.exited {
            let left = until.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Waits until the thread has ended. `false`: `until` has passed.
    pub(super) fn wait_exited(&self, until: Instant) -> bool {
        let mut state = self.lock();
        while !state.exited {
            let left = until.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// On the vCPU thread: returns the next action, and waits while there is none.
    pub(super) fn next_order(&self) -> Order {
        let mut state = self.lock();
        loop {
            if state.requested == RunState::Stop {
                return Order::Stop;
            }
            if let Some(command) = state.command.take() {
                return Order::Command(command);
            }
            if state.requested == RunState::Run && !state.ended {
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

    /// Marks the vCPU as ended. To be called on the vCPU thread, or while that is parked.
    pub(super) fn set_ended(&self) {
        self.lock().ended = true;
    }

    /// On the vCPU thread, as its last action.
    pub(super) fn set_exited(&self) {
        self.lock().exited = true;
        self.changed.notify_all();
    }
}

/// The signal that forces vCPUs out of the guest.
pub(super) fn kick_signal() -> i32 {
    SIGRTMIN() + 4
}

extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Installs the handler of the kick signal, once per process. The handler does nothing; the signal makes KVM_RUN return.
pub(super) fn install_kick_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let result =
        INSTALLED.get_or_init(|| register_signal_handler(kick_signal(), on_kick).map_err(|e| e.errno()));
    result.map_err(io::Error::from_raw_os_error)
}

/// Sends the kick signal to a thread that hasn't been joined.
pub(super) fn kick(thread: &std::thread::JoinHandle<()>) {
    let id = std::os::unix::thread::JoinHandleExt::as_pthread_t(thread);
    // SAFETY: the thread isn't joined while its handle exists, so the id is valid; the signal has a handler. The error for a thread that
    // has ended is ignored.
    unsafe { libc::pthread_kill(id, kick_signal()) };
}

/// On a vCPU thread: blocks all signals but the kick signal and those that report the thread's own faults. The process's signals then go
/// to threads that handle them.
pub(super) fn mask_signals() -> io::Result<()> {
    let open =
        [kick_signal(), libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGSYS, libc::SIGTRAP];
    // SAFETY: a plain struct of the C library, filled next.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a local variable and outlives the calls.
    let result = unsafe {
        libc::sigfillset(&raw mut set);
        for signal in open {
            libc::sigdelset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
}
