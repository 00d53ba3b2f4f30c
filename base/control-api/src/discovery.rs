//! Finds this user's running VMs on this host: each has a socket `NAME.sock` in the runtime directory.

use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::client::Client;

/// Directory of system-wide VMs.
const SYSTEM_DIRECTORY: &str = "/run/causeway";
const SUFFIX: &str = ".sock";
/// Name of the host daemon's socket. No VM has this name.
const DAEMON: &str = "host";

/// Returns the runtime directory: `$XDG_RUNTIME_DIR/causeway` if that variable is an absolute path, else
/// `/run/causeway`. It may not exist.
pub fn runtime_directory() -> PathBuf {
    directory_in(std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from))
}

fn directory_in(xdg: Option<PathBuf>) -> PathBuf {
    match xdg {
        // The XDG specification requires that relative paths are ignored.
        Some(directory) if directory.is_absolute() => directory.join("causeway"),
        _ => PathBuf::from(SYSTEM_DIRECTORY),
    }
}

/// Returns the socket of the VM called `name` in a runtime directory.
pub fn socket_of(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}{SUFFIX}"))
}

/// The running VMs can't be listed, or a VM can't be found.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// The runtime directory can't be used.
    #[error("The runtime directory {} can't be {what}; set XDG_RUNTIME_DIR to a directory of your own", directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// `read`, `created` or `used`.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Another user may write to it.
    #[error(
        "The runtime directory {} belongs to user {owner} with mode {mode:03o}, so others could stand in for a VM; \
         remove it or set XDG_RUNTIME_DIR to a directory of your own",
        directory.display()
    )]
    Untrusted {
        /// The directory.
        directory: PathBuf,
        /// Its owner.
        owner: u32,
        /// Its permission bits.
        mode: u32,
    },
    /// No running VM has this name.
    #[error("No VM called \"{}\" runs here; running: {}", name.escape_debug(), list(running))]
    NoSuchVm {
        /// The requested name.
        name: String,
        /// The names of the running VMs.
        running: Vec<String>,
    },
    /// No name was given, and not exactly one VM runs.
    #[error("{}", ambiguous(running))]
    WhichVm {
        /// The names of the running VMs.
        running: Vec<String>,
    },
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn ambiguous(names: &[String]) -> String {
    match names {
        [] => "No VM runs here".to_owned(),
        _ => format!("Several VMs run here, so name one of them: {}", names.join(", ")),
    }
}

/// The state of a socket in the runtime directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketState {
    /// A monitor listens.
    Live,
    /// A monitor has ended without removing it.
    Stale,
    /// The state can't be determined, for instance because another user owns the socket.
    Unknown,
}

/// A socket in the runtime directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundVm {
    /// Name of the VM.
    pub name: String,
    /// Its socket.
    pub socket: PathBuf,
    /// Whether a monitor listens.
    pub state: SocketState,
}

impl FoundVm {
    /// Creates a client of the VM.
    pub fn client(&self) -> Client {
        Client::new(&self.socket)
    }
}

/// Returns all sockets in a runtime directory by name. A missing directory has none.
pub fn find(directory: &Path) -> Result<Vec<FoundVm>, DiscoveryError> {
    let unreadable =
        |source| DiscoveryError::Directory { directory: directory.to_owned(), what: "read", source };
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(unreadable)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name();
        let Some(name) = name.to_str().and_then(|name| name.strip_suffix(SUFFIX)) else { continue };
        // The host daemon may listen in the same directory. It isn't a VM.
        if name == DAEMON {
            continue;
        }
        // An entry that disappears meanwhile doesn't count.
        if !entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            continue;
        }
        let socket = entry.path();
        found.push(FoundVm { name: name.to_owned(), state: probe(&socket), socket });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Determines a socket's state by a connection. The socket of a dead monitor refuses it. Never blocks.
pub fn probe(socket: &Path) -> SocketState {
    let connect = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        runtime.block_on(tokio::net::UnixStream::connect(socket)).map(drop)
    };
    match connect() {
        Ok(()) => SocketState::Live,
        Err(error) => match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => SocketState::Stale,
            // The listener's queue is full, so a monitor listens.
            io::ErrorKind::WouldBlock => SocketState::Live,
            _ => SocketState::Unknown,
        },
    }
}

/// Returns the running VM called `name`; without a name, the only one.
pub fn select(directory: &Path, name: Option<&str>) -> Result<FoundVm, DiscoveryError> {
    let mut running = find(directory)?;
    running.retain(|vm| vm.state != SocketState::Stale);
    let names = |running: &[FoundVm]| running.iter().map(|vm| vm.name.clone()).collect();
    match name {
        Some(name) => match running.iter().find(|vm| vm.name == name) {
            Some(vm) => Ok(vm.clone()),
            None => Err(DiscoveryError::NoSuchVm { name: name.to_owned(), running: names(&running) }),
        },
        None => match running.as_slice() {
            [only] => Ok(only.clone()),
            _ => Err(DiscoveryError::WhichVm { running: names(&running) }),
        },
    }
}

/// Creates the runtime directory with mode 0700 if it is missing. Checks that only this user or root may write to it.
pub fn prepare_directory(directory: &Path) -> Result<(), DiscoveryError> {
    use std::os::unix::fs::DirBuilderExt as _;

    let failed =
        |what| move |source| DiscoveryError::Directory { directory: directory.to_owned(), what, source };
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed("created")(error)),
        _ => {}
    }
    let metadata = std::fs::metadata(directory).map_err(failed("read"))?;
    if !metadata.is_dir() {
        return Err(failed("used")(io::ErrorKind::NotADirectory.into()));
    }
    let ours = std::fs::metadata("/proc/self").map_err(failed("read"))?.uid();
    if (metadata.uid() != ours && metadata.uid() != 0) || metadata.mode() & 0o022 != 0 {
        return Err(DiscoveryError::Untrusted {
            directory: directory.to_owned(),
            owner: metadata.uid(),
            mode: metadata.mode() & 0o777,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_users_runtime_directory_comes_before_the_systems() {
        assert_eq!(directory_in(Some("/run/user/7".into())), Path::new("/run/user/7/causeway"));
        assert_eq!(directory_in(Some("relative".into())), Path::new("/run/causeway"));
        assert_eq!(directory_in(None), Path::new("/run/causeway"));
    }

    #[test]
    fn live_sockets_stale_ones_and_other_files_are_told_apart() {
        let directory = tempfile::tempdir().unwrap();
        let live = UnixListener::bind(socket_of(directory.path(), "live")).unwrap();
        drop(UnixListener::bind(socket_of(directory.path(), "gone")).unwrap());
        std::fs::write(socket_of(directory.path(), "file"), "").unwrap();
        std::fs::write(directory.path().join("note.txt"), "").unwrap();
        let found = find(directory.path()).unwrap();
        let states: Vec<_> = found.iter().map(|vm| (vm.name.as_str(), vm.state)).collect();
        assert_eq!(states, [("gone", SocketState::Stale), ("live", SocketState::Live)]);
        assert_eq!(select(directory.path(), None).unwrap().name, "live");
        assert_eq!(select(directory.path(), Some("live")).unwrap().name, "live");
        let error = select(directory.path(), Some("gone")).unwrap_err().to_string();
        assert_eq!(error, "No VM called \"gone\" runs here; running: live");
        drop(live);
        assert_eq!(select(directory.path(), None).unwrap_err().to_string(), "No VM runs here");
    }

    #[test]
    fn no_directory_means_no_vms() {
        assert!(find(Path::new("/nonexistent/causeway")).unwrap().is_empty());
    }

    #[test]
    fn a_directory_that_others_can_write_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("causeway");
        prepare_directory(&directory).unwrap();
        assert_eq!(std::fs::metadata(&directory).unwrap().mode() & 0o777, 0o700);
        prepare_directory(&directory).unwrap();
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777)).unwrap();
        let error = prepare_directory(&directory).unwrap_err().to_string();
        assert!(error.contains("with mode 777, so others could"), "{error}");
        let below = parent.path().join("missing/causeway");
        assert!(matches!(prepare_directory(&below), Err(DiscoveryError::Directory { what: "created", .. })));
    }
}
