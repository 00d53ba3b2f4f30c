//! Two guests, usually on one host, with RDMA between them: through Causeway's device, or through rxe on their virtio NICs as a
//! reference. Otherwise the guests are the same: Debian's kernel 6.1 and user space.
//!
//! ```text
//!   guest a  10.79.0.1 virtio-net ── tap ── bridge on the host ── tap ── virtio-net 10.79.0.2  guest b
//!            10.80.0.1 vmxnet3 + pvrdma ── causeway host, segment s0 ── vmxnet3 + pvrdma 10.80.0.2
//! ```
//!
//! A [`Layout`] puts the guests elsewhere: on two hosts, for instance, whose bridges and daemons reach each other.

mod both;
mod moving;
mod port;

pub use self::both::{both, ran_again};
pub use self::moving::{Coming, await_guest};
pub use self::port::{Device, Port, find_port};

use crate::channel::{Output, Session};
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::guest_channel;
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::recipe::RDMA_KERNEL;
use crate::scenario::Options;
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use std::time::Duration;

/// The daemon's socket in the host.
pub const DAEMON_SOCKET: &str = "/run/causeway/host.sock";

/// A trapped doorbell costs 2 ms on an emulated host, and 5 ms under load, against microseconds on hardware. So a guest's load needs a
/// larger window than the daemon's default of 40 ms.
pub const DOORBELL_WINDOW_MS: u32 = 500;

/// Name of each guest's RDMA NIC in its monitor.
pub const NIC: &str = "rdma0";
/// Name of the Ethernet function in the monitor's counters.
pub const FUNCTION_ETHERNET: &str = "rdma0.0";
/// Name of the RDMA function in the monitor's counters.
pub const FUNCTION_RDMA: &str = "rdma0.1";

/// RAM of each guest in MiB.
const MEMORY_MIB: u32 = 768;
/// Time-out until a guest has booted and accepts commands.
const BOOT: Duration = Duration::from_secs(240);

/// One host for two guests and the daemon. Four CPUs: polling programs in both guests use two, and the daemon's engine needs one at once
/// when a message is in flight.
pub fn topology(_: &Options) -> Topology {
    Topology::new().host(HostSpec::new("host").cpus(4).memory(4096).rdma())
}

/// Placement of a pair's guests, and the connections of their NICs and daemons.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Host number of each guest: of `a`, `b` and so on.
    pub hosts: Vec<usize>,
    /// MTU of the bridge of the guests' virtio NICs.
    pub mtu: u32,
    /// A NIC of each host that connects these bridges.
    pub uplink: Option<&'static str>,
    /// Additional arguments for each host's daemon.
    pub daemons: Vec<String>,
    /// Additional options for each guest's RDMA NIC; `{n}` is the guest's number, from 1.
    pub nic: String,
    /// Additional words for the guests' kernel command lines.
    pub cmdline: &'static str,
}

impl Layout {
    /// Places all guests on the first host.
    pub fn one_host() -> Self {
        Layout {
            hosts: vec![0, 0],
            mtu: 9000,
            uplink: None,
            daemons: vec![String::new()],
            nic: String::new(),
            cmdline: "",
        }
    }
}

/// The guests' names in the order of their numbers.
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// A guest of the pair.
pub struct Member<'a> {
    /// `a`, `b`, `c` or `d`.
    pub name: &'static str,
    /// The guest and its console.
    pub guest: Guest,
    /// The address on virtio-net.
    pub tcp: String,
    /// The RDMA device under test.
    pub port: Port,
    host: &'a Host,
}

/// A place that runs scripts: a guest or a host.
pub trait Runs {
    /// Starts a script.
    fn start(&self, script: &str) -> Result<Session>;
    /// Runs a script to its end.
    fn run(&self, script: &str, timeout: Duration) -> Result<Output>;
}

impl Runs for Member<'_> {
    fn start(&self, script: &str) -> Result<Session> {
        Member::start(self, script)
    }

    fn run(&self, script: &str, timeout: Duration) -> Result<Output> {
        Member::run(self, script, timeout)
    }
}

impl Runs for Host {
    fn start(&self, script: &str) -> Result<Session> {
        Host::start(self, script, None, None)
    }

    fn run(&self, script: &str, timeout: Duration) -> Result<Output> {
        Host::run(self, script, timeout)
    }
}

/// Quotes a word for a shell.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

impl Member<'_> {
    /// Returns the command, inside the host, that runs a script in the guest.
    fn command(&self, script: &str) -> String {
        format!(
            "exec /share/.lab/lab in --wait 60 {} {}",
            self.name,
            quoted(&format!("{ENVIRONMENT}{script}"))
        )
    }

    /// Runs a script in the guest to its end.
    pub fn run(&self, script: &str, timeout: Duration) -> Result<Output> {
        self.host
            .run(&self.command(script), timeout)
            .with_context(|| format!("Guest {}: {:?}", self.name, script.lines().next().unwrap_or_default()))
    }

    /// Runs a script in the guest and returns its output. Fails if the script does.
    pub fn sh(&self, script: &str) -> Result<String> {
        self.run(script, Duration::from_secs(180))?.success().with_context(|| {
            format!("{:?} failed in guest {}", script.trim().lines().next().unwrap_or_default(), self.name)
        })
    }

    /// Starts a script in the guest.
    pub fn start(&self, script: &str) -> Result<Session> {
        self.host.start(&self.command(script), None, None)
    }

    /// Finds the device of a kind, and its first GID for an IPv4 address (RoCE version 2).
    pub fn find_port(&self, device: Device) -> Result<Port> {
        find_port(self, device).with_context(|| format!("Guest {}", self.name))
    }

    /// Returns the guest's host.
    pub fn host(&self) -> &Host {
        self.host
    }

    /// Fails if another guest is unreachable by Ethernet through either NIC.
    pub fn reaches(&self, other: &Member<'_>) -> Result<()> {
        let script = format!("ping -q -c 2 -w 20 {} && ping -q -c 2 -w 20 {}", other.tcp, other.port.address);
        self.sh(&script).map(drop)
    }

    /// Fails if the guest no longer accepts commands.
    pub fn answers(&self) -> Result<()> {
        let script = format!("/share/.lab/lab in --wait 5 {} true", self.name);
        let hangs = || {
            let trouble = self.guest.trouble().join(" / ");
            format!(
                "Guest {} takes no commands any more; its console says of trouble: {trouble:?}",
                self.name
            )
        };
        match self.host.run(&script, Duration::from_secs(40)) {
            Ok(output) if output.code == 0 => Ok(()),
            answer => {
                self.guest.session.suspect();
                match answer {
                    Ok(_) => Err(anyhow::anyhow!(hangs())),
                    Err(e) => Err(e.context(hangs())),
                }
            }
        }
    }

    /// Returns the last lines of the guest's kernel log.
    pub fn kernel_log(&self, lines: u32) -> String {
        self.run(&format!("dmesg | tail -n {lines}"), Duration::from_secs(60))
            .map(|o| o.stdout)
            .unwrap_or_default()
    }
}

/// Start of every script in a guest.
const ENVIRONMENT: &str =
    "export PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8; ";

/// Returns a guest's boot script: names and addresses of its NICs, then the wait for commands.
fn boot_script(number: usize, name: &str, mtu: u32) -> String {
    format!(
        "{ENVIRONMENT}\n\
         mount -t tmpfs run /run; mkdir -p /run/lock /run/rpcbind; hostname {name}\n\
         mount -t configfs configfs /sys/kernel/config 2>/dev/null; mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null\n\
         printf '127.0.0.1 localhost\\n10.79.0.1 a\\n10.79.0.2 b\\n10.79.0.3 c\\n10.79.0.4 d\\n' > /etc/hosts\n\
         # The kernel asks for modules in the initramfs' root, where there are none: hand it on to this one.\n\
         printf '#!/bin/busybox sh\\nexec /bin/busybox chroot /new /sbin/modprobe \"$@\"\\n' > /proc/1/root/modprobe\n\
         chmod +x /proc/1/root/modprobe; echo /modprobe > /proc/sys/kernel/modprobe\n\
         for d in /sys/class/net/*; do case $(basename \"$(readlink $d/device/driver)\") in virtio_net)\n\
         ip link set ${{d##*/}} name net0; ip link set net0 mtu {mtu}; ip addr add 10.79.0.{number}/24 dev net0; ip link set net0 up;; esac; done\n\
         echo RDMA guest {number} takes commands\n{}",
        guest_channel::serve(&format!("10.79.0.{number}"))
    )
}

/// Returns commands that load Causeway's two functions in the required order, and set the NIC's address.
fn pvrdma_up(number: usize) -> String {
    format!(
        "set -e; modprobe vmxnet3; i=0; while [ $i -lt 50 ]; do i=$((i+1)); nic=; for d in /sys/class/net/*; do\n\
         case $(basename \"$(readlink $d/device/driver)\") in vmxnet3) nic=${{d##*/}};; esac; done; [ -n \"$nic\" ] && break; sleep 0.2; done\n\
         [ -n \"$nic\" ] || {{ echo 'no vmxnet3 NIC; PCI:' >&2; lspci -nn >&2; dmesg | tail -n 8 >&2; exit 1; }}\n\
         [ $nic = rd0 ] || ip link set $nic name rd0; ip addr add 10.80.0.{number}/24 dev rd0; ip link set rd0 up\n\
         modprobe -a ib_uverbs ib_umad rdma_ucm; modprobe vmw_pvrdma\n\
         dmesg | grep -i -e pvrdma -e vmxnet3 | tail -n 8"
    )
}

/// Starts rxe on the virtio NIC.
const RXE_UP: &str =
    "set -e; modprobe -a rdma_rxe ib_uverbs ib_umad rdma_ucm; rdma link add rxe0 type rxe netdev net0";

/// Two running guests with RDMA between them, and additional ones of a layout.
pub struct Pair<'a> {
    /// The first guest: clients run here, and `lab shell` opens its prompt here.
    pub a: Member<'a>,
    /// The second guest: servers run here.
    pub b: Member<'a>,
    /// Their RDMA device.
    pub device: Device,
    more: Vec<Member<'a>>,
    lab: &'a Lab,
    layout: Layout,
    cpus: u32,
    // After the guests, which use them.
    daemons: Vec<Session>,
}

impl<'a> Pair<'a> {
    /// Boots both guests on one host and loads their devices.
    pub fn start(lab: &'a Lab, options: &Options) -> Result<Self> {
        Self::place(lab, options, Layout::one_host())
    }

    /// Boots the first two guests of a layout, and loads their devices.
    pub fn place(lab: &'a Lab, options: &Options, layout: Layout) -> Result<Self> {
        let device = options.rdma_device()?;
        lab.install_causeway()?;
        let mut daemons = Vec::new();
        for (number, arguments) in layout.daemons.iter().enumerate() {
            let host = lab.host(number)?;
            bridge(host, &layout)?;
            if device == Device::Pvrdma {
                daemons.push(start_daemon(host, arguments)?);
            }
        }
        // Two: the tasklets of rxe use one fully, and a guest without another hangs.
        let cpus = options.cpus.first().copied().unwrap_or(2);
        let guests = [1, 2].map(|number| boot(lab, &layout, device, cpus, number));
        let [a, b] = guests;
        let (a, b) = (a?, b?);
        let a = up(lab, &layout, device, 1, a)?;
        let b = up(lab, &layout, device, 2, b)?;
        let pair = Pair { a, b, device, more: Vec::new(), lab, layout, cpus, daemons };
        pair.a.reaches(&pair.b)?;
        Ok(pair)
    }

    /// Boots the layout's next guest.
    pub fn join(&mut self) -> Result<()> {
        let number = self.more.len() + 3;
        let guest = boot(self.lab, &self.layout, self.device, self.cpus, number)?;
        let member = up(self.lab, &self.layout, self.device, number, guest)?;
        self.a.reaches(&member)?;
        self.more.push(member);
        Ok(())
    }

    /// Returns the guests beyond the first two.
    pub fn more(&self) -> &[Member<'a>] {
        &self.more
    }

    /// Returns the daemons' processes: one per host, or none without Causeway's device.
    pub fn daemons(&self) -> &[Session] {
        &self.daemons
    }

    /// Returns the first guest's host.
    pub fn host(&self) -> &'a Host {
        self.a.host
    }

    /// Adds rxe on the virtio NICs of both guests.
    pub fn add_rxe(&self) -> Result<(Port, Port)> {
        if self.device == Device::Rxe {
            return Ok((self.a.port.clone(), self.b.port.clone()));
        }
        self.a.sh(RXE_UP)?;
        self.b.sh(RXE_UP)?;
        Ok((self.a.find_port(Device::Rxe)?, self.b.find_port(Device::Rxe)?))
    }

    /// [`both`], with the second guest as the server and the first as its client.
    pub fn both(
        &self,
        server: &str,
        server_ends: bool,
        listening: &str,
        client: &str,
        timeout: Duration,
    ) -> Result<(Output, Output)> {
        both((&self.b, &self.a), server, server_ends, listening, client, timeout)
    }

    /// Powers all guests off. Monitors and daemons must end successfully.
    pub fn finish(self) -> Result<()> {
        let members: Vec<&Member<'_>> = [&self.a, &self.b].into_iter().chain(&self.more).collect();
        end(&members, &self.daemons)
    }
}

/// Powers guests off. Their monitors must end successfully, and so must the daemons after a signal.
pub fn end(members: &[&Member<'_>], daemons: &[Session]) -> Result<()> {
    for m in members {
        // The connection ends with the guest.
        let _ = m.start("busybox poweroff -f")?.wait(Duration::from_secs(20));
    }
    for m in members {
        m.guest.ended(Duration::from_secs(60))?;
    }
    for daemon in daemons {
        if let Some(code) = daemon.try_wait() {
            bail!("The host daemon ended with status {code} while guests used it:\n{}", daemon.err.tail(15));
        }
        daemon.signal(15)?;
        match daemon.wait(Duration::from_secs(60))? {
            Some(0) => {}
            Some(code) => {
                bail!("The host daemon ended with status {code} at SIGTERM:\n{}", daemon.err.tail(15))
            }
            None => bail!("The host daemon didn't end within 60 s of SIGTERM:\n{}", daemon.err.tail(15)),
        }
    }
    Ok(())
}

/// Starts the daemon of a host and the first guest of a layout, without a second one.
pub fn alone<'a>(lab: &'a Lab, options: &Options, layout: &Layout) -> Result<(Member<'a>, Session)> {
    let (member, mut daemons) = alone_among(lab, options, layout)?;
    Ok((member, daemons.pop().context("The layout has no daemon")?))
}

/// Starts the daemons of all hosts of a layout that have one, and its first guest.
pub fn alone_among<'a>(
    lab: &'a Lab,
    options: &Options,
    layout: &Layout,
) -> Result<(Member<'a>, Vec<Session>)> {
    lab.install_causeway()?;
    let mut daemons = Vec::new();
    for (number, arguments) in layout.daemons.iter().enumerate() {
        let host = lab.host(number)?;
        bridge(host, layout)?;
        daemons.push(start_daemon(host, arguments)?);
    }
    let cpus = options.cpus.first().copied().unwrap_or(2);
    let guest = boot(lab, layout, Device::Pvrdma, cpus, 1)?;
    Ok((up(lab, layout, Device::Pvrdma, 1, guest)?, daemons))
}

/// Creates the bridge of a host's virtio NICs, with the uplink.
fn bridge(host: &Host, layout: &Layout) -> Result<()> {
    // An earlier pair on this host may have left the interfaces. Its daemon has ended.
    host.sh(&format!(
        "[ -e /sys/class/net/br0 ] || ip link add br0 type bridge; ip link set br0 mtu {} up && mkdir -p /run/causeway",
        layout.mtu
    ))?;
    if let Some(nic) = layout.uplink {
        host.sh(&format!("ip addr flush dev {nic}; ip link set {nic} mtu {} master br0 up", layout.mtu))?;
    }
    Ok(())
}

/// Starts a guest without waiting for its boot.
fn boot(lab: &Lab, layout: &Layout, device: Device, cpus: u32, number: usize) -> Result<Guest> {
    boot_with(lab, layout, device, cpus, number, None)
}

/// As [`boot`]. With an address, its monitor waits there for an incoming migration.
fn boot_with(
    lab: &Lab,
    layout: &Layout,
    device: Device,
    cpus: u32,
    number: usize,
    incoming: Option<&str>,
) -> Result<Guest> {
    let index = number.wrapping_sub(1);
    let (Some(&name), Some(&host)) = (NAMES.get(index), layout.hosts.get(index)) else {
        bail!("There is no guest number {number} in this layout")
    };
    let host = lab.host(host)?;
    let tap = format!("tap{name}");
    let mtu = layout.mtu;
    host.sh(&format!(
        "[ -e /sys/class/net/{tap} ] || ip tuntap add {tap} mode tap vnet_hdr; ip link set {tap} mtu {mtu} master br0 up"
    ))?;
    let mut spec = GuestSpec::new(name, RDMA_KERNEL, cpus)
        .memory(MEMORY_MIB)
        .disk("/dev/vdd", true)
        .tap(&format!("{tap},mac=52:54:00:4c:00:0{number},mtu={mtu}"))
        .script(&boot_script(number, name, mtu))
        .cmdline(layout.cmdline.split_whitespace())
        // The agent of this build.
        .file("agent", std::fs::read(crate::paths::agent()?)?)
        .file("pyverbs-run.py", include_bytes!("../assets/pyverbs-run.py").to_vec())
        .file("pyverbs-trace.py", include_bytes!("../assets/pyverbs-trace.py").to_vec());
    spec.extra.push(format!("--vsock cid={},socket={}", number + 2, guest_channel::socket(name)));
    if device == Device::Pvrdma {
        let more = layout.nic.replace("{n}", &number.to_string());
        spec.extra.push(format!("--rdma name={NIC},segment=s0{more}"));
    }
    match incoming {
        None => Guest::start(host, &spec, Vmm::Causeway),
        // An incoming VM needs no boot files.
        Some(address) => {
            spec.extra.push(format!("--insecure --incoming {address}"));
            Guest::start_with(host, &spec, Vmm::Causeway, &format!("/lab/{RDMA_KERNEL}/initrd"))
        }
    }
}

/// Waits until a guest accepts commands, and loads its device.
fn up<'a>(lab: &'a Lab, layout: &Layout, device: Device, number: usize, guest: Guest) -> Result<Member<'a>> {
    let index = number.wrapping_sub(1);
    let (Some(&name), Some(&host)) = (NAMES.get(index), layout.hosts.get(index)) else {
        bail!("There is no guest number {number} in this layout")
    };
    let host = lab.host(host)?;
    guest.expect("takes commands", BOOT)?;
    let port = Port { device: String::new(), gid: 0, address: String::new(), interface: String::new() };
    let mut member = Member { name, guest, tcp: format!("10.79.0.{number}"), port, host };
    match device {
        Device::Rxe => drop(member.sh(RXE_UP)?),
        Device::Pvrdma => {
            let log = member.sh(&pvrdma_up(number))?;
            for line in log.lines() {
                progress!("guest {name}: {}", line.trim());
            }
        }
    }
    member.port = member.find_port(device)?;
    progress!(
        "guest {name}: {} on {}, GID {} for {}",
        member.port.device,
        member.port.interface,
        member.port.gid,
        member.port.address
    );
    Ok(member)
}

/// Starts a host's daemon and waits until it listens.
pub fn start_daemon(host: &Host, arguments: &str) -> Result<Session> {
    let log =
        std::env::var("LAB_DAEMON_LOG").map(|filter| format!("--log-level {filter}")).unwrap_or_default();
    let window = match arguments.contains("--doorbell-window") {
        true => String::new(),
        false => format!("--doorbell-window {DOORBELL_WINDOW_MS}"),
    };
    let daemon = host.spawn(
        "causeway host",
        &format!("exec causeway {log} host --socket {DAEMON_SOCKET} {window} {arguments}"),
    )?;
    for _ in 0..100 {
        if let Some(code) = daemon.try_wait() {
            bail!("`causeway host` ended with status {code}: {}", daemon.err.tail(10));
        }
        if host.run(&format!("test -S {DAEMON_SOCKET}"), Duration::from_secs(20))?.code == 0 {
            return Ok(daemon);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    bail!("`causeway host` made no socket {DAEMON_SOCKET} within 20 s: {}", daemon.err.tail(10))
}

/// Opens the prompt of `lab shell --scenario`: both guests run, and the prompt is in the first one or in its host.
pub fn prompt(lab: &Lab, options: &Options, host: Option<usize>) -> Result<i32> {
    crate::need_terminal()?;
    let pair = Pair::start(lab, options)?;
    if let Some(number) = host {
        return crate::interactive(lab.host(number)?);
    }
    let intro = format!(
        "\r\nThis is guest a, with {} at {}; guest b is {} (virtio-net: {} and {}). Nothing has been run yet.\r\n\
         `on b 'COMMAND'` runs a command in guest b, `on b` opens a shell there: on b 'ib_write_lat -d {device} -x {gid}' & sleep 2; \
         ib_write_lat -d {device} -x {gid} {server}\r\n\
         Leave with `exit` or Ctrl-].\r\n\r\n",
        pair.a.port.device,
        pair.a.port.address,
        pair.b.port.address,
        pair.a.tcp,
        pair.b.tcp,
        device = pair.a.port.device,
        gid = pair.a.port.gid,
        server = pair.b.tcp,
    );
    let code = crate::shell::prompt(pair.host(), &intro, "exec /share/.lab/lab in a")?;
    println!("\nLeft guest a.");
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }
}
