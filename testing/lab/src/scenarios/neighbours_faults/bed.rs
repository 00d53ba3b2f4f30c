//! The guests and their traffic, and its observation: the traffic's progress, the registry's reports, and the processes' resources.

use super::resident::Resident;
use crate::bare_guest;
use crate::channel::Session;
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::guest_channel;
use crate::host::Host;
use crate::image::Images;
use crate::kernel::Modules;
use crate::lab::Lab;
use crate::neighbours_image::module;
use crate::progress;
use crate::rdma::{self, DAEMON_SOCKET};
use crate::recipe::{self, Artifact};
use crate::scenario::Options;
use crate::scenarios::neighbours_member::find;
use crate::traffic::Done;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// RAM of each guest in MiB.
const MEMORY_MIB: u32 = 192;
/// Time-out of a guest's heartbeat at the daemon: an emulated host may stall for a second or two.
pub const PATIENCE_MS: u32 = 5_000;
/// Time-out of a boot, which takes minutes on a busy machine.
const BOOT: Duration = Duration::from_secs(900);
/// Time-out without progress of a stream.
const HANG: Duration = Duration::from_secs(300);
/// Blocks that each stream must have moved after a fault to count as running again.
const MOVED: u64 = 3;

/// The guests.
pub const NAMES: [&str; 3] = ["a", "b", "c"];
const MODULES: [&str; 4] = ["cw_neigh", "mmnet", "mmblk", "neigh_fault"];
/// Modules of the guests, including those for commands.
const NEEDED: [&str; 4] = ["virtio_pci", "virtio_blk", "vmw_vsock_virtio_transport", "configfs"];
const UP: &str = include_str!("../../../assets/neighbours-up.sh");

/// Programs start often, so they run from memory. From 9p each start would read every page again.
const PROGRAMS: &str = "mkdir -p /run/programs && cp /share/bin/causeway /share/.lab/lab /run/programs/ && mount --bind /run/programs /share/bin";

/// A stream: its name, the guest that reports its progress, and the other guest.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    /// File name in the guest's `/run`.
    pub name: &'static str,
    /// The sender, or the user of the disk.
    pub from: usize,
    /// The receiver, or the server of the disk.
    pub to: usize,
}

/// All streams: over mmnet (`n-`) and over mmblk (`d-`).
pub const STREAMS: [Stream; 6] = [
    Stream { name: "n-ab", from: 0, to: 1 },
    Stream { name: "n-ca", from: 2, to: 0 },
    Stream { name: "n-cb", from: 2, to: 1 },
    Stream { name: "d-ab", from: 0, to: 1 },
    Stream { name: "d-ca", from: 2, to: 0 },
    Stream { name: "d-cb", from: 2, to: 1 },
];

impl Stream {
    /// Returns whether a guest is one of its ends.
    pub const fn has(&self, guest: usize) -> bool {
        self.from == guest || self.to == guest
    }
}

/// Exports (name, disk, client), devices (stream, server) and senders (stream, address) of each guest.
const LISTS: [&str; 3] = [
    "ME=1; EXPORTS='ca:/dev/vda:c'; DEVICES='d-ab:b'; SENDS='n-ab:10.81.21.2'",
    "ME=2; EXPORTS='ab:/dev/vda:a cb:/dev/vdb:c'; DEVICES=; SENDS=",
    "ME=3; EXPORTS=; DEVICES='d-ca:a d-cb:b'; SENDS='n-ca:10.81.31.1 n-cb:10.81.32.2'",
];
const DISKS: [&[&str]; 3] = [&["a0"], &["b0", "b1"], &[]];

/// Progress of the streams, and number of lost connections, from each guest.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// Progress by stream.
    pub done: BTreeMap<String, Done>,
    /// By guest and peer: number of carrier losses of mmnet.
    pub carrier: BTreeMap<(usize, String), u64>,
    /// By stream over mmblk: number of losses of its server.
    pub lost: BTreeMap<String, u64>,
}

/// Resources of a process, the host or a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Held {
    /// Open descriptors of a process.
    pub fds: u64,
    /// Mappings: a process' mappings of windows and segments, a guest's of device memory.
    pub maps: u64,
    /// In KiB: a process' private memory; the host's files in memory (including all guests' RAM); a guest's used memory without caches
    /// (including the pages that describe windows).
    pub kib: u64,
}

/// The complete test bed.
pub struct Bed<'a> {
    /// The guests.
    pub guests: [Resident; 3],
    /// Their host.
    pub host: &'a Host,
    /// The host daemon.
    pub daemon: Session,
    /// The guests' kernel.
    pub kernel: String,
    /// The guests' slots by number, while no guest leaves.
    slots: Option<[u64; 3]>,
    cpus: u32,
}

impl<'a> Bed<'a> {
    /// Boots everything, and waits until all streams make progress.
    pub fn start(lab: &'a Lab, options: &Options) -> Result<Self> {
        lab.install_causeway()?;
        let host = lab.host(0)?;
        let disks: Vec<String> = DISKS.concat().iter().map(|disk| format!("/disks/{disk}.raw")).collect();
        // The memory of processes, including restarted ones, is compared before and after. Transparent huge pages in a heap would look
        // like a leak.
        host.sh("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")?;
        host.sh(&format!(
            "mkdir -p /run/causeway /disks; mke2fs -q -F /dev/vdc; mount /dev/vdc /disks; truncate -s 16M {}",
            disks.join(" ")
        ))?;
        let daemon = daemon(host)?;
        let kernel = options.kernels.first().map_or(recipe::NEIGHBOUR_KERNELS[0], String::as_str).to_owned();
        let cpus = options.cpus.first().copied().unwrap_or(1);
        host.sh(PROGRAMS)?;
        for number in 0..NAMES.len() {
            bring(lab, host, &kernel, number)?;
        }
        let [a, b, c] = [0, 1, 2].map(|number| boot(host, &kernel, cpus, number));
        let [a, b, c] = [resident(host, a?, 0), resident(host, b?, 1), resident(host, c?, 2)];
        let bed = Bed { guests: [a?, b?, c?], host, daemon, kernel, slots: None, cpus };
        progress!("three guests take commands");
        bed.until_all_move(&Seen::default())?;
        Ok(bed)
    }

    /// Returns a guest by its number.
    pub fn guest(&self, number: usize) -> Result<&Resident> {
        self.guests.get(number).with_context(|| format!("There is no guest {number}"))
    }

    /// Kills a guest's monitor and boots the guest again.
    pub fn replace(&mut self, number: usize) -> Result<()> {
        let old = self.guest(number)?;
        old.guest.session.kill()?;
        old.guest.session.wait(Duration::from_secs(60))?;
        let new = resident(self.host, boot(self.host, &self.kernel, self.cpus, number)?, number)?;
        if let Some(guest) = self.guests.get_mut(number) {
            *guest = new;
        }
        self.slots = None;
        Ok(())
    }

    /// Kills the daemon and starts another.
    pub fn replace_daemon(&mut self) -> Result<()> {
        self.daemon.kill()?;
        self.daemon.wait(Duration::from_secs(60))?;
        self.daemon = daemon(self.host)?;
        self.slots = None;
        Ok(())
    }

    /// Returns the progress so far.
    pub fn seen(&self) -> Result<Seen> {
        let mut seen = Seen::default();
        for (number, guest) in self.guests.iter().enumerate() {
            let text = guest.sh("seen")?;
            read(&text, number, &mut seen).with_context(|| format!("Guest {} said {text:?}", guest.name))?;
        }
        Ok(seen)
    }

    /// Waits until every stream has made progress since `since` (a rebooted guest counts from 0). Fails if one hangs.
    pub fn until_all_move(&self, since: &Seen) -> Result<Seen> {
        let until = Instant::now() + HANG;
        loop {
            let now = self.seen()?;
            let moved = |stream: &Stream| {
                let blocks = |of: &Seen| of.done.get(stream.name).map_or(0, |done| done.blocks);
                let (from, to) = (blocks(since), blocks(&now));
                to >= if to < from { MOVED } else { from + MOVED }
            };
            let still: Vec<&str> = STREAMS.iter().filter(|s| !moved(s)).map(|s| s.name).collect();
            if still.is_empty() {
                return Ok(now);
            }
            if Instant::now() > until {
                bail!(Hang { streams: still.join(", "), seconds: HANG.as_secs(), detail: self.detail() });
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Returns diagnostics for a hang.
    fn detail(&self) -> String {
        let mut text = String::new();
        for guest in &self.guests {
            let log = guest
                .sh("dmesg | tail -n 12; ip link; cat $C/devices/*/state; true")
                .unwrap_or_else(|error| format!("{error:#}"));
            text.push_str(&format!("\nguest {}:\n{log}", guest.name));
        }
        text
    }

    /// Returns a guest's slot.
    pub fn slot(&mut self, guest: usize) -> Result<u64> {
        let slots = match self.slots {
            Some(slots) => slots,
            None => {
                let text = self.host.sh("causeway inspect host neighbours --json")?;
                let tree = serde_json::from_str(&text).with_context(|| format!("no JSON: {text:?}"))?;
                let slots = slots(&tree).with_context(|| format!("The registry says {text}"))?;
                *self.slots.insert(slots)
            }
        };
        slots.get(guest).copied().with_context(|| format!("There is no guest {guest}"))
    }

    /// Returns the number of a guest's discarded stores so far.
    pub fn discarded(&self, guest: usize) -> Result<u64> {
        let name = self.guest(guest)?.name;
        let text = self.host.sh(&format!("causeway inspect {name} --json"))?;
        let tree: Value = serde_json::from_str(&text).with_context(|| format!("no JSON: {text:?}"))?;
        find(&tree, "discarded_stores").with_context(|| format!("{name} counts no discarded stores: {text}"))
    }

    /// Returns the resources of the daemon, the monitors, the host and the guests' kernels, by name.
    pub fn held(&self) -> Result<BTreeMap<String, Held>> {
        let text = self.host.sh(
            "for p in $(pidof causeway); do c=$(tr '\\0' ' ' < /proc/$p/cmdline)\n\
             case \"$c\" in *' host '*) n=daemon;; *' --name a '*) n=a;; *' --name b '*) n=b;; *' --name c '*) n=c;; *) continue;; esac\n\
             echo $n $(ls /proc/$p/fd | wc -l) $(grep -c -e 'memfd:causeway' /proc/$p/maps) $(sed -n 's/^RssAnon:[^0-9]*\\([0-9]*\\).*/\\1/p' /proc/$p/status); done\n\
             echo host 0 0 $(sed -n 's/^Shmem:[^0-9]*\\([0-9]*\\).*/\\1/p' /proc/meminfo)",
        )?;
        let mut held = text
            .lines()
            .map(|line| {
                let mut words = line.split_whitespace();
                let name = words.next().context("no name")?.to_owned();
                let mut number = || words.next().and_then(|word| word.parse().ok()).context("no number");
                Ok((name, Held { fds: number()?, maps: number()?, kib: number()? }))
            })
            .collect::<Result<BTreeMap<_, _>>>()
            .with_context(|| format!("What processes hold was described as {text:?}"))?;
        for guest in &self.guests {
            let text = guest.sh("holds")?;
            let mut words = text.split_whitespace().map(str::parse::<u64>);
            let (Some(Ok(free)), Some(Ok(maps))) = (words.next(), words.next()) else {
                bail!("Guest {} said of what it holds {text:?}", guest.name)
            };
            let kib = u64::from(MEMORY_MIB * 1024).saturating_sub(free);
            held.insert(format!("kernel of {}", guest.name), Held { fds: 0, maps, kib });
        }
        Ok(held)
    }
}

/// A stream without progress.
#[derive(Debug)]
pub struct Hang {
    streams: String,
    seconds: u64,
    detail: String,
}

impl std::fmt::Display for Hang {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} did not move within {} s of a fault{}", self.streams, self.seconds, self.detail)
    }
}

impl std::error::Error for Hang {}

fn daemon(host: &Host) -> Result<Session> {
    // Removes the socket of a killed daemon, so that the new one's is recognizable.
    host.sh(&format!("rm -f {DAEMON_SOCKET}"))?;
    rdma::start_daemon(host, &format!("--neighbour-patience {PATIENCE_MS}"))
}

/// Returns the path in the host of a guest's initramfs.
fn initrd(name: &str) -> String {
    format!("/tmp/{name}.initrd")
}

/// Copies a guest's initramfs and description to the host, once for all its boots.
fn bring(lab: &Lab, host: &Host, kernel: &str, number: usize) -> Result<()> {
    let (Some(&name), Some(lists)) = (NAMES.get(number), LISTS.get(number)) else {
        bail!("There is no guest {number}")
    };
    let peers: Vec<String> =
        NAMES.iter().filter(|peer| **peer != name).map(|peer| format!("\"{peer}\"")).collect();
    let description = format!(
        "[neighbour]\ngroup = \"lab\"\npermit = [{}]\nhost = \"{DAEMON_SOCKET}\"\n",
        peers.join(", ")
    );
    let mut files =
        vec![("lists".to_owned(), lists.as_bytes().to_vec()), ("up.sh".to_owned(), UP.as_bytes().to_vec())];
    for module_name in MODULES {
        files.push((format!("{module_name}.ko"), module(kernel, module_name)?));
    }
    let images = Images::ready(&[Artifact::Kernels])?;
    let modules = Modules::scan(&images.kernel(kernel).join("modules"))?.in_order(&NEEDED)?;
    let order: Vec<&str> = modules.iter().map(|(name, _)| name.as_str()).collect();
    files.push(("order".to_owned(), order.join(" ").into_bytes()));
    for (module, path) in &modules {
        files.push((format!("{module}.ko"), fs::read(path)?));
    }
    let script = format!(
        "export PATH=/bin:/sbin; hostname {name}; . /lab/up.sh\n{{ modules && traffic; }} || {{ echo neighbours are not up; exit 1; }}\n\
         echo {name} takes commands\n{}",
        bare_guest::serve()
    );
    let own = format!(".lab/{name}.cpio");
    fs::write(host.share().join(&own), bare_guest::archive(lab.dir(), &script, &files)?)
        .context("Can't write the guest's initramfs to the share")?;
    host.sh(&format!(
        "cat /lab/{kernel}/initrd /share/{own} > {} && rm /share/{own} && printf '%s' {} > /tmp/{name}.toml",
        initrd(name),
        rdma::quoted(&description)
    ))
    .map(drop)
}

fn boot(host: &Host, kernel: &str, cpus: u32, number: usize) -> Result<Guest> {
    let (Some(&name), Some(disks)) = (NAMES.get(number), DISKS.get(number)) else {
        bail!("There is no guest {number}")
    };
    let mut spec = GuestSpec::new(name, kernel, cpus).memory(MEMORY_MIB).cmdline(bare_guest::COMMAND_LINE);
    for disk in *disks {
        spec = spec.disk(&format!("/disks/{disk}.raw"), false);
    }
    spec.extra.push(format!("--vsock cid={},socket={}", number + 3, guest_channel::socket(name)));
    spec.extra.push(format!("/tmp/{name}.toml"));
    Guest::start_with(host, &spec, Vmm::Causeway, &initrd(name))
}

/// Waits until a guest accepts commands.
fn resident(host: &Host, guest: Guest, number: usize) -> Result<Resident> {
    let name = NAMES.get(number).with_context(|| format!("There is no guest {number}"))?;
    let (_, after) = guest.expect("takes commands", BOOT)?;
    progress!("  guest {name} takes commands after {:.1} s", after.as_secs_f64());
    Resident::new(host, name, guest, "export PATH=/bin:/sbin; . /lab/up.sh")
}

/// Parses a guest's report about its streams.
fn read(text: &str, guest: usize, into: &mut Seen) -> Result<()> {
    for line in text.lines().filter(|line| !line.is_empty()) {
        let (what, rest) = line.split_once(' ').context("a line of one word")?;
        let (name, rest) = rest.split_once(' ').with_context(|| format!("{line:?}"))?;
        match what {
            "done" => {
                // The file may not exist at first.
                if let Some(done) = Done::parse(rest) {
                    into.done.insert(name.to_owned(), done);
                }
            }
            "carrier" => drop(into.carrier.insert((guest, name.to_owned()), rest.trim().parse()?)),
            "lost" => drop(into.lost.insert(format!("d-{name}"), rest.trim().parse()?)),
            _ => bail!("an unknown line {line:?}"),
        }
    }
    Ok(())
}

/// Returns the slots of all guests, from the registry's list of members.
fn slots(tree: &Value) -> Option<[u64; 3]> {
    // The neighbourhood may be below the requested path.
    let list = tree.get("lab").or_else(|| tree.get("neighbours")?.get("lab"))?.as_array()?;
    let slot = |name: &str| {
        list.iter()
            .find(|member| member.get("vm").and_then(Value::as_str) == Some(name))?
            .get("slot")?
            .as_u64()
    };
    let [a, b, c] = NAMES;
    Some([slot(a)?, slot(b)?, slot(c)?])
}

/// The first number of that name in a tree.
#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn guests_are_read() {
        let mut seen = Seen::default();
        read("done n-ca 12 1 0\ndone d-ca\u{20}\ncarrier b 3\nlost ca 4\n", 2, &mut seen).unwrap();
        assert_eq!(seen.done["n-ca"], Done { blocks: 12, breaks: 1, wrong: 0 });
        assert_eq!((seen.carrier[&(2, "b".to_owned())], seen.lost["d-ca"]), (3, 4));
        assert!(!seen.done.contains_key("d-ca"));
        assert!(read("other x 1", 0, &mut seen).is_err());
    }

    #[test]
    fn the_registry_is_read() {
        let tree = json!({"lab": [{"slot": 1, "vm": "b"}, {"slot": 0, "vm": "c"}, {"slot": 4, "vm": "a"}]});
        assert_eq!(slots(&tree), Some([4, 1, 0]));
        assert_eq!(slots(&json!({"neighbours": tree})), Some([4, 1, 0]));
        assert!(slots(&json!({"lab": [{"slot": 1, "vm": "b"}]})).is_none());
        assert_eq!(find(&json!({"x": [{"n": 3}]}), "n"), Some(3));
    }
}
