//! Guests with the unmodified drivers of commodity NICs, in each mode: emulated with a tap, a card of the host under its model, and a
//! card of the host in passthrough.
//!
//! ```text
//!   guest 10.82.0.2 ── card (QEMU's, behind an emulated IOMMU, vfio-pci) ── wire ── e1000 10.82.0.1 ─────  host
//!   guest 10.82.0.2 ── emulation in the monitor ────────────────────────── tap 10.82.0.1 ─────────────── host
//! ```

use crate::guest::{Guest, GuestSpec, Vmm};
use crate::guest_channel;
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::rdma;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "vpio-nics",
    about: "RTL8139, NE2000 and e1000 with the guest's own drivers, emulated, under their models and passed through: ping, checksums, keystrokes, exits per packet",
    topology,
    run,
    prompt: None,
};

/// A card of the host, as QEMU emulates it, and its driver in the guest.
pub(super) struct Card {
    name: &'static str,
    qemu: &'static str,
    driver: &'static str,
    /// Its slot; the peer at the wire's other end is in the next one.
    slot: u8,
    /// KiB of each transfer: a card that moves each word through a port is slow.
    kib: u64,
    /// Receive window of the guest in bytes, which fits the card's ring. The emulated wire has no speed, and its cards hold back frames
    /// that don't fit. Linux's 8139too doesn't see the frames left in its ring after a poll of 64 frames (docs/reference/vpio.md). A real
    /// wire's limited speed prevents this.
    window: u32,
}

pub(super) const CARDS: [Card; 3] = [
    Card { name: "rtl8139", qemu: "rtl8139", driver: "8139too", slot: 0x10, kib: 1024, window: 16384 },
    Card { name: "ne2000", qemu: "ne2k_pci", driver: "ne2k-pci", slot: 0x12, kib: 256, window: 8192 },
    Card { name: "e1000", qemu: "e1000", driver: "e1000", slot: 0x14, kib: 1024, window: 65536 },
];
const MODES: [&str; 4] = ["virtual", "vpio", "passthrough", CHANGING];
/// Under its model, with changes to the emulation, to `passthrough` and back under traffic.
const CHANGING: &str = "changing";
/// The backends in order, and the changes that each takes. From the emulation to `passthrough` the NIC passes through the modelled
/// card.
const PLACES: [(&str, u32); 5] =
    [("emulation", 1), ("passthrough", 2), ("card", 1), ("passthrough", 1), ("card", 1)];
/// Number of changes, and pings at each backend.
const CHANGES: u32 = 20;
const PINGS: u32 = 3;
pub(super) const NAME: &str = "nics";
/// A guest prints this when its card has its driver.
pub(super) const READY: &str = "the nic is";
pub(super) const HOST_SIDE: &str = "10.82.0.1";
const GUEST_SIDE: &str = "10.82.0.2";
/// Keystrokes that are echoed one by one.
const KEYS: u32 = 50;
/// Bytes of a datagram that fits one frame of 1514 bytes.
const PAYLOAD: u32 = 1472;
const ALONE: u32 = 40;
/// Number of frames that arrive together, and of such groups.
const GROUP: u32 = 8;
const GROUPS: u32 = 10;
pub(super) const BOOT: Duration = Duration::from_secs(600);
/// Time-out of a transfer in seconds.
const BULK: u32 = 240;
pub(super) const COMMAND_TIMEOUT: Duration = Duration::from_secs(600);

impl Card {
    pub(super) fn address(&self) -> String {
        format!("0000:00:{:02x}.0", self.slot)
    }

    pub(super) fn is(&self, name: &str) -> bool {
        self.name == name
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn driver(&self) -> &'static str {
        self.driver
    }

    pub(super) fn window(&self) -> u32 {
        self.window
    }

    pub(super) fn slot(&self) -> u8 {
        self.slot
    }

    fn peer_mac(&self) -> String {
        format!("52:54:00:88:{:02x}:02", self.slot)
    }
}

/// Each card and its peer are at the two ends of a wire of datagrams. QEMU passes a card an ARP answer of 42 bytes unpadded, where a
/// real wire has at least 60. Linux's ne2k-pci drops shorter frames as errors. So the peer is one whose driver pads them: Linux's
/// e1000.
pub(super) fn topology(_: &Options) -> Topology {
    let mut arguments = vec!["-device".to_owned(), "intel-iommu,intremap=on,caching-mode=on".to_owned()];
    // Named like the lab's own directories, so that a later lab removes them.
    let wires = std::env::temp_dir().join(format!("causeway-lab-{}-wires", std::process::id()));
    if let Err(error) = std::fs::create_dir_all(&wires) {
        progress!("The folder {} of the cards' wires can't be made: {error}", wires.display());
    }
    let wire = |end: &str, name: &str| wires.join(format!("{end}{name}")).display().to_string();
    for card in &CARDS {
        let Card { name, qemu, slot, .. } = card;
        let peer = slot + 1;
        for (end, other, model, at, mac) in [
            ("c", "p", *qemu, *slot, format!("52:54:00:88:{slot:02x}:01")),
            ("p", "c", "e1000", peer, card.peer_mac()),
        ] {
            let (local, remote) = (wire(end, name), wire(other, name));
            arguments.push("-netdev".to_owned());
            arguments.push(format!(
                "dgram,id={end}{name},local.type=unix,local.path={local},remote.type=unix,remote.path={remote}"
            ));
            arguments.push("-device".to_owned());
            arguments.push(format!("{model},netdev={end}{name},mac={mac},addr={at:02x}.0,romfile="));
        }
    }
    Topology::new()
        .host(HostSpec::new("host").cpus(2).memory(2560).qemu(arguments).kernel(["intel_iommu=on"]))
}

/// A guest with one NIC.
pub(super) struct Member<'a> {
    pub(super) host: &'a Host,
    pub(super) guest: Guest,
    card: &'a Card,
    mode: &'static str,
}

/// Counters of the monitor and the guest.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    /// Accesses to the NIC's BARs that exited to the monitor.
    exits: u64,
    requests: u64,
    decisions: u64,
    nanoseconds: u64,
    sent: u64,
    received: u64,
}

impl Member<'_> {
    /// Runs a script in the guest.
    pub(super) fn run(&self, script: &str) -> Result<String> {
        let quoted = rdma::quoted(&format!("export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root; {script}"));
        let first = script.lines().next().unwrap_or_default();
        self.host
            .run(&format!("exec /share/.lab/lab in --wait 60 {NAME} {quoted}"), COMMAND_TIMEOUT)?
            .success()
            .with_context(|| format!("{first:?} failed in the guest"))
    }

    fn inspect(&self) -> Result<Value> {
        let text = self.host.sh(&format!("causeway inspect {NAME} --json"))?;
        serde_json::from_str(&text).context("`causeway inspect --json` printed no JSON")
    }

    /// Returns the NIC in the monitor's tree.
    pub(super) fn nic(&self) -> Result<Value> {
        let text = self.host.sh(&format!("causeway inspect {NAME} pci/functions --json"))?;
        let tree = serde_json::from_str(&text).context("`causeway inspect --json` printed no JSON")?;
        find(&tree, "kind", "nic").cloned().context("The tree has no NIC")
    }

    fn counts(&self) -> Result<Counts> {
        let (tree, nic) = (self.inspect()?, self.nic()?);
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        let ranges = tree["exits"]["ranges"].as_object().context("The exit table has no ranges")?;
        let ours = |name: &str| name.split([':', ' ']).any(|word| word == "nic0");
        let text =
            self.run("cat /sys/class/net/n0/statistics/tx_packets /sys/class/net/n0/statistics/rx_packets")?;
        let packets: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [sent, received] = packets[..] else { bail!("The guest's counters are {text:?}") };
        Ok(Counts {
            exits: ranges.iter().filter(|(name, _)| ours(name)).map(|(_, count)| number(count)).sum(),
            requests: number(&nic["decisions"]["requests"]),
            decisions: number(&nic["decisions"]["decisions"]),
            nanoseconds: number(&nic["access_nanoseconds"]) + number(&nic["wakeup_nanoseconds"]),
            sent,
            received,
        })
    }

    /// Measures the cost of `work` per packet.
    fn cost(&self, work: impl FnOnce() -> Result<()>) -> Result<Value> {
        let before = self.counts()?;
        work()?;
        // Time for frames in flight to arrive.
        std::thread::sleep(Duration::from_secs(1));
        let after = self.counts()?;
        let packets = (after.sent - before.sent) + (after.received - before.received);
        if packets == 0 {
            bail!("No packet was counted");
        }
        let per = |a: u64, b: u64| ((b - a) as f64 / packets as f64 * 100.0).round() / 100.0;
        let requests = after.requests - before.requests;
        let share = (requests > 0).then(|| (after.decisions - before.decisions) as f64 / requests as f64);
        Ok(json!({
            "sent": after.sent - before.sent,
            "received": after.received - before.received,
            "exits_per_packet": per(before.exits, after.exits),
            "microseconds_per_packet": per(before.nanoseconds, after.nanoseconds) / 1000.0,
            "checked_share": share.map(|share| (share * 1e4).round() / 1e4),
        }))
    }
}

/// Returns the first object at any depth whose `key` has this text.
fn find<'a>(tree: &'a Value, key: &str, text: &str) -> Option<&'a Value> {
    match tree {
        Value::Object(fields) if fields.get(key).and_then(Value::as_str) == Some(text) => Some(tree),
        Value::Object(fields) => fields.values().find_map(|value| find(value, key, text)),
        Value::Array(items) => items.iter().find_map(|value| find(value, key, text)),
        _ => None,
    }
}

/// Binds a card to vfio-pci.
pub(super) fn bind(host: &Host, card: &Card) -> Result<()> {
    let address = card.address();
    host.sh(&format!(
        "set -e; cd /sys/bus/pci/devices/{address} && echo vfio-pci > driver_override && {{ [ ! -e driver ] || echo {address} > driver/unbind; }} && \
         echo {address} > /sys/bus/pci/drivers_probe && [ \"$(basename $(readlink driver))\" = vfio-pci ]"
    ))
    .map(drop)
}

/// Loads the cards' modules, and names their peers.
pub(super) fn name_peers(host: &Host) -> Result<()> {
    host.sh(
        "modprobe vfio-pci && modprobe e1000 && dmesg | grep -q -e DMAR -e IOMMU && ls /sys/kernel/iommu_groups | grep -q .",
    )
    .context("The host has no IOMMU")?;
    for card in &CARDS {
        let (mac, name) = (card.peer_mac(), card.name);
        host.sh(&format!(
            "for d in /sys/class/net/*; do [ \"$(cat $d/address)\" = {mac} ] || continue; ip link set ${{d##*/}} name p-{name}; done; [ -e /sys/class/net/p-{name} ]"
        ))?;
    }
    Ok(())
}

/// Binds the cards to vfio-pci, names the peers, and starts the guests' servers.
pub(super) fn prepare(host: &Host) -> Result<()> {
    name_peers(host)?;
    CARDS.iter().try_for_each(|card| bind(host, card))?;
    let most = CARDS.iter().map(|card| card.kib).max().unwrap_or(1);
    host.sh(&format!(
        "mkdir -p /tmp/n && head -c {} /dev/urandom > /tmp/n/down && head -c {} /dev/zero > /tmp/n/group",
        most << 10,
        PAYLOAD * GROUP
    ))?;
    Ok(())
}

/// Sets the address on the peer of this card and mode only.
pub(super) fn address_peer(host: &Host, card: &Card, mode: &str) -> Result<()> {
    let device = if mode == "virtual" { "tapn".to_owned() } else { format!("p-{}", card.name) };
    let mut script =
        "ip link del brn 2>/dev/null; ip link del tapn 2>/dev/null; ip tuntap add tapn mode tap vnet_hdr\n"
            .to_owned();
    for other in &CARDS {
        script.push_str(&format!("ip addr flush dev p-{0}; ip link set p-{0} down\n", other.name));
    }
    if mode == CHANGING {
        // The guest's frames come from the wire or from the tap; its peer is behind both.
        script.push_str(&format!(
            "set -e; ip link add brn type bridge; for d in tapn p-{}; do ip link set $d master brn; ip link set $d up; done\n\
             ip addr add {HOST_SIDE}/24 dev brn; ip link set brn up",
            card.name
        ));
    } else {
        script.push_str(&format!("ip addr add {HOST_SIDE}/24 dev {device} && ip link set {device} up"));
    }
    host.sh(&script).map(drop)
}

fn boot<'a>(host: &'a Host, card: &'a Card, mode: &'static str, kernel: &str) -> Result<Member<'a>> {
    address_peer(host, card, mode)?;
    let nic = match mode {
        "virtual" => format!("virtual:{},tap=tapn", card.name),
        CHANGING => format!("vpio:{},tap=tapn", card.address()),
        _ => format!("{mode}:{}", card.address()),
    };
    start(host, card, mode, &nic, &[], kernel)
}

/// Starts a guest whose NIC is `nic`, with its card's driver and additional kernel command line words.
pub(super) fn start<'a>(
    host: &'a Host,
    card: &'a Card,
    mode: &'static str,
    nic: &str,
    words: &[&str],
    kernel: &str,
) -> Result<Member<'a>> {
    let script = format!(
        "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\nmount -t tmpfs run /run\nmodprobe {driver} || exit 1\n\
         n=$(ls /sys/class/net | grep -v lo | head -n 1); [ -n \"$n\" ] || {{ dmesg | tail -n 20; exit 2; }}\n\
         ip link set $n name n0; ip addr add {GUEST_SIDE}/24 dev n0; ip link set n0 up\n\
         echo {READY} $(basename $(readlink /sys/class/net/n0/device/driver)) $(cat /sys/class/net/n0/address)\n{serve}",
        driver = card.driver,
        serve = guest_channel::serve(GUEST_SIDE),
    );
    let mut spec = GuestSpec::new(NAME, kernel, 1)
        .memory(512)
        .root()
        .cmdline(words.iter().copied())
        .script(&script)
        .file("agent", std::fs::read(crate::paths::agent()?)?);
    spec.extra.push(format!("--vsock cid=3,socket={} --nic {nic}", guest_channel::socket(NAME)));
    let guest = Guest::start(host, &spec, Vmm::Causeway)?;
    let (line, _) = guest.expect(READY, BOOT)?;
    if !line.contains(card.driver) {
        bail!("The guest's driver is another: {line:?}");
    }
    progress!("  {}", line.trim());
    Ok(Member { host, guest, card, mode })
}

/// Transfers random bytes in each direction, and compares checksums.
pub(super) fn transfer(member: &Member<'_>, kib: u64) -> Result<()> {
    let bytes = kib << 10;
    let sum = |text: &str| text.lines().find_map(|line| Some(line.strip_prefix("SUM ")?.trim().to_owned()));
    let host = member.host;
    let server = host
        .spawn("sink", &format!("exec timeout {BULK} socat -u TCP-LISTEN:7001,reuseaddr CREATE:/tmp/n/up"))?;
    let sent = member.run(&format!(
        "head -c {bytes} /dev/urandom > /tmp/w && echo SUM $(sha256sum < /tmp/w) && timeout {BULK} socat -u FILE:/tmp/w TCP:{HOST_SIDE}:7001,retry=20,interval=0.2"
    ))?;
    if server.wait(COMMAND_TIMEOUT)? != Some(0) {
        bail!("The host's side of a transfer failed: {}", server.err.tail(4));
    }
    let got = host.sh("echo SUM $(sha256sum < /tmp/n/up)")?;
    if sum(&sent).is_none() || sum(&sent) != sum(&got) {
        bail!("{bytes} bytes to the host arrived changed: {sent:?} became {got:?}");
    }
    let server = host.spawn(
        "source",
        &format!("head -c {bytes} /tmp/n/down | exec timeout {BULK} socat -u - TCP-LISTEN:7002,reuseaddr"),
    )?;
    let got = member.run(&format!(
        "timeout {BULK} socat -u TCP:{HOST_SIDE}:7002,rcvbuf={},retry=20,interval=0.2 CREATE:/tmp/w && echo SUM $(sha256sum < /tmp/w); rm /tmp/w",
        member.card.window
    ))?;
    server.wait(COMMAND_TIMEOUT)?;
    let sent = host.sh(&format!("echo SUM $(head -c {bytes} /tmp/n/down | sha256sum)"))?;
    if sum(&sent).is_none() || sum(&sent) != sum(&got) {
        bail!("{bytes} bytes to the guest arrived changed: {sent:?} became {got:?}");
    }
    Ok(())
}

/// Prints diagnostics of hung traffic: whether the guest answers, and the state of its processes.
fn standing(member: &Member<'_>) {
    let guest = "grep -e n0 -e CPU0 /proc/interrupts; ss -tino; cat /sys/class/net/n0/statistics/{tx_packets,rx_packets,rx_errors,rx_dropped,rx_over_errors}; dmesg | tail -n 5; ip -s link show n0; ip neigh";
    for _ in 0..2 {
        eprintln!("guest: {}", member.run(guest).unwrap_or_else(|error| format!("{error:#}")));
        eprintln!("monitor: {:?}", member.nic());
        let host = member.host.sh("ss -tino; ip -s link; grep vfio /proc/interrupts; nstat -az 2>/dev/null | grep -i -e retrans -e timeouts");
        eprintln!("host: {}", host.unwrap_or_else(|error| format!("{error:#}")));
        std::thread::sleep(Duration::from_secs(5));
    }
}

/// Types one character at a time, and waits for its echo.
fn keystrokes(member: &Member<'_>) -> Result<()> {
    let server = member.host.spawn("echo", "exec socat TCP-LISTEN:7003,reuseaddr EXEC:cat")?;
    let script = format!(
        "exec bash -c 'for i in 1 2 3 4 5 6 7 8 9 10; do exec 3<>/dev/tcp/{HOST_SIDE}/7003 && break; sleep 0.3; done\n\
         for i in $(seq {KEYS}); do k=$((i % 10)); printf $k >&3; read -r -n 1 -t 30 got <&3; [ \"$got\" = $k ] || {{ echo key $i came back as $got; exit 1; }}; done; echo typed {KEYS}'"
    );
    let text = member.run(&script)?;
    if !text.contains(&format!("typed {KEYS}")) {
        bail!("Keystrokes got lost: {text:?}");
    }
    server.wait(COMMAND_TIMEOUT).map(drop)
}

fn table(member: &Member<'_>) -> Result<Value> {
    let host = member.host;
    let _sink = host.spawn("datagrams", "exec socat -u UDP-RECV:9 OPEN:/dev/null")?;
    member.run("socat -u UDP-RECV:9 OPEN:/dev/null >/dev/null 2>&1 & echo started")?;
    let alone = |to: &str| {
        format!("for i in $(seq {ALONE}); do printf %0{PAYLOAD}d 0 > /dev/udp/{to}/9; sleep 0.05; done")
    };
    let groups = |to: &str, file: &str| {
        format!(
            "for i in $(seq {GROUPS}); do socat -u -b{PAYLOAD} FILE:{file} UDP-SENDTO:{to}:9; sleep 0.2; done"
        )
    };
    let bash = |script: &str| format!("exec bash -c '{script}'");
    member.run(&format!("head -c {} /dev/zero > /tmp/group", PAYLOAD * GROUP))?;
    let mut rows = Map::new();
    let mut row = |name: &str, work: &dyn Fn() -> Result<()>| -> Result<()> {
        let cost = member.cost(work)?;
        progress!("    {} {} {name}: {cost}", member.card.name, member.mode);
        rows.insert(name.to_owned(), cost);
        Ok(())
    };
    row("sent_alone", &|| member.run(&bash(&alone(HOST_SIDE))).map(drop))?;
    row("sent_in_groups", &|| member.run(&bash(&groups(HOST_SIDE, "/tmp/group"))).map(drop))?;
    row("received_alone", &|| host.sh(&bash(&alone(GUEST_SIDE))).map(drop))?;
    row("received_in_groups", &|| host.sh(&bash(&groups(GUEST_SIDE, "/tmp/n/group"))).map(drop))?;
    Ok(rows.into())
}

/// Pings both ways with small and large frames, sends keystrokes, transfers.
fn traffic(member: &Member<'_>) -> Result<()> {
    member.run(&format!("ping -q -c 5 -i 0.3 -w 60 {HOST_SIDE}"))?;
    member.run(&format!("ping -q -c 3 -i 0.3 -w 60 -s {PAYLOAD} {HOST_SIDE}"))?;
    member.host.sh(&format!("ping -q -c 3 -i 0.3 -w 60 {GUEST_SIDE}"))?;
    progress!("    {} {}: ping", member.card.name, member.mode);
    keystrokes(member)?;
    progress!("    {} {}: keystrokes", member.card.name, member.mode);
    transfer(member, member.card.kib)?;
    progress!("    {} {}: transfers", member.card.name, member.mode);
    Ok(())
}

/// Pauses the VM, which revokes the card from the guest, and resumes it during pings. Then all traffic continues.
fn pause(member: &Member<'_>) -> Result<()> {
    for _ in 0..3 {
        member.host.sh(&format!("causeway pause {NAME}; sleep 0.5; causeway resume {NAME}"))?;
        member.run(&format!("ping -q -c 5 -i 0.3 -w 60 {HOST_SIDE}"))?;
    }
    transfer(member, member.card.kib)?;
    progress!("    {} {}: paused and resumed", member.card.name, member.mode);
    Ok(())
}

/// Changes the guest's backend between card, emulation and passthrough, while a stream of bytes runs that is compared in the end.
fn changes(member: &Member<'_>) -> Result<Value> {
    let host = member.host;
    let echo = host.spawn("echo", "exec socat TCP-LISTEN:7004,reuseaddr EXEC:cat")?;
    let stream = format!(
        "export PATH=/usr/sbin:/usr/bin:/sbin:/bin; head -c 65536 /dev/urandom > /tmp/s; \
         while [ ! -e /tmp/over ]; do cat /tmp/s; sleep 0.5; done | timeout {BULK} socat -t 60 STDIO TCP:{HOST_SIDE}:7004,retry=20,interval=0.2,rcvbuf={} > /tmp/e",
        // As in transfers: no more than the ring holds, since without a model (`passthrough`) the driver gets no event for the rest.
        member.card.window / 2
    );
    let stream =
        host.spawn("stream", &format!("exec /share/.lab/lab in --wait 60 {NAME} {}", rdma::quoted(&stream)))?;
    let (mut lost, mut counted) = (0, 0);
    for (behind, steps) in PLACES.into_iter().cycle().take(CHANGES as usize) {
        counted += steps;
        host.sh(&format!("causeway nic {NAME} --behind {behind}"))?;
        let text = member.run(&format!("ping -c {PINGS} -i 0.3 -w 30 {HOST_SIDE}; true"))?;
        let answered = text.lines().filter(|line| line.contains("bytes from")).count();
        if answered == 0 {
            bail!("With {behind} behind it the NIC answers nothing: {text:?}");
        }
        let nic = member.nic()?;
        let is = if nic["mode"] == "passthrough" { &nic["mode"] } else { &nic["behind"] };
        if is != behind || nic["changes"] != counted {
            bail!("The NIC was to have {behind} behind it after {counted} changes, and says {nic}");
        }
        lost += u64::from(PINGS).saturating_sub(u64::try_from(answered)?);
    }
    member.run("touch /tmp/over")?;
    if stream.wait(COMMAND_TIMEOUT)? != Some(0) {
        bail!("The stream broke: {}", stream.err.tail(4));
    }
    let text = member.run(
        "size=$(stat -c %s /tmp/e); [ $((size % 65536)) = 0 ] && [ $size -gt 0 ] || { echo $size bytes came back; exit 1; }\n\
         sent=$(for i in $(seq $((size / 65536))); do cat /tmp/s; done | sha256sum); [ \"$sent\" = \"$(sha256sum < /tmp/e)\" ] && echo STREAM $((size / 65536))",
    )?;
    let pieces = text.lines().find_map(|line| line.strip_prefix("STREAM ")?.trim().parse::<u64>().ok());
    let pieces = pieces.with_context(|| format!("The stream was not compared: {text:?}"))?;
    if pieces < u64::from(CHANGES) / 4 {
        bail!("The stream stood still: {pieces} pieces in {CHANGES} changes");
    }
    echo.wait(COMMAND_TIMEOUT)?;
    progress!(
        "    {} changed {CHANGES} times: {pieces} pieces of 64 KiB compared, {lost} pings lost",
        member.card.name
    );
    Ok(json!({ "changes": CHANGES, "compared_64_KiB": pieces, "lost_pings": lost }))
}

/// Tests one card in one mode, from boot to power-off.
fn part(lab: &Lab, card: &Card, mode: &'static str, kernel: &str) -> Result<Value> {
    let host = lab.host(0)?;
    let member = boot(host, card, mode, kernel)?;
    traffic(&member).inspect_err(|_| standing(&member))?;
    let mut found = Map::new();
    if mode == CHANGING {
        found.insert("changes".to_owned(), changes(&member).inspect_err(|_| standing(&member))?);
        traffic(&member).inspect_err(|_| standing(&member))?;
    } else {
        found.insert("packets".to_owned(), table(&member)?);
        pause(&member).inspect_err(|_| standing(&member))?;
    }
    let nic = member.nic()?;
    if mode == "vpio" || mode == CHANGING {
        progress!("    states {}, hooks {}, windows {}", nic["states"], nic["hooks"], nic["windows"]);
        if nic["violations"].as_array().is_none_or(|list| !list.is_empty()) {
            bail!("The model refused what the driver did: {}", nic["violations"]);
        }
    }
    if nic["failed"] != false {
        bail!("The NIC failed: {nic}");
    }
    if let Some(pinned) = nic.get("pinned_bytes_peak") {
        found.insert("pinned_bytes".to_owned(), pinned.clone());
    }
    host.sh(&format!("causeway stop {NAME} --force"))?;
    member.guest.ended(Duration::from_secs(60))?;
    let trouble = member.guest.trouble();
    if !trouble.is_empty() {
        bail!("The guest's kernel complained: {trouble:?}");
    }
    Ok(found.into())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    lab.install_causeway()?;
    let host = lab.host(0)?;
    prepare(host)?;
    let kernel = options.kernels.first().map_or("6.1-generic", String::as_str);
    let (mut passed, mut failed, mut rows) = (0, Vec::new(), Map::new());
    for card in &CARDS {
        for mode in MODES {
            let name = format!("{}-{mode}", card.name);
            if !options.wants(&name) {
                continue;
            }
            progress!("  {name}");
            match part(lab, card, mode, kernel) {
                Ok(found) => {
                    passed += 1;
                    rows.insert(name, found);
                }
                Err(error) => {
                    progress!("  {name} FAILED: {error:#}");
                    // Immediately, so that the failure counts independently of the next part.
                    report.check(false, format!("{name}: {error:#}"));
                    if !host.answers() {
                        return Err(error);
                    }
                    eprint!("{}", host.tails());
                    lab.hold()?;
                    failed.push(format!("{name}: {error:#}"));
                    host.run(&format!("causeway stop {NAME} --force"), COMMAND_TIMEOUT)?;
                    std::thread::sleep(Duration::from_secs(2));
                }
            }
            host.forget_consoles();
        }
    }
    report.figure("passed", passed);
    report.figure("failed", failed);
    report.figure("table", rows);
    report.check(passed > 0, "no part was run");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_and_their_peers_have_their_own_slots() {
        let topology = topology(&Options::default());
        topology.check().unwrap();
        let arguments = topology.hosts[0].qemu.join(" ");
        assert!(arguments.contains("rtl8139,netdev=crtl8139,mac=52:54:00:88:10:01,addr=10.0"), "{arguments}");
        assert!(arguments.contains("e1000,netdev=pne2000,mac=52:54:00:88:12:02,addr=13.0"));
        assert_eq!(CARDS[0].address(), "0000:00:10.0");
    }

    #[test]
    fn objects_are_found_at_any_depth() {
        let tree = json!({"a": [{"kind": "disk"}, {"b": {"kind": "nic", "x": 1}}]});
        assert_eq!(find(&tree, "kind", "nic").unwrap()["x"], 1);
        assert!(find(&tree, "kind", "none").is_none());
    }
}
