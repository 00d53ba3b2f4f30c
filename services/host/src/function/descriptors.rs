//! Validation of descriptors that clients pass. A client's descriptor may be anything, and threads that serve all VMs of the host use some
//! of them. A descriptor of another kind could block such a thread without end. So each goes through [`accept`].
//!
//! The client shares the open file with this process, and can make it blocking again at any time. So [`drain`], and the requests for pages
//! ([`dma::arriving`]), pass a flag against blocking each time. [`super::eventfd_signals`] signals clients' eventfds.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};

/// The required kind of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expected {
    /// An eventfd.
    EventFd,
    /// A connected Unix stream socket. (Data sent on sockets of other families might have a meaning for the kernel, with this process's
    /// rights.)
    UnixStream,
}

impl Expected {
    /// Prefix of the kernel's name of it.
    const fn prefix(self) -> &'static str {
        match self {
            Self::EventFd => "anon_inode:[eventfd]",
            Self::UnixStream => "socket:[",
        }
    }

    /// Name for error messages.
    const fn name(self) -> &'static str {
        match self {
            Self::EventFd => "an eventfd",
            Self::UnixStream => "one end of a stream of Unix sockets",
        }
    }
}

/// Why a descriptor is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BadDescriptor {
    /// It is of another kind.
    #[error("The descriptor for {purpose} is {found:?}; it must be {}", expected.name())]
    Other {
        /// Its purpose.
        purpose: &'static str,
        /// The required kind.
        expected: Expected,
        /// The kernel's name of it.
        found: String,
    },
    /// A socket of another kind.
    #[error("The descriptor for {purpose} is a socket of another kind; it must be {}", Expected::UnixStream.name())]
    OtherSocket {
        /// Its purpose.
        purpose: &'static str,
    },
    /// It can't be examined.
    #[error("The descriptor for {purpose} can't be looked at; is /proc there?")]
    Unseen {
        /// Its purpose.
        purpose: &'static str,
        /// The error.
        #[source]
        source: std::io::Error,
    },
}

/// Accepts a client's descriptor if it is of the required kind, and makes it non-blocking. Never blocks.
///
/// # Errors
/// When it is of another kind, or there is no `/proc`.
pub(crate) fn accept(
    fd: OwnedFd,
    expected: Expected,
    purpose: &'static str,
) -> Result<OwnedFd, BadDescriptor> {
    let unseen = |source| BadDescriptor::Unseen { purpose, source };
    let found = kernel_name(fd.as_fd()).map_err(unseen)?;
    if !found.starts_with(expected.prefix()) {
        return Err(BadDescriptor::Other { purpose, expected, found });
    }
    let flags = fcntl_getfl(&fd).map_err(|error| unseen(error.into()))?;
    if expected == Expected::UnixStream {
        let domain = socket_domain(&fd).map_err(|error| unseen(error.into()))?;
        let kind = socket_type(&fd).map_err(|error| unseen(error.into()))?;
        if (domain, kind) != (AddressFamily::UNIX, SocketType::STREAM) {
            return Err(BadDescriptor::OtherSocket { purpose });
        }
    }
    fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(|error| unseen(error.into()))?;
    Ok(fd)
}

/// The kernel's name of a descriptor. A file that isn't in a file system has a name that begins with its kind; other names begin with a
/// slash.
fn kernel_name(fd: BorrowedFd<'_>) -> std::io::Result<String> {
    use std::os::fd::AsRawFd as _;
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    Ok(link.to_string_lossy().into_owned())
}

/// Whether a descriptor from another process is an eventfd.
///
/// # Errors
/// When there is no `/proc`.
pub(crate) fn is_eventfd(fd: BorrowedFd<'_>) -> std::io::Result<bool> {
    Ok(kernel_name(fd)?.starts_with(Expected::EventFd.prefix()))
}

/// Adds one to an eventfd of this process. A full counter has been signalled already.
pub(crate) fn signal(fd: BorrowedFd<'_>) -> bool {
    loop {
        match rustix::io::write(fd, &1_u64.to_ne_bytes()) {
            Ok(_) | Err(Errno::AGAIN) => return true,
            Err(Errno::INTR) => {}
            Err(error) => {
                tracing::debug!(%error, "an eventfd can't be signalled");
                return false;
            }
        }
    }
}

/// Consumes an eventfd's count, if any. Doesn't block, even if the client has made it blocking.
pub(crate) fn drain(fd: BorrowedFd<'_>) {
    let mut count = [0; 8];
    // The file's position: an eventfd has none.
    let position = u64::MAX;
    let read = rustix::io::preadv2(fd, &mut [IoSliceMut::new(&mut count)], position, ReadWriteFlags::NOWAIT);
    if read == Err(Errno::OPNOTSUPP) {
        // Before Linux 5.8; `accept` has made it non-blocking.
        let _ = rustix::io::read(fd, &mut count);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn count(fd: &OwnedFd) -> Option<u64> {
        let mut value = [0; 8];
        rustix::io::read(fd, &mut value).ok().map(|_| u64::from_ne_bytes(value))
    }

    #[test]
    fn only_what_is_expected_is_taken_and_it_is_non_blocking_then() {
        let events = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let taken = accept(events(), Expected::EventFd, "a test").unwrap();
        assert!(fcntl_getfl(&taken).unwrap().contains(OFlags::NONBLOCK));
        let pipe = || rustix::pipe::pipe().unwrap();
        let stream = || OwnedFd::from(std::os::unix::net::UnixStream::pair().unwrap().0);
        let taken = accept(stream(), Expected::UnixStream, "a test").unwrap();
        assert!(fcntl_getfl(&taken).unwrap().contains(OFlags::NONBLOCK));
        let file = || -> OwnedFd {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(b"anon_inode:[eventfd]").unwrap();
            file.into()
        };
        let socket = || OwnedFd::from(std::os::unix::net::UnixDatagram::unbound().unwrap());
        let tcp = || OwnedFd::from(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        for (fd, expected) in [
            (pipe().0, Expected::EventFd),
            (pipe().1, Expected::EventFd),
            (file(), Expected::EventFd),
            (socket(), Expected::EventFd),
            (stream(), Expected::EventFd),
            (events(), Expected::UnixStream),
            (pipe().1, Expected::UnixStream),
            (file(), Expected::UnixStream),
            (socket(), Expected::UnixStream),
            (tcp(), Expected::UnixStream),
        ] {
            let text = accept(fd, expected, "pages that have come").unwrap_err().to_string();
            assert!(text.contains("pages that have come") && text.contains("must be"), "{text}");
        }
    }

    #[test]
    fn draining_waits_for_nobody_whatever_the_client_has_made_of_it() {
        let fd = accept(eventfd(3, EventfdFlags::CLOEXEC).unwrap(), Expected::EventFd, "a test").unwrap();
        let clients = fd.try_clone().unwrap();
        let flags = fcntl_getfl(&clients).unwrap();
        fcntl_setfl(&clients, flags - OFlags::NONBLOCK).unwrap();
        // If it blocked, the test would hang.
        drain(fd.as_fd());
        drain(fd.as_fd());
        fcntl_setfl(&clients, flags).unwrap();
        assert_eq!(count(&fd), None);
    }
}
