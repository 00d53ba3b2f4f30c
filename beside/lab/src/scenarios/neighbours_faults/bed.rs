//! The guests, their traffic, and what is looked at: what the traffic did, what the registry says, what processes hold.

use crate::channel::Session;
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::guest_channel;
use crate::host::Host;
use crate::image::Images;
use crate::kernel::Modules;
use crate::lab::Lab;
use crate::neighbours_image::module;
use crate::rdma::{self, DAEMON_SOCKET, Runs};
use crate::recipe::{self, Artifact};
use crate::scenario::Options;
use crate::scenarios::neighbours_member::Member;
use crate::traffic::Done;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// RAM of each guest in MiB.
const MEMORY_MIB: u32 = 384;
/// What the daemon waits for a guest's count: an emulated host may stand still for seconds.
pub const PATIENCE_MS: u32 = 10_000;
/// On a machine that others keep busy a boot takes minutes.
const BOOT: Duration = Duration::from_secs(900);
/// After this long without a sign of life from some traffic, something hangs.
const HANG: Duration = Duration::from_secs(300);
/// Blocks that each stream must have moved after a fault, so that it counts as running again.
const MOVED: u64 = 3;

/// The guests.
pub const NAMES: [&str; 3] = ["a", "b", "c"];
const MODULES: [&str; 4] = ["cw_neigh", "mmnet", "mmblk", "neigh_fault"];
const UP: &str = include_str!("../../../assets/neighbours-up.sh");

/// One stream: its name, the guest that says what it did, and whom else it needs.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    /// As in the guest's `/run`.
    pub name: &'static str,
    /// Who sends, or uses the disk.
    pub from: usize,
    /// Who receives, or serves the disk.
    pub to: usize,
}

/// All of them: over mmnet (`n-`) and over mmblk (`d-`).
pub const STREAMS: [Stream; 6] = [
    Stream { name: "n-ab", from: 0, to: 1 },
    Stream { name: "n-ca", from: 2, to: 0 },
    Stream { name: "n-cb", from: 2, to: 1 },
    Stream { name: "d-ab", from: 0, to: 1 },
    Stream { name: "d-ca", from: 2, to: 0 },
    Stream { name: "d-cb", from: 2, to: 1 },
];

impl Stream {
    /// Whether a guest is at one of its ends.
    pub const fn has(&self, guest: usize) -> bool {
        self.from == guest || self.to == guest
    }
}

/// Exports (name, disk, client), devices (stream, server) and senders (stream, address) of each guest.
const LISTS: [&str; 3] = [
    "ME=1; EXPORTS='ca:/dev/vdb:c'; DEVICES='d-ab:b'; SENDS='n-ab:10.81.21.2'",
    "ME=2; EXPORTS='ab:/dev/vdb:a cb:/dev/vdc:c'; DEVICES=; SENDS=",
    "ME=3; EXPORTS=; DEVICES='d-ca:a d-cb:b'; SENDS='n-ca:10.81.31.1 n-cb:10.81.32.2'",
];
const DISKS: [&[&str]; 3] = [&["a0"], &["b0", "b1"], &[]];

/// What the streams have done, and how often a connection ended, as each guest sees it.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// By stream.
    pub done: BTreeMap<String, Done>,
    /// By guest and peer: how often mmnet's carrier went.
    pub carrier: BTreeMap<(usize, String), u64>,
    /// By stream over mmblk: how often its server went away.
    pub lost: BTreeMap<String, u64>,
}

/// The registry's members by name: their slots, and the epochs of their connections by peer.
pub type Members = BTreeMap<String, (u64, BTreeMap<String, u64>)>;

/// What a process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Open descriptors.
    pub fds: u64,
    /// Mappings of windows and segments.
    pub maps: u64,
    /// Memory of its own, in KiB.
    pub anon_kib: u64,
}

/// All of it.
pub struct Bed<'a> {
    /// The guests.
    pub guests: [Member<'a>; 3],
    /// Their host.
    pub host: &'a Host,
    /// The host daemon.
    pub daemon: Session,
    /// The guests' kernel.
    pub kernel: String,
    cpus: u32,
}

impl<'a> Bed<'a> {
    /// Boots everything, and waits until all streams move.
    pub fn start(lab: &'a Lab, options: &Options) -> Result<Self> {
        lab.install_causeway()?;
        let host = lab.host(0)?;
        let disks: Vec<String> = DISKS.concat().iter().map(|disk| format!("/disks/{disk}.raw")).collect();
        host.sh(&format!(
            "mkdir -p /run/causeway /disks; mke2fs -q -F /dev/vdc; mount /dev/vdc /disks; truncate -s 16M {}",
            disks.join(" ")
        ))?;
        let daemon = daemon(host)?;
        let kernel = options.kernels.first().map_or(recipe::NEIGHBOUR_KERNELS[0], String::as_str).to_owned();
        let cpus = options.cpus.first().copied().unwrap_or(1);
        let guests = [0, 1, 2].map(|number| boot(host, &kernel, cpus, number));
        let [a, b, c] = guests;
        let bed = Bed { guests: [a?, b?, c?], host, daemon, kernel, cpus };
        for guest in &bed.guests {
            guest.guest.expect("takes commands", BOOT)?;
        }
        bed.until_all_move(&Seen::default())?;
        Ok(bed)
    }

    /// A guest by its number.
    pub fn guest(&self, number: usize) -> Result<&Member<'a>> {
        self.guests.get(number).with_context(|| format!("There is no guest {number}"))
    }

    /// Kills a guest's monitor and boots the guest anew.
    pub fn replace(&mut self, number: usize) -> Result<()> {
        let old = self.guest(number)?;
        old.guest.session.kill()?;
        old.guest.session.wait(Duration::from_secs(60))?;
        let new = boot(self.host, &self.kernel, self.cpus, number)?;
        new.guest.expect("takes commands", BOOT)?;
        if let Some(guest) = self.guests.get_mut(number) {
            *guest = new;
        }
        Ok(())
    }

    /// Kills the daemon and starts another.
    pub fn replace_daemon(&mut self) -> Result<()> {
        self.daemon.kill()?;
        self.daemon.wait(Duration::from_secs(60))?;
        self.daemon = daemon(self.host)?;
        Ok(())
    }

    /// What has been done so far.
    pub fn seen(&self) -> Result<Seen> {
        let mut seen = Seen::default();
        for (number, guest) in self.guests.iter().enumerate() {
            let text = guest.sh(
                "cd /run; for f in t-?-??; do [ -e $f ] && echo \"done ${f#t-} $(cat $f)\"; done\n\
                 for d in /sys/class/net/mm*; do [ -e $d ] && echo \"carrier $(cat $d/ifalias) $(cat $d/carrier_down_count)\"; done\n\
                 cd /sys/kernel/config/mmblk/devices && for d in *; do [ -e $d ] && echo \"lost $d $(sed -n 's/^lost //p' $d/counters)\"; done; true",
            )?;
            read(&text, number, &mut seen).with_context(|| format!("Guest {} said {text:?}", guest.name))?;
        }
        Ok(seen)
    }

    /// Waits until every stream has moved since `since`, where it counted then (a guest that was booted anew counts from 0); fails when one
    /// hangs.
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
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// What may say why something hangs.
    fn detail(&self) -> String {
        let mut text = String::new();
        for guest in &self.guests {
            let log = guest
                .run(
                    "dmesg | tail -n 12; ip -br link; cat /sys/kernel/config/mmblk/devices/*/state",
                    Duration::from_secs(60),
                )
                .map_or_else(|error| format!("{error:#}"), |output| output.stdout);
            text.push_str(&format!("\nguest {}:\n{log}", guest.name));
        }
        text
    }

    /// The registry's members by name: their slots, and the epochs of their connections by peer.
    pub fn members(&self) -> Result<Members> {
        let text = self.host.sh("causeway inspect host neighbours --json")?;
        members(&serde_json::from_str(&text).with_context(|| format!("no JSON: {text:?}"))?)
            .with_context(|| format!("The registry says {text}"))
    }

    /// Stores of a guest that were discarded so far.
    pub fn discarded(&self, guest: usize) -> Result<u64> {
        let name = self.guest(guest)?.name;
        let text = self.host.sh(&format!("causeway inspect {name} --json"))?;
        let tree: Value = serde_json::from_str(&text).with_context(|| format!("no JSON: {text:?}"))?;
        find(&tree, "discarded_stores").with_context(|| format!("{name} counts no discarded stores: {text}"))
    }

    /// What the daemon and the monitors hold, by name.
    pub fn held(&self) -> Result<BTreeMap<String, Held>> {
        let text = self.host.sh(
            "for p in $(pidof causeway); do c=$(tr '\\0' ' ' < /proc/$p/cmdline)\n\
             case \"$c\" in *' host '*) n=daemon;; *' --name a '*) n=a;; *' --name b '*) n=b;; *' --name c '*) n=c;; *) continue;; esac\n\
             echo $n $(ls /proc/$p/fd | wc -l) $(grep -c -e 'memfd:causeway' /proc/$p/maps) $(sed -n 's/^RssAnon:[^0-9]*\\([0-9]*\\).*/\\1/p' /proc/$p/status); done",
        )?;
        text.lines()
            .map(|line| {
                let mut words = line.split_whitespace();
                let name = words.next().context("no name")?.to_owned();
                let mut number = || words.next().and_then(|word| word.parse().ok()).context("no number");
                Ok((name, Held { fds: number()?, maps: number()?, anon_kib: number()? }))
            })
            .collect::<Result<BTreeMap<_, _>>>()
            .with_context(|| format!("What processes hold was described as {text:?}"))
    }
}

/// A stream that doesn't move any more.
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
    // What a daemon that was killed left: without it, whether the new one listens can be seen.
    host.sh(&format!("rm -f {DAEMON_SOCKET}"))?;
    rdma::start_daemon(host, &format!("--neighbour-patience {PATIENCE_MS}"))
}

fn boot<'a>(host: &'a Host, kernel: &str, cpus: u32, number: usize) -> Result<Member<'a>> {
    let (Some(&name), Some(lists), Some(disks)) = (NAMES.get(number), LISTS.get(number), DISKS.get(number))
    else {
        bail!("There is no guest {number}")
    };
    let peers: Vec<String> =
        NAMES.iter().filter(|peer| **peer != name).map(|peer| format!("\"{peer}\"")).collect();
    host.sh(&format!(
        "printf '[neighbour]\\ngroup = \"lab\"\\npermit = [{}]\\nhost = \"{DAEMON_SOCKET}\"\\n' > /tmp/{name}.toml",
        peers.join(", ")
    ))?;
    let mut spec = GuestSpec::new(name, kernel, cpus)
        .memory(MEMORY_MIB)
        .root()
        .script(&format!(
            "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\nmount -t tmpfs run /run; hostname {name}\nsh /lab/up.sh || echo neighbours are not up\n\
             echo {name} takes commands\n{}",
            guest_channel::serve("127.0.0.1")
        ))
        .file("agent", std::fs::read(crate::paths::agent()?)?)
        .file("lists", lists.as_bytes().to_vec())
        .file("up.sh", UP.as_bytes().to_vec());
    for module_name in MODULES {
        spec = spec.file(&format!("{module_name}.ko"), module(kernel, module_name)?);
    }
    let images = Images::ready(&[Artifact::Kernels])?;
    let modules = Modules::scan(&images.kernel(kernel).join("modules"))?.in_order(&["configfs"])?;
    let order: Vec<&str> = modules.iter().map(|(name, _)| name.as_str()).collect();
    spec = spec.file("order", order.join(" ").into_bytes());
    for (module, path) in &modules {
        spec = spec.file(&format!("{module}.ko"), std::fs::read(path)?);
    }
    for disk in *disks {
        spec = spec.disk(&format!("/disks/{disk}.raw"), false);
    }
    spec.extra.push(format!("--vsock cid={},socket={}", number + 3, guest_channel::socket(name)));
    spec.extra.push(format!("/tmp/{name}.toml"));
    let guest = Guest::start(host, &spec, Vmm::Causeway)?;
    Ok(Member { name, guest, host })
}

/// Reads what a guest says of its streams.
fn read(text: &str, guest: usize, into: &mut Seen) -> Result<()> {
    for line in text.lines() {
        let (what, rest) = line.split_once(' ').context("a line of one word")?;
        let (name, rest) = rest.split_once(' ').with_context(|| format!("{line:?}"))?;
        match what {
            "done" => {
                // The file may not have been there for the first time.
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

fn members(tree: &Value) -> Option<Members> {
    // The neighbourhood may be shown below the path that was asked for.
    let list = tree.get("lab").or_else(|| tree.get("neighbours")?.get("lab"))?.as_array()?;
    list.iter()
        .map(|member| {
            let epochs = member.get("epoch_by_peer")?.as_object()?;
            let epochs = epochs.iter().map(|(peer, epoch)| Some((peer.clone(), epoch.as_u64()?)));
            let name = member.get("vm")?.as_str()?.to_owned();
            Some((name, (member.get("slot")?.as_u64()?, epochs.collect::<Option<_>>()?)))
        })
        .collect()
}

/// The first number of that name in a tree.
fn find(tree: &Value, name: &str) -> Option<u64> {
    match tree {
        Value::Object(map) => {
            map.get(name).and_then(Value::as_u64).or_else(|| map.values().find_map(|value| find(value, name)))
        }
        Value::Array(list) => list.iter().find_map(|value| find(value, name)),
        _ => None,
    }
}

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
        let tree = json!({"lab": [{"slot": 1, "vm": "b", "epoch_by_peer": {"a": 7}}]});
        let got = members(&tree).unwrap();
        assert_eq!((got["b"].0, got["b"].1["a"]), (1, 7));
        assert!(members(&json!({"lab": [{"vm": "b"}]})).is_none());
        assert_eq!(find(&json!({"x": [{"n": 3}]}), "n"), Some(3));
    }
}
