//! RDMA between a guest and a machine without Causeway: plain RoCEv2 frames, with Linux's rxe at the other end.
//!
//! ```text
//!  host h1                                                                         host h2: no Causeway
//!  guest a ── virtio-net 10.79.0.1, br0 ──────────────── x1 ═══ link ═══ x1 10.79.0.2
//!     │ vmxnet3 + pvrdma 10.80.0.1
//!  causeway host, segment s0 ── tap seg0, br1 ── x0 ═════ link ═══ x0 10.80.0.2, rxe0
//! ```
//!
//! The same link has the guest's Ethernet and its RDMA frames. The second link is for the tools' TCP connections.

use super::rdma_fabric::{Connected, tree, watched};
use super::rdma_tools::{CM, CONTROL, TCP, Verdict, judge, tail};
use crate::channel::Output;
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{self, Device, Layout, Member, NIC, Port, Runs};
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use roce::Packet;
use roce::frame::{Frame, PORT};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rdma-wire",
    about: "Debian's RDMA tools between a guest and a host that has only rdma_rxe, both ways; frames captured and decoded (--count N: each tool N times)",
    topology,
    run,
    prompt: None,
};

/// The part about inspect's output.
const INSPECT: &str = "inspect";
/// The part that captures frames between the hosts.
const CAPTURE: &str = "capture";
/// The part with invalid packets.
const STRANGE: &str = "strange";

/// Two CPUs each: for a polling program, and for the engine or rxe.
fn topology(_: &Options) -> Topology {
    Topology::new()
        .host(HostSpec::new("h1").rdma())
        .host(HostSpec::new("h2").memory(1536).rdma())
        .link("h1", "h2")
        .link("h1", "h2")
}

fn layout() -> Layout {
    Layout {
        hosts: vec![0],
        mtu: 1500,
        uplink: Some("x1"),
        daemons: vec![String::new()],
        nic: ",mac=52:54:00:4d:00:0{n},tap=seg0".to_owned(),
        cmdline: "",
    }
}

/// Bridges the segment's Ethernet with the link.
const H1: &str = "set -e; ip link add br1 type bridge; ip addr flush dev x0; ip link set x0 master br1 up
ip tuntap add seg0 mode tap vnet_hdr; ip link set seg0 master br1 up; ip link set br1 up";

/// A machine with rxe. `rdma-verify` is in the guests' root disk.
const H2: &str = "set -e; ip addr flush dev x0; ip addr flush dev x1; ip addr add 10.80.0.2/24 dev x0; ip addr add 10.79.0.2/24 dev x1
ip link set x0 up; ip link set x1 up; modprobe -a rdma_rxe ib_uverbs ib_umad rdma_ucm; rdma link add rxe0 type rxe netdev x0
mkdir -p /run/guest; mount -o ro /dev/vdd /run/guest; for d in dev sys proc; do mount --rbind /$d /run/guest/$d; done";

/// One end of a tool's run.
struct End<'a> {
    name: &'static str,
    at: &'a dyn Runs,
    port: Port,
    tcp: String,
    /// Prefix of a program that only the guests' root disk has.
    root: &'static str,
}

impl End<'_> {
    /// Replaces the placeholders; `server` is the tool's server.
    fn fill(&self, text: &str, server: &End<'_>) -> String {
        text.replace("{dev}", &self.port.device)
            .replace("{gid}", &self.port.gid.to_string())
            .replace("{root}", self.root)
            .replace("{addr}", &server.port.address)
            .replace("{tcp}", &server.tcp)
    }
}

/// A tool: its server's arguments, and its client's additional ones.
struct Tool {
    name: String,
    server: String,
    client: String,
    listening: &'static str,
    verdict: Verdict,
}

/// Few iterations: CPUs are emulated, and the kernel at the other end is busy as well.
fn tools() -> Vec<Tool> {
    let mut all = Vec::new();
    let mut add = |listening, verdict, server: String, client: String| {
        let name = server
            .replace("{root}", "")
            .replace(" -d {dev} -g {gid}", "")
            .replace(" -d {dev} -x {gid} -F", "");
        let name = name
            .replace(" --device {dev} --gid {gid}", "")
            .replace(" -s -a {addr}", "")
            .replace(" -b {addr}", "");
        all.push(Tool { name, server, client, listening, verdict });
    };
    let refused = Verdict::Absent("the Linux driver of the guest refuses unreliable connections");
    for (tool, more, verdict) in [
        ("rc", "-c -n 200", Verdict::Says("bytes in")),
        ("rc", "-c -n 20 -s 100001", Verdict::Says("bytes in")),
        ("rc", "-c -n 200 -e", Verdict::Says("bytes in")),
        ("ud", "-c -n 200 -s 1024", Verdict::Says("bytes in")),
        ("srq", "-c -n 200 -q 4", Verdict::Says("bytes in")),
        ("uc", "-c -n 200", refused),
    ] {
        let command = format!("ibv_{tool}_pingpong -d {{dev}} -g {{gid}} {more}");
        add(TCP, verdict, command.clone(), format!("{command} {{tcp}}"));
    }
    for more in ["-V -C 20", "-V -C 5 -S 65535"] {
        let client = format!("rping -c -a {{addr}} -v {more}");
        add(CM, Verdict::Says("ping data: rdma-ping"), format!("rping -s -a {{addr}} {more}"), client);
    }
    for (tool, more) in [("ucmatose", "-c 4 -C 10 -S 1024"), ("udaddy", "-c 2 -C 10")] {
        let (server, client) = (format!("{tool} -b {{addr}} {more}"), format!("{tool} -s {{addr}} {more}"));
        add(CM, Verdict::Says("return status 0"), server, client);
    }
    // rxe permits 128 outstanding READs, the guest's device 16. Without `-o` perftest requests its peer's number from the guest's
    // device, which refuses.
    for (tool, more) in [
        ("send_bw", "-n 200 -s 4096"),
        ("send_bw", "-n 200 -s 65536 -q 2"),
        ("send_bw", "-n 200 -s 4096 -b"),
        ("send_lat", "-n 200 -s 64"),
        ("write_bw", "-n 200 -s 65536"),
        ("write_lat", "-n 200 -s 64"),
        ("read_bw", "-n 200 -o 16 -s 65536"),
        ("read_lat", "-n 200 -o 16 -s 4096"),
        ("atomic_lat", "-n 200 -o 16 -A FETCH_AND_ADD"),
        ("atomic_bw", "-n 200 -o 16 -A CMP_AND_SWAP"),
        ("send_lat", "-n 200 -c UD -s 64"),
        ("send_bw", "-n 200 -s 4096 -R"),
    ] {
        let command = format!("ib_{tool} -d {{dev}} -x {{gid}} -F {more}");
        let (listening, to) = if more.ends_with("-R") { (CM, "{addr}") } else { (TCP, "{tcp}") };
        let client = format!("{command} {to}");
        add(listening, Verdict::Says("#bytes"), command, client);
    }
    let command = "{root}rdma-verify --device {dev} --gid {gid}".to_owned();
    let client = format!("{command} {{tcp}}");
    add(CONTROL, Verdict::Says("VERIFIED mismatches=0"), command, client);
    all
}

fn counted(value: &Value, name: &str) -> Result<u64> {
    let wire = &value["vms"]["a"]["nics"][NIC]["rdma"]["wire"];
    wire[name]
        .as_u64()
        .with_context(|| format!("The daemon's tree has no counter {name} of the wire: {wire}"))
}

struct Parts<'a> {
    report: &'a mut Report,
    results: Map<String, Value>,
    passed: u32,
    failed: u32,
}

impl Parts<'_> {
    fn part(&mut self, name: &str, start: Instant, result: Result<()>) {
        let seconds = (start.elapsed().as_secs_f64() * 10.0).round() / 10.0;
        let entry = match &result {
            Ok(()) => {
                progress!("passed  {name:58} {seconds:6.1} s");
                self.passed += 1;
                json!({"ok": true, "seconds": seconds})
            }
            Err(e) => {
                progress!("FAILED  {name:58} {seconds:6.1} s: {e:#}");
                self.failed += 1;
                json!({"ok": false, "seconds": seconds, "why": format!("{e:#}")})
            }
        };
        self.results.insert(name.to_owned(), entry);
    }
}

/// Runs a tool, its server at one end and its client at the other.
fn run_tool(tool: &Tool, server: &End<'_>, client: &End<'_>) -> Result<()> {
    let at_server = server.fill(&tool.server, server);
    let at_client = client.fill(&tool.client, server);
    let limit = Duration::from_secs(180);
    let ran = rdma::both((server.at, client.at), &at_server, true, tool.listening, &at_client, limit);
    let (said, answered): (Output, Output) = ran?;
    judge(tool.verdict, &said, &answered).map_err(|why| {
        for (who, output) in [("client", &answered), ("server", &said)] {
            progress!("  {who}:\n    {}\n    {}", tail(&output.stdout, 8), tail(&output.stderr, 8));
        }
        anyhow::anyhow!(why)
    })
}

/// Checks the daemon's reports while the connection manager's pings run.
fn inspected(hosts: &[Host], guest: &End<'_>, peer: &End<'_>) -> Result<()> {
    let tool = Tool {
        name: String::new(),
        server: "rping -s -a {addr} -V -C 300".to_owned(),
        client: "rping -c -a {addr} -V -v -C 300".to_owned(),
        listening: CM,
        verdict: Verdict::Says("ping data: rdma-ping"),
    };
    let here = hosts.get(..1).context("There is no host h1")?;
    let before = tree(&here[0])?;
    let (ran, seen) = watched(here, || run_tool(&tool, guest, peer))?;
    ran?;
    let after = tree(&here[0])?;
    let expected = Connected {
        vm: "a".to_owned(),
        peer: format!("::ffff:{}", peer.port.address),
        transport: "wire".to_owned(),
        host: None,
    };
    if seen.iter().ne([&expected]) {
        bail!("the daemon should show {expected:?} and nothing else; it showed {seen:?}");
    }
    for name in ["packets_sent", "packets_received"] {
        let (before, after) = (counted(&before, name)?, counted(&after, name)?);
        // A SEND, a READ or WRITE and their responses per ping, each way.
        if after - before < 300 {
            bail!("300 pings took {} of {name}", after - before);
        }
    }
    Ok(())
}

/// Returns the frames in a capture file (pcap, Ethernet).
fn frames(file: &[u8]) -> Result<Vec<&[u8]>> {
    let number = |at: usize| -> Option<usize> {
        let bytes = file.get(at..at + 4)?;
        usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
    };
    if number(0) != Some(0xA1B2_C3D4) || number(20) != Some(1) {
        bail!("The capture isn't one of Ethernet in this machine's byte order");
    }
    let (mut at, mut found) = (24, Vec::new());
    while at < file.len() {
        let (kept, whole) = number(at + 8).zip(number(at + 12)).context("The capture ends in a header")?;
        let frame = file.get(at + 16..at + 16 + kept).context("The capture ends in a frame")?;
        if kept != whole {
            bail!("A frame of {whole} bytes was captured in part");
        }
        found.push(frame);
        at += 16 + kept;
    }
    Ok(found)
}

/// Checks each frame with the RoCE core's code; counts them by opcode.
fn checked(file: &[u8], guest: &str) -> Result<(usize, [usize; 2], BTreeMap<u8, usize>)> {
    let frames = frames(file)?;
    let (mut ways, mut opcodes) = ([0; 2], BTreeMap::new());
    for (index, bytes) in frames.iter().enumerate() {
        let number = index + 1;
        let frame =
            Frame::parse(bytes).with_context(|| format!("Frame {number} is no whole one of RoCEv2"))?;
        Packet::parse(frame.packet)
            .with_context(|| format!("The packet of frame {number} makes no sense"))?;
        ways[usize::from(frame.addresses.source.to_string() != guest)] += 1;
        *opcodes.entry(frame.packet[0]).or_default() += 1;
    }
    Ok((frames.len(), ways, opcodes))
}

/// tshark's remark about datagrams of `ibv_ud_pingpong`, which sets a hop limit of 1.
const HOP_LIMIT: &str = "\"Time To Live\" only 1";

/// Returns the number of frames that tshark decodes as InfiniBand transport without a complaint, and its opcode names; `None` without
/// tshark.
fn decoded(file: &Path) -> Result<Option<(usize, BTreeMap<String, usize>)>> {
    let fields = [
        "infiniband.bth.opcode",
        "infiniband.invariant.crc",
        "_ws.malformed",
        "_ws.expert.severity",
        "_ws.expert.message",
    ];
    let mut command = Command::new("tshark");
    command.arg("-r").arg(file).args(["-n", "-T", "fields", "-E", "separator=/t"]);
    command.args(fields.iter().flat_map(|field| ["-e", field]));
    let output = match command.output() {
        Ok(output) => output,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).context("tshark can't be started"),
    };
    if !output.status.success() {
        bail!("tshark failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let (mut count, mut opcodes) = (0, BTreeMap::new());
    for (number, line) in (1..).zip(String::from_utf8_lossy(&output.stdout).lines()) {
        let mut words = line.split('\t');
        let mut next = || words.next().unwrap_or_default();
        let (opcode, icrc, malformed, severity, message) = (next(), next(), next(), next(), next());
        // Severities up to "chat" are remarks.
        let complaint = severity.split(',').filter_map(|s| s.parse::<u32>().ok()).any(|s| s > 0x20_0000)
            && message != HOP_LIMIT;
        if opcode.is_empty() || icrc.is_empty() || !malformed.is_empty() || complaint {
            bail!("tshark doesn't decode frame {number} as a good one: {line:?}");
        }
        count += 1;
        *opcodes.entry(opcode.to_owned()).or_default() += 1;
    }
    Ok(Some((count, opcodes)))
}

/// Runs tools while the link is captured, and checks every frame.
fn captured(h2: &Host, guest: &End<'_>, peer: &End<'_>, tools: &[Tool], report: &mut Report) -> Result<()> {
    let name = "rdma-wire.pcap";
    let listening = h2.start(
        // The kernel's ring has a fixed-size slot per frame: with tcpdump's default of 256 KiB it would have 64 slots.
        &format!(
            "exec tcpdump -Z root -i x0 -U --immediate-mode -s 6000 -B 32768 -w /share/{name} udp port {PORT}"
        ),
        None,
        None,
    )?;
    std::thread::sleep(Duration::from_secs(3));
    if let Some(code) = listening.try_wait() {
        bail!("tcpdump ended with status {code}: {}", listening.err.tail(5));
    }
    for part in
        ["ibv_rc_pingpong -c -n 200", "ibv_ud_pingpong", "rping -V -C 20", "ib_read_lat", "ib_atomic_lat"]
    {
        let tool =
            tools.iter().find(|tool| tool.name.starts_with(part)).context("A tool has another name")?;
        run_tool(tool, guest, peer).with_context(|| format!("{part} while the link is recorded"))?;
    }
    std::thread::sleep(Duration::from_secs(2));
    listening.signal(2)?;
    listening.wait(Duration::from_secs(20))?;
    let lost = listening.err.tail(4);
    if !lost.contains(" 0 packets dropped by kernel") {
        bail!("tcpdump lost frames: {lost}");
    }
    let path = h2.share().join(name);
    let file = std::fs::read(&path).with_context(|| format!("{} can't be read", path.display()))?;
    let (count, [from_guest, from_peer], opcodes) = checked(&file, &guest.port.address)?;
    // Each of the first two tools alone sends 200 messages each way.
    if from_guest < 400 || from_peer < 400 {
        bail!("{from_guest} frames came from the guest and {from_peer} from rxe");
    }
    for opcode in [0x04, 0x11, 0x0C, 0x10, 0x12, 0x14, 0x64] {
        if !opcodes.contains_key(&opcode) {
            bail!("no frame has opcode {opcode:#04x}; there are {opcodes:?}");
        }
    }
    report.figure("captured", json!({"frames": count, "from_guest": from_guest, "from_rxe": from_peer}));
    progress!(
        "{count} frames, {from_guest} from the guest, {from_peer} from rxe: ICRC of each is right (by cores/roce)"
    );
    let Some((known, names)) = decoded(&path)? else {
        bail!(
            "The capture is compared with tshark's decoding, and there is no tshark; install Debian's package tshark"
        );
    };
    if known != count {
        bail!("tshark decodes {known} of {count} frames");
    }
    progress!("tshark decodes all {known}; opcodes {names:?}");
    report.figure("tshark", json!({"frames": known, "opcodes": names}));
    Ok(())
}

/// Sends invalid packets: the daemon counts them, and the guest's kernel never gets them. A packet to another, closed port shows that
/// it would.
fn strange(h1: &Host, h2: &Host, guest: &End<'_>) -> Result<()> {
    let before = tree(h1)?;
    let script = format!(
        "import socket\nfor port, times in (({PORT}, 50), (4790, 3)):\n s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n \
         s.settimeout(2)\n s.connect(('{}', port))\n refused = False\n try:\n  for i in range(times):\n   s.send(bytes([i] * (i + 1)))\n  s.recv(1)\n \
         except ConnectionRefusedError:\n  refused = True\n except TimeoutError:\n  pass\n print(port, refused)\n",
        guest.port.address
    );
    let said = h2.sh(&format!("python3 - <<'E'\n{script}E\n"))?;
    let expected = format!("{PORT} False\n4790 True\n");
    if said != expected {
        bail!("what was refused is {said:?}, not {expected:?}");
    }
    let after = tree(h1)?;
    let mut dropped = 0;
    for name in ["icrc_errors", "malformed"] {
        dropped += counted(&after, name)? - counted(&before, name)?;
    }
    if dropped != 50 {
        bail!("{dropped} of 50 were counted as broken");
    }
    Ok(())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("rdma-wire is about Causeway's device; its peer has rxe");
    }
    let [h1, h2] = lab.hosts() else { bail!("There are {} hosts", lab.hosts().len()) };
    h1.sh(H1)?;
    h2.sh(H2)?;
    let (member, daemon) = rdma::alone(lab, options, &layout())?;
    let member: Member<'_> = member;
    let guest =
        End { name: "guest", at: &member, port: member.port.clone(), tcp: member.tcp.clone(), root: "" };
    let peer = End {
        name: "rxe",
        at: h2,
        port: rdma::find_port(h2, Device::Rxe)?,
        tcp: "10.79.0.2".to_owned(),
        root: "chroot /run/guest ",
    };
    member.sh(&format!("ping -q -c 2 -w 20 {} && ping -q -c 2 -w 20 {}", peer.tcp, peer.port.address))?;
    let mut parts = Parts { report, results: Map::new(), passed: 0, failed: 0 };
    let tools = tools();
    let rounds = options.count.unwrap_or(1);
    for (server, client) in [(&guest, &peer), (&peer, &guest)] {
        for (tool, round) in tools.iter().flat_map(|tool| (1..=rounds).map(move |round| (tool, round))) {
            let mut name = format!("{}, server {}, client {}", tool.name, server.name, client.name);
            if !options.wants(&name) {
                continue;
            }
            if rounds > 1 {
                name += &format!(" ({round})");
            }
            let start = Instant::now();
            let result = run_tool(tool, server, client);
            let failed = result.is_err();
            parts.part(&name, start, result);
            if failed {
                progress!("  daemon:\n    {}", daemon.err.tail(8).replace('\n', "\n    "));
                let rdma = tree(h1)?["vms"]["a"]["nics"][NIC]["rdma"].clone();
                let of_rxe = h2.sh("chroot /run/guest sh -c 'rdma resource show qp; grep . /sys/class/infiniband/rxe0/ports/1/hw_counters/*'")?;
                progress!(
                    "  wire: {}\n  connections: {}\n  counters: {}\n  rxe: {of_rxe}\n  kernel of a:\n    {}",
                    rdma["wire"],
                    rdma["connections"],
                    rdma["counters"],
                    tail(&member.kernel_log(4), 4)
                );
                member.answers()?;
            }
        }
    }
    if options.wants(INSPECT) {
        let start = Instant::now();
        parts.part(INSPECT, start, inspected(lab.hosts(), &guest, &peer));
    }
    if options.wants(CAPTURE) {
        let start = Instant::now();
        let result = captured(h2, &guest, &peer, &tools, parts.report);
        parts.part(CAPTURE, start, result);
    }
    // No regular packet of the two was ever invalid.
    let wire = tree(h1)?;
    let good = ["icrc_errors", "malformed"]
        .iter()
        .try_fold(0, |sum, name| Ok::<u64, anyhow::Error>(sum + counted(&wire, name)?))?;
    parts.report.check(good == 0, format!("{good} packets of rxe were taken for broken ones"));
    if options.wants(STRANGE) {
        let start = Instant::now();
        parts.part(STRANGE, start, strange(h1, h2, &guest));
    }
    let Parts { report, results, passed, failed } = parts;
    report.figure("passed", passed);
    report.figure("ran_again", crate::rdma::ran_again());
    report.figure("failed", failed);
    report.figure("wire", tree(h1)?["vms"]["a"]["nics"][NIC]["rdma"]["wire"].clone());
    report.figure("parts", results);
    report.check(failed == 0, format!("{failed} of {} parts failed", passed + failed));
    report.check(passed > 0, "nothing was run");
    rdma::end(&[&member], &[daemon])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_without_braces() {
        let mut names: Vec<String> = tools().into_iter().map(|t| t.name).collect();
        assert!(names.iter().all(|name| !name.contains('{')), "{names:?}");
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn a_capture_is_read_frame_by_frame_and_each_is_checked() {
        // The test vectors V1 and V4.
        let packets = [
            "4500003c123440004011df28c0a86401c0a86402c00012b7002800000400ffff0000001180000001526f4345763220746573742076656321a41ad16e",
            "45000030000040004011f168c0a86402c0a86401c00012b7001c00001100ffff00000012000000011f0000016552b3be",
        ];
        let mut file = Vec::new();
        for number in [0xA1B2_C3D4_u32, 0x0004_0002, 0, 0, 65535, 1] {
            file.extend(number.to_le_bytes());
        }
        for packet in packets {
            let digits = packet.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
            let mut frame = vec![2; 12];
            frame.extend([8, 0]);
            frame.extend(digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()));
            let len = u32::try_from(frame.len()).unwrap();
            for number in [0, 0, len, len] {
                file.extend(number.to_le_bytes());
            }
            file.extend(frame);
        }
        let (count, ways, opcodes) = checked(&file, "192.168.100.1").unwrap();
        assert_eq!((count, ways, opcodes), (2, [1, 1], BTreeMap::from([(0x04, 1), (0x11, 1)])));
        let last = file.len() - 1;
        file[last] ^= 1;
        assert!(checked(&file, "192.168.100.1").is_err());
        assert!(frames(&file[..last]).is_err());
    }
}
