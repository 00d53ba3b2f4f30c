//! DMA attacks by a guest's root on its card, without a driver. The same attacks must succeed on a bare card, and fail on the card
//! under its model.
//!
//! ```text
//!   20000000 ┌──────────────┐ the target: reserved by the host's kernel, not the guest's memory
//!            │ 1 MiB        │
//!   1ff00000 ├──────────────┤ the guest's last MiB, reserved too: windows across the end of memory begin here
//!            │ the guest's  │
//!   10000000 │ 512 MiB      │ 1 MiB for the attacker's rings and frames
//! ```
//!
//! Three judges are independent of the monitor:
//! - The target's bytes.
//! - The frames on the wire, as a card that reads the target sends what it read.
//! - The emulated IOMMU's log of every page that the card accessed.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::vpio_nics::{self, CARDS, HOST_SIDE};
use crate::dma_attack::HONEST;
use crate::dma_attack::cards::{Attack, Card, Fill, OWN, SIZE, TARGET};
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::guest_channel;
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::rdma;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "vpio-attacks",
    about: "A guest attacks its RTL8139 and e1000 by DMA: bytes outside its memory, judged by that memory, the wire and the IOMMU's log; a bare card as control",
    topology,
    run,
    prompt: None,
};

const NAME: &str = "attacker";
/// The attacked cards.
const ATTACKED: [&str; 2] = ["rtl8139", "e1000"];
const BOOT: Duration = Duration::from_secs(600);
const ATTACK_TIMEOUT: Duration = Duration::from_secs(300);
/// The target's content if it isn't zero, and the peer's frames.
const SECRET: &[u8; 16] = b"CWsecret-of-host";
const PEER: &[u8; 16] = b"CWsent-by-a-peer";
/// Milliseconds in which frames arrive.
const HOLD: u32 = 2500;
/// Frames of 1514 bytes that the peer sends at a time: more than a ring of 8 KiB holds.
const FRAMES: usize = 24;
const PAYLOAD: usize = 1472;
/// The monitor's own memory in the card's addresses: `vpio::vfio::RESERVED`, 2 MiB.
const MONITORS: std::ops::Range<u64> = 0xE000_0000..0xE020_0000;

fn dma_log() -> PathBuf {
    std::env::temp_dir().join(format!("causeway-lab-{}-wires/dma", std::process::id()))
}

fn topology(options: &Options) -> Topology {
    let mut topology = vpio_nics::topology(options);
    for host in &mut topology.hosts {
        for event in ["vtd_dmar_translate", "vtd_dmar_fault"] {
            host.qemu.extend(["-trace".to_owned(), format!("enable={event}")]);
        }
        host.qemu.extend(["-D".to_owned(), dma_log().display().to_string()]);
        // The unguarded card reaches all memory.
        host.kernel.push("iommu=pt".to_owned());
        host.kernel.extend(kept_free(2 * SIZE));
    }
    topology
}

/// Returns words of a kernel command line that reserve the attacker's memory, and `bytes` around the end of the guest's.
fn kept_free(bytes: u32) -> [String; 2] {
    [format!("memmap={SIZE:#x}${OWN:#x}"), format!("memmap={bytes:#x}${:#x}", TARGET - SIZE)]
}

/// An attack's effects, by the target's bytes and the wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Outside {
    written: usize,
    read: usize,
}

/// Returns the number of occurrences of `marker`.
fn count(bytes: &[u8], marker: &[u8]) -> usize {
    bytes.windows(marker.len()).filter(|window| *window == marker).count()
}

/// Returns counts from the IOMMU's log for the card in `slot`: pages accessed outside of the guest's and the monitor's memory, all
/// accessed pages, and blocked accesses.
fn reached(log: &str, slot: u8) -> (usize, usize, usize) {
    let (card, number) = (format!("dev 00:{slot:02x}.00 iova "), u32::from(slot) << 3);
    let mut found = (0, 0, 0);
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once(&card) {
            let text = rest.split_whitespace().next().unwrap_or_default().trim_start_matches("0x");
            let inside = u64::from_str_radix(text, 16)
                .is_ok_and(|page| page < u64::from(TARGET) || MONITORS.contains(&page));
            found.0 += usize::from(!inside);
            found.1 += 1;
        } else if let Some((_, rest)) = line.split_once("vtd_dmar_fault sid ") {
            let text = rest.split_whitespace().next().unwrap_or_default().trim_start_matches("0x");
            found.2 += usize::from(u32::from_str_radix(text, 16) == Ok(number));
        }
    }
    found
}

/// Returns the current length of a growing file.
fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |data| data.len())
}

/// Returns a growing file's bytes after the first `from`.
fn tail(path: &Path, from: u64) -> Result<Vec<u8>> {
    let read = || {
        let mut file = std::fs::File::open(path)?;
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        std::io::Result::Ok(bytes)
    };
    read().with_context(|| format!("Can't read {}", path.display()))
}

/// A card and its attacker.
struct Bench<'a> {
    host: &'a Host,
    card: &'static Card,
    /// The command before the attack's arguments, on the host.
    attacker: String,
    wire: PathBuf,
}

impl<'a> Bench<'a> {
    fn new(host: &'a Host, card: &'static Card, attacker: String) -> Self {
        Bench { host, card, attacker, wire: host.share().join(format!("wire-{}.pcap", card.name)) }
    }

    /// Runs `lab attack` with `arguments` while the peer sends. Returns the frames on the wire meanwhile.
    fn attempt(&self, arguments: &str) -> Result<Vec<u8>> {
        let before = length(&self.wire);
        let attack = self.attacker.replace("ARGUMENTS", arguments);
        let script = format!(
            "{attack} & p=$!; sleep 1; while kill -0 $p 2>/dev/null; do socat -u -b{PAYLOAD} FILE:/tmp/n/frames UDP-DATAGRAM:10.82.0.255:9,broadcast; sleep 0.5; done; wait $p"
        );
        self.host
            .run(&script, ATTACK_TIMEOUT)?
            .success()
            .with_context(|| format!("`lab attack {arguments}` failed"))?;
        std::thread::sleep(Duration::from_millis(500));
        tail(&self.wire, before)
    }

    /// Runs one attack; returns its effects.
    fn attack(&self, number: usize, attack: &Attack, bar: u8) -> Result<Outside> {
        let share = self.host.share();
        let fill = match attack.fill {
            Fill::Secret => SECRET.repeat(SIZE as usize / SECRET.len()),
            Fill::Zeros => vec![0; SIZE as usize],
        };
        std::fs::write(share.join("fill"), &fill)?;
        let place = TARGET / SIZE;
        self.host.sh(&format!(
            "dd if=/share/fill of=/dev/mem bs={SIZE} seek={place} count=1 conv=notrunc status=none"
        ))?;
        let wire = self.attempt(&format!("{} {number} --bar {bar} --hold {HOLD}", self.card.name))?;
        self.host
            .sh(&format!("dd if=/dev/mem of=/share/found bs={SIZE} skip={place} count=1 status=none"))?;
        let found = std::fs::read(share.join("found"))?;
        if found.len() != fill.len() {
            bail!("Only {} bytes of the target could be read", found.len());
        }
        Ok(Outside {
            written: found.iter().zip(&fill).filter(|(a, b)| a != b).count(),
            read: count(&wire, SECRET) * SECRET.len(),
        })
    }

    /// Checks that a correct driver's frame is sent, and others' are received.
    fn honest(&self) -> Result<()> {
        let marker = String::from_utf8_lossy(PEER);
        let wire = self.attempt(&format!("{} --hold {HOLD} --marker {marker}", self.card.name))?;
        if count(&wire, &HONEST) == 0 {
            bail!("The {} sent nothing for an honest driver", self.card.name);
        }
        Ok(())
    }

    /// Runs all attacks through each BAR; returns names and effects.
    fn all(&self, options: &Options) -> Result<Vec<(String, Outside)>> {
        self.honest().context("before the attacks")?;
        let mut found = Vec::new();
        for &bar in self.card.bars {
            for (number, attack) in self.card.attacks.iter().enumerate() {
                let name = format!("{}: {}, BAR {bar}", self.card.name, attack.name);
                if !options.wants(&name) {
                    continue;
                }
                let outside = self.attack(number, attack, bar).with_context(|| name.clone())?;
                progress!("    {name}: {} bytes written, {} read", outside.written, outside.read);
                found.push((name, outside));
            }
        }
        self.honest().context("after the attacks")?;
        Ok(found)
    }
}

/// Configures the card's peer (address, long frames), and records its wire.
fn listen(host: &Host, card: &Card, on: &vpio_nics::Card) -> Result<crate::channel::Session> {
    vpio_nics::address_peer(host, on, "vpio")?;
    host.sh(&format!("ip link set p-{0} mtu 9000; ip link set p-{0} promisc on", card.name))?;
    let session = host.spawn(
        "wire",
        &format!("exec tcpdump -Z root -i p-{0} -Q in -U --immediate-mode -s 12000 -B 8192 -w /share/wire-{0}.pcap", card.name),
    )?;
    let waited = session.err.clone();
    let until = std::time::Instant::now() + ATTACK_TIMEOUT;
    while !waited.tail(4).contains("listening on") {
        if session.try_wait().is_some() || std::time::Instant::now() > until {
            bail!("tcpdump doesn't listen: {}", waited.tail(4));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(session)
}

/// Boots a guest with the card under its model, with a policy for refused requests, and without a driver for it.
fn boot(host: &Host, card: &Card, on: &vpio_nics::Card, kernel: &str, policy: &str) -> Result<Guest> {
    let script = format!(
        "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\nmount -t tmpfs run /run\nip link set lo up\n\
         grep -E -i 'reserved' /proc/iomem | head -n 20\necho the attacker is ready\n{serve}sleep 100000",
        serve = guest_channel::serve("127.0.0.1"),
    );
    let mut spec = GuestSpec::new(NAME, kernel, 1)
        .memory(TARGET >> 20)
        .root()
        .cmdline(kept_free(SIZE))
        .script(&script)
        .file("agent", std::fs::read(crate::paths::agent()?)?);
    spec.extra.push(format!(
        "--vsock cid=3,socket={} --nic vpio:{},policy={policy}",
        guest_channel::socket(NAME),
        on.address()
    ));
    let guest = Guest::start(host, &spec, Vmm::Causeway)?;
    guest.expect("the attacker is ready", BOOT).with_context(|| format!("with the {}", card.name))?;
    Ok(guest)
}

/// The attack by registers alone that every card's model refuses. The IOMMU blocks addresses in descriptors, without a refused request.
const REFUSED: &str = "ring outside";

/// A refused request under policy `machine-check`: the guest's kernel handles the exception as for a broken processor, and ends.
fn checked(host: &Host, card: &'static Card, on: &vpio_nics::Card, kernel: &str) -> Result<()> {
    progress!("  {}: a machine check for what is refused", card.name);
    let number = card
        .attacks
        .iter()
        .position(|attack| attack.name == REFUSED)
        .with_context(|| format!("The {} has no attack \"{REFUSED}\"", card.name))?;
    let guest = boot(host, card, on, kernel, "machine-check")?;
    let attack =
        rdma::quoted(&format!("/lab/agent attack {} {number} --bar {} --hold 100", card.name, card.bars[0]));
    // The guest ends before it can answer.
    let session = host.spawn("attack", &format!("exec /share/.lab/lab in --wait 60 {NAME} {attack}"))?;
    guest.expect("Machine Check Exception: 4 Bank 7: b200000000000e0b", ATTACK_TIMEOUT)?;
    guest.expect("Kernel panic - not syncing: Fatal", ATTACK_TIMEOUT)?;
    session.kill()?;
    host.sh(&format!("causeway stop {NAME} --force"))?;
    guest.ended(Duration::from_secs(60))?;
    Ok(())
}

/// Runs a card's part: bare, then under its model.
fn part(host: &Host, card: &'static Card, options: &Options, report: &mut Report) -> Result<Value> {
    let on = CARDS.iter().find(|on| on.is(card.name)).context("The host has no such card")?;
    let address = on.address();
    let wire = listen(host, card, on)?;
    progress!("  {}: nobody guards it", card.name);
    host.sh(&format!(
        "cd /sys/bus/pci/devices/{address} && {{ [ ! -e driver ] || echo {address} > driver/unbind; }}"
    ))?;
    let bare = Bench::new(host, card, format!("/share/.lab/lab attack ARGUMENTS --address {address}"));
    let control = bare.all(options)?;
    for (name, outside) in &control {
        report.check(*outside != Outside::default(), format!("{name}: the bare card withstands"));
    }

    progress!("  {}: under its model", card.name);
    vpio_nics::bind(host, on)?;
    let log = dma_log();
    let before = length(&log);
    let kernel = options.kernels.first().map_or("6.1-generic", String::as_str);
    let guest = boot(host, card, on, kernel, "ignore")?;
    let inside = rdma::quoted("/lab/agent attack ARGUMENTS");
    let guarded = Bench::new(host, card, format!("/share/.lab/lab in --wait 60 {NAME} {inside}"));
    let found = guarded.all(options)?;
    for (name, outside) in &found {
        report.check(
            *outside == Outside::default(),
            format!("{name}: {outside:?} outside of the guest's memory"),
        );
    }
    host.sh(&format!("causeway stop {NAME} --force"))?;
    guest.ended(Duration::from_secs(60))?;
    checked(host, card, on, kernel).with_context(|| format!("{}: policy machine-check", card.name))?;
    wire.kill()?;
    let text = String::from_utf8_lossy(&tail(&log, before)?).into_owned();
    let (outside, pages, stopped) = reached(&text, on.slot());
    report.check(outside == 0, format!("{}: the card reached {outside} pages outside", card.name));
    report.check(pages > 0, format!("{}: the IOMMU's log has nothing of the card", card.name));
    let sum = |of: &[(String, Outside)]| {
        of.iter().map(|(_, outside)| outside.written + outside.read).sum::<usize>()
    };
    Ok(json!({
        "attacks": found.len(),
        "bytes_outside": sum(&found),
        "bytes_outside_of_a_bare_card": sum(&control),
        "pages_reached": pages,
        "pages_outside": outside,
        "stopped_by_iommu": stopped,
    }))
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    lab.install_causeway()?;
    let host = lab.host(0)?;
    vpio_nics::name_peers(host)?;
    std::fs::write(host.share().join("frames"), PEER.repeat(PAYLOAD * FRAMES / PEER.len()))?;
    host.sh("mkdir -p /tmp/n && cp /share/frames /tmp/n/frames")?;
    progress!("  the peer has {HOST_SIDE}");
    let (mut attacks, mut bytes) = (0, 0);
    for name in ATTACKED {
        let card = Card::find(name).context("There is no such card")?;
        if !card.attacks.iter().any(|attack| options.wants(&format!("{name}: {}, BAR 0", attack.name))) {
            continue;
        }
        let found = part(host, card, options, report)?;
        attacks += found["attacks"].as_u64().unwrap_or(0);
        bytes += found["bytes_outside"].as_u64().unwrap_or(0);
        report.figure(name, found);
        host.forget_consoles();
    }
    report.figure("attacks", attacks);
    report.figure("bytes_outside", bytes);
    report.check(attacks > 0, "no attack was tried");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_iommus_log_tells_what_a_card_reached() {
        let log = "vtd_dmar_translate dev 00:10.00 iova 0x10010000 -> gpa 0x5f10000 mask 0xfff\n\
                   vtd_dmar_translate dev 00:10.00 iova 0x20000000 -> gpa 0x20000000 mask 0xfff\n\
                   vtd_dmar_translate dev 00:10.00 iova 0xe0000000 -> gpa 0x6000000 mask 0xfff\n\
                   vtd_dmar_translate dev 00:14.00 iova 0x20000000 -> gpa 0x20000000 mask 0xfff\n\
                   vtd_dmar_fault sid 0x80 fault 5 addr 0x20000000 write 1\n\
                   vtd_dmar_fault sid 0xa0 fault 5 addr 0x20000000 write 1\n";
        assert_eq!(reached(log, 0x10), (1, 3, 1));
        assert_eq!(reached(log, 0x14), (1, 1, 1));
    }

    #[test]
    fn every_card_has_an_attack_by_registers_alone() {
        for name in ATTACKED {
            let card = Card::find(name).unwrap();
            let attack = card.attacks.iter().find(|attack| attack.name == REFUSED).unwrap();
            assert!(
                attack.memory.is_empty() && attack.writes.iter().any(|&(.., value)| value == TARGET),
                "{name}"
            );
        }
    }

    #[test]
    fn markers_are_counted_where_they_are() {
        assert_eq!(count(&[&b"xx"[..], SECRET, SECRET, b"CWsecret"].concat(), SECRET), 2);
    }
}
