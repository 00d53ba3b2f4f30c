//! Two hosts on this machine: network namespaces connected by a veth pair, removed at the end.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, bail};

/// The hosts' addresses, in a separate network.
pub const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2)];
/// Prefix of the namespaces' names; the process ID follows.
pub(super) const PREFIX: &str = "cwbench";
/// Name of the link on both.
pub const INTERFACE: &str = "eth0";

/// Number of namespaces that this process has created: each name is used once.
pub(super) static MADE: AtomicU32 = AtomicU32::new(0);

/// The two namespaces. Dropping them removes them, and their link with them.
#[derive(Debug)]
pub struct Link {
    names: Vec<String>,
}

impl Link {
    /// Creates them, with a link that transports IP packets of `mtu` bytes.
    pub fn new(mtu: u32) -> anyhow::Result<Self> {
        remove_left_behind();
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let mut link = Self { names: Vec::new() };
        for side in ["a", "b"] {
            let name = format!("{PREFIX}{}-{number}{side}", std::process::id());
            ip(&["netns", "add", &name])?;
            link.names.push(name);
        }
        let (a, b) = (link.name(0), link.name(1));
        ip(&["-n", a, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", b])?;
        for (name, address) in link.names.iter().zip(ADDRESSES) {
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", INTERFACE])?;
            ip(&["-n", name, "link", "set", INTERFACE, "mtu", &mtu.to_string(), "up"])?;
        }
        Ok(link)
    }

    fn name(&self, host: usize) -> &str {
        self.names.get(host).map_or("", String::as_str)
    }

    /// Returns a command that runs `program` on host 0 or 1. `ip` execs it, so that its process is the child. It ends with this
    /// process, even if that is killed.
    pub fn on(&self, host: usize, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.name(host), "setpriv", "--pdeathsig", "KILL"]).arg(program);
        command
    }
}

impl Link {
    /// Opens a TCP connection from host 0 to host 1; returns both ends.
    pub fn connection(&self) -> anyhow::Result<(TcpStream, TcpStream)> {
        let listener = self.inside(1, || TcpListener::bind((ADDRESSES[1], 0)))?;
        let address = listener.local_addr().context("A listening socket has no address")?;
        let from = self.inside(0, || TcpStream::connect(address))?;
        let (to, _) = listener.accept().context("A connection over the link could not be accepted")?;
        Ok((from, to))
    }

    /// Runs a function on one of the hosts, on a separate thread: sockets stay in the namespace of their creation.
    fn inside<T: Send>(
        &self,
        host: usize,
        work: impl FnOnce() -> std::io::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let path = format!("/run/netns/{}", self.name(host));
        let namespace = std::fs::File::open(&path).with_context(|| format!("{path} can't be opened"))?;
        let enter = || {
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), kind)?;
            work()
        };
        let joined = std::thread::scope(|scope| scope.spawn(enter).join());
        match joined {
            Ok(result) => result.with_context(|| format!("A socket on {path} could not be had")),
            Err(_) => bail!("A thread on {path} panicked"),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for name in &self.names {
            if let Err(error) = ip(&["netns", "del", name]) {
                eprintln!("bench: network namespace {name} is left behind: {error:#}");
            }
        }
    }
}

/// Removes namespaces of killed runs.
pub(super) fn remove_left_behind() {
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
        let Some(pid) = owner.and_then(|(pid, _)| pid.parse::<u32>().ok()) else { continue };
        if !std::path::Path::new("/proc").join(pid.to_string()).exists()
            && let Err(error) = ip(&["netns", "del", &name])
        {
            eprintln!("bench: network namespace {name} of an earlier run can't be removed: {error:#}");
        }
    }
}

pub(super) fn ip(arguments: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("ip")
        .args(arguments)
        .output()
        .context("The program ip can't be run; install iproute2")?;
    if !output.status.success() {
        bail!("'ip {}' failed: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(())
}
