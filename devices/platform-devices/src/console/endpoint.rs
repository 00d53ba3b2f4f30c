//! Opens back ends, and removes their file system entries.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::pty::OpenptFlags;
use rustix::termios::{OptionalActions, isatty, tcgetattr, tcsetattr};

use super::log_file::LogFile;
use super::{ConsoleError, terminal};

/// An open back end. Dropping it closes it, restores the terminal, and removes its link or socket.
pub(super) struct Endpoint {
    pub kind: Kind,
    path: Option<PathBuf>,
    _remove: Option<RemoveOnDrop>,
}

pub(super) enum Kind {
    /// Standard input and output. With `keys` the terminal is raw, and escapes are recognized.
    Stdio {
        input: bool,
        keys: bool,
    },
    /// The master side. The slave stays open, so that the master never gets a hang-up.
    Pty {
        master: OwnedFd,
        _slave: OwnedFd,
    },
    File(LogFile),
    /// A listening socket and its client.
    Socket {
        listener: OwnedFd,
        client: Option<OwnedFd>,
    },
}

struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        // A sandboxed process may not remove it. The next process replaces it.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if matches!(self.kind, Kind::Stdio { .. }) {
            terminal::restore();
        }
    }
}

impl Endpoint {
    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    pub(super) fn stdio() -> Result<Self, ConsoleError> {
        let stdin_is_terminal = isatty(rustix::stdio::stdin());
        let keys = terminal::is_ours();
        if keys {
            terminal::make_raw()
                .map_err(|source| ConsoleError::host("set the terminal to raw mode", source))?;
        } else if stdin_is_terminal {
            tracing::info!("The console takes no input, as the process runs in the background");
        }
        Ok(Self { kind: Kind::Stdio { input: keys || !stdin_is_terminal, keys }, path: None, _remove: None })
    }

    pub(super) fn pty(link: Option<&Path>) -> Result<Self, ConsoleError> {
        let host = |what: &str| {
            let what = format!("{what} a pseudo-terminal");
            move |errno: Errno| ConsoleError::host(what, errno)
        };
        let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
            .map_err(host("open"))?;
        rustix::pty::grantpt(&master).map_err(host("grant"))?;
        rustix::pty::unlockpt(&master).map_err(host("unlock"))?;
        let name = rustix::pty::ptsname(&master, Vec::new()).map_err(host("name"))?;
        let path = PathBuf::from(std::ffi::OsString::from_vec(name.into_bytes()));
        let slave = rustix::fs::open(&path, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())
            .map_err(host("open the other end of"))?;
        // The guest echoes, so the line discipline must not.
        let mut settings = tcgetattr(&slave).map_err(host("ask for settings of"))?;
        settings.make_raw();
        tcsetattr(&slave, OptionalActions::Now, &settings).map_err(host("set"))?;
        set_nonblocking(master.as_fd()).map_err(host("set"))?;
        let remove = link.map(|link| symbolic_link(&path, link)).transpose()?;
        Ok(Self { kind: Kind::Pty { master, _slave: slave }, path: Some(path), _remove: remove })
    }

    pub(super) fn file(path: &Path, limit_bytes: u64) -> Result<Self, ConsoleError> {
        let file = LogFile::open(path, limit_bytes)?;
        Ok(Self { kind: Kind::File(file), path: Some(path.to_owned()), _remove: None })
    }

    pub(super) fn socket(path: &Path) -> Result<Self, ConsoleError> {
        let host = |what: &str| {
            let what = format!("{what} the socket {}", path.display());
            move |errno: Errno| ConsoleError::host(what, errno)
        };
        let address = SocketAddrUnix::new(path).map_err(host("name"))?;
        remove_stale_socket(path, &address)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(host("create"))?;
        rustix::net::bind(&listener, &address).map_err(host("bind"))?;
        let remove = RemoveOnDrop(path.to_owned());
        // Before it listens: a client that connects can type into the guest.
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).map_err(|source| {
            ConsoleError::host(format!("set permissions of the socket {}", path.display()), source)
        })?;
        rustix::net::listen(&listener, 8).map_err(host("listen on"))?;
        Ok(Self {
            kind: Kind::Socket { listener, client: None },
            path: Some(path.to_owned()),
            _remove: Some(remove),
        })
    }
}

fn symbolic_link(target: &Path, link: &Path) -> Result<RemoveOnDrop, ConsoleError> {
    let what = || format!("link {} to the pseudo-terminal {}", link.display(), target.display());
    if let Ok(meta) = std::fs::symlink_metadata(link) {
        if !meta.file_type().is_symlink() {
            return Err(ConsoleError::Taken {
                path: link.to_owned(),
                why: "something that is no symbolic link is there",
            });
        }
        std::fs::remove_file(link).map_err(|source| ConsoleError::host(what(), source))?;
    }
    std::os::unix::fs::symlink(target, link).map_err(|source| ConsoleError::host(what(), source))?;
    Ok(RemoveOnDrop(link.to_owned()))
}

/// Removes a socket without a listener, which a killed process left behind.
fn remove_stale_socket(path: &Path, address: &SocketAddrUnix) -> Result<(), ConsoleError> {
    let Ok(meta) = std::fs::symlink_metadata(path) else { return Ok(()) };
    let taken = |why| Err(ConsoleError::Taken { path: path.to_owned(), why });
    if !meta.file_type().is_socket() {
        return taken("something that is no socket is there");
    }
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|errno| ConsoleError::host("create a socket", errno))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(|source| {
            ConsoleError::host(format!("remove the unused socket {}", path.display()), source)
        }),
        Err(errno) => {
            Err(ConsoleError::host(format!("find out who uses the socket {}", path.display()), errno))
        }
        Ok(()) => taken("another process listens there"),
    }
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)
}

impl Kind {
    /// Returns the descriptor for input, if any.
    pub(super) fn input(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Stdio { input: true, .. } => Some(rustix::stdio::stdin()),
            Self::Pty { master, .. } => Some(master.as_fd()),
            Self::Socket { client: Some(client), .. } => Some(client.as_fd()),
            Self::Stdio { input: false, .. } | Self::File(_) | Self::Socket { client: None, .. } => None,
        }
    }

    /// Returns the descriptor for output, if any.
    pub(super) fn output(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Stdio { .. } => Some(rustix::stdio::stdout()),
            Self::Pty { master, .. } => Some(master.as_fd()),
            Self::File(file) => Some(file.as_fd()),
            Self::Socket { client, .. } => client.as_ref().map(AsFd::as_fd),
        }
    }

    /// Returns the listening socket while there is no client.
    pub(super) fn listener(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Socket { listener, client: None } => Some(listener.as_fd()),
            _ => None,
        }
    }

    /// Writes without long blocking. Descriptors that are shared with other processes stay blocking. So a write offers
    /// only as much as a writable terminal or pipe accepts.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        const AT_ONCE: usize = 4096;
        let Some(fd) = self.output() else { return Err(Errno::NOTCONN.into()) };
        let part = &bytes[..bytes.len().min(AT_ONCE)];
        let written = match self {
            // A disconnected client causes an error, not a signal.
            Self::Socket { .. } => rustix::net::send(fd, part, rustix::net::SendFlags::NOSIGNAL),
            Self::File(file) => return file.write(part),
            _ => rustix::io::write(fd, part),
        };
        Ok(written?)
    }
}
