//! MSI routes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use machine::interrupt::{MsiMessage, MsiRoute};

use super::listener::Source;
use super::{Shared, new_eventfd, take_signal};

/// Limit for the routes of a VM, the same as KVM's.
const MAX_MSI_ROUTES: u16 = 4096;

/// Routes in use.
#[derive(Default)]
pub(super) struct RouteCount(AtomicU16);

impl RouteCount {
    fn add(&self, count: u16) -> bool {
        let more = |used: u16| used.checked_add(count).filter(|all| *all <= MAX_MSI_ROUTES);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn remove(&self, count: u16) {
        self.0.fetch_sub(count, Ordering::Relaxed);
    }
}

/// A route whose eventfd thread `interrupts` polls. While it is masked, a write by another process stays in the eventfd, and is delivered
/// at the unmasking.
pub(super) struct EventfdRoute {
    shared: Arc<Shared>,
    fd: OwnedFd,
    /// Number among the listener's sources.
    number: OnceLock<u64>,
    message: Mutex<Option<MsiMessage>>,
}

pub(super) fn allocate(shared: &Arc<Shared>, count: u16) -> io::Result<Vec<Arc<dyn MsiRoute>>> {
    if !shared.routes.add(count) {
        let text = format!("{count} more interrupt routes don't fit the {MAX_MSI_ROUTES} of a VM");
        return Err(io::Error::new(io::ErrorKind::StorageFull, text));
    }
    let mut routes: Vec<Arc<dyn MsiRoute>> = Vec::with_capacity(count.into());
    for others in (0..count).rev() {
        match EventfdRoute::new(shared) {
            Ok(route) => routes.push(route),
            Err(error) => {
                // The routes created so far release their own count when they are dropped.
                shared.routes.remove(others);
                return Err(error);
            }
        }
    }
    Ok(routes)
}

impl EventfdRoute {
    /// Creates a route. The caller has counted it already.
    fn new(shared: &Arc<Shared>) -> io::Result<Arc<Self>> {
        let fd = new_eventfd().inspect_err(|_| shared.routes.remove(1))?;
        let (shared, number, message) = (Arc::clone(shared), OnceLock::new(), Mutex::new(None));
        let route = Arc::new(Self { shared, fd, number, message });
        let number = route.shared.listener.add(&route.fd, Source::Msi(Arc::downgrade(&route)))?;
        // The only call that sets it.
        let _ = route.number.set(number);
        Ok(route)
    }

    /// Sends the message if the eventfd was signaled, unless the route is masked.
    pub(super) fn deliver_signal(&self) {
        let message = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(message) = *message
            && take_signal(&self.fd)
        {
            self.shared.signal_msi(message);
        }
    }
}

impl MsiRoute for EventfdRoute {
    fn set(&self, message: Option<MsiMessage>) -> io::Result<()> {
        *self.message.lock().unwrap_or_else(PoisonError::into_inner) = message;
        self.deliver_signal();
        Ok(())
    }

    fn trigger(&self) -> io::Result<()> {
        // The lock stays held during the send, so that nothing is sent after `set(None)` has returned.
        let message = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(message) = *message {
            self.shared.signal_msi(message);
        }
        Ok(())
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }
}

impl Drop for EventfdRoute {
    fn drop(&mut self) {
        if let Some(number) = self.number.get() {
            self.shared.listener.remove(&self.fd, *number);
        }
        self.shared.routes.remove(1);
    }
}
