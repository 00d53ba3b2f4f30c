//! The load of a storage appliance's client: fio with verification over NFS, sequential small writes, and a kernel tree that is
//! unpacked and compared.

use crate::appliance_image::TREE;
use crate::progress;
use crate::rdma::Runs;
use crate::scenarios::appliance_stacks::{Guests, Stack, drop_caches};
use crate::scenarios::fio;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::time::Duration;

const LOAD_TIMEOUT: Duration = Duration::from_secs(1800);
/// Number of sequential small writes.
const SMALL: u64 = 64;

/// Cost of one kind of work.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Cost {
    pub(super) bytes: u64,
    /// Seconds of the emulated client's clock.
    pub(super) seconds: f64,
    /// Exits of the appliance's guests and of the client.
    pub(super) exits: u64,
    pub(super) client_exits: u64,
}

impl Cost {
    fn mib(self) -> f64 {
        self.bytes as f64 / f64::from(1 << 20)
    }

    pub(super) fn exits_per_mib(self) -> f64 {
        self.exits as f64 / self.mib()
    }

    fn json(self) -> Value {
        json!({
            "mib": self.mib(), "emulated_seconds": self.seconds, "emulated_mib_per_second": self.mib() / self.seconds.max(1e-3),
            "exits": self.exits, "exits_per_mib": self.exits_per_mib(), "client_exits": self.client_exits,
        })
    }
}

/// Work that a stack has done.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Done {
    pub(super) write: Cost,
    pub(super) read: Cost,
    /// Sequential small writes, and the mean latency of one in µs of the emulated client's clock.
    pub(super) small: Cost,
    pub(super) latency: f64,
    pub(super) tree: Cost,
    pub(super) files: u64,
    pub(super) verified: u64,
    pub(super) mismatches: u64,
}

impl Done {
    pub(super) fn json(&self) -> Value {
        json!({
            "bytes_verified": self.verified, "mismatches": self.mismatches,
            "write": self.write.json(), "read": self.read.json(),
            "small_writes": {"count": SMALL, "emulated_microseconds": self.latency, "exits_per_write": self.small.exits as f64 / SMALL as f64},
            "tree": {"files": self.files, "cost": self.tree.json()},
        })
    }
}

/// Runs a function and measures its cost.
fn costs<T>(guests: &Guests<'_>, stack: Stack, what: impl FnOnce() -> Result<T>) -> Result<(T, Cost)> {
    let appliance =
        || guests.of(stack).into_iter().try_fold(0, |sum, g| Ok::<_, anyhow::Error>(sum + g.exits()?));
    let before = (appliance()?, guests.client.exits()?);
    let done = what()?;
    let after = (appliance()?, guests.client.exits()?);
    let cost = Cost { exits: after.0 - before.0, client_exits: after.1 - before.1, ..Cost::default() };
    Ok((done, cost))
}

/// Runs fio on the mounted file system.
fn fio(guests: &Guests<'_>, more: &str) -> Result<fio::Job> {
    let output = guests.client.run(
        &format!("fio --name=v --direct=1 --ioengine=libaio --verify=crc32c --verify_fatal=1 --eta=never --output-format=json {more}"),
        LOAD_TIMEOUT,
    )?;
    fio::job(&output.stdout).with_context(|| format!("{} {}", output.stdout.trim(), output.stderr.trim()))
}

fn mount(guests: &Guests<'_>, stack: Stack) -> Result<()> {
    guests
        .client
        .run(
            &format!(
                "set -e; modprobe nfsv4; ip neigh flush all; ping -q -c 1 -w 30 {address} >/dev/null\n\
                 timeout 120 mount -t nfs4 -o vers=4.2,proto=tcp,sec=sys,hard {address}:/ /mnt",
                address = stack.address()
            ),
            LOAD_TIMEOUT,
        )?
        .success()
        .with_context(|| format!("The client can't mount the file system of {}", stack.name()))
        .map(drop)
}

fn unmount(guests: &Guests<'_>) -> Result<()> {
    guests.client.run("umount /mnt", LOAD_TIMEOUT)?.success().map(drop)
}

/// Writes in large blocks, then reads back from the disks and verifies.
fn large(guests: &Guests<'_>, stack: Stack, mib: u64, done: &mut Done) -> Result<()> {
    let (job, cost) = costs(guests, stack, || {
        fio(
            guests,
            &format!(
                "--filename=/mnt/large --rw=write --bs=256k --size={mib}M --iodepth=4 --do_verify=0 --end_fsync=1"
            ),
        )
    })?;
    done.write = Cost { bytes: job.written, seconds: job.seconds.0, ..cost };
    drop_caches(guests, stack)?;
    let (job, cost) = costs(guests, stack, || {
        fio(guests, &format!("--filename=/mnt/large --rw=read --bs=256k --size={mib}M --iodepth=4"))
    })?;
    done.read = Cost { bytes: job.read, seconds: job.seconds.1, ..cost };
    if job.read != done.write.bytes || job.read == 0 {
        bail!("fio wrote {} bytes and read {} back", done.write.bytes, job.read);
    }
    done.verified += job.read;
    Ok(())
}

/// Writes 4 KiB at random places, each durable before the next; then verifies.
fn small(guests: &Guests<'_>, stack: Stack, done: &mut Done) -> Result<()> {
    let size = format!("--filename=/mnt/small --bs=4k --size={}k --iodepth=1", 4 * SMALL);
    let (job, cost) =
        costs(guests, stack, || fio(guests, &format!("{size} --rw=randwrite --fsync=1 --do_verify=0")))?;
    done.small = Cost { bytes: job.written, seconds: job.seconds.0, ..cost };
    done.latency = job.seconds.0 * 1e6 / SMALL as f64;
    drop_caches(guests, stack)?;
    let job = fio(guests, &format!("{size} --rw=read"))?;
    if job.read != done.small.bytes {
        bail!("fio wrote {} bytes in small pieces and read {} back", done.small.bytes, job.read);
    }
    done.verified += job.read;
    Ok(())
}

/// Unpacks the archive over NFS. After the caches are emptied, compares it with the archive unpacked locally.
fn tree(guests: &Guests<'_>, stack: Stack, done: &mut Done) -> Result<()> {
    let home = guests.client.run(
        &format!("set -e; mkdir -p /tmp/home; [ -e /tmp/home/mm ] || tar xf {TREE} -C /tmp/home; cd /tmp/home; find . -type f | wc -l; find . -type f -print0 | xargs -0 cat | wc -c"),
        LOAD_TIMEOUT,
    )?.success()?;
    let numbers: Vec<u64> = home.split_whitespace().filter_map(|w| w.parse().ok()).collect();
    let [files, bytes] = numbers[..] else { bail!("The tree's size is {home:?}") };
    let clock = "cut -d' ' -f1 /proc/uptime";
    let (text, cost) = costs(guests, stack, || {
        guests
            .client
            .run(
                &format!("set -e; {clock}; mkdir /mnt/tree; tar xf {TREE} -C /mnt/tree --no-same-owner; sync -f /mnt; {clock}"),
                LOAD_TIMEOUT,
            )?
            .success()
    })?;
    let times: Vec<f64> = text.split_whitespace().filter_map(|w| w.parse().ok()).collect();
    let [from, to] = times[..] else { bail!("The client's clock says {text:?}") };
    unmount(guests)?;
    drop_caches(guests, stack)?;
    mount(guests, stack)?;
    let compared = guests.client.run(
        "diff -r /tmp/home /mnt/tree > /tmp/diff 2>&1; s=$?; head -n 20 /tmp/diff; exit $s",
        LOAD_TIMEOUT,
    )?;
    if compared.code != 0 {
        progress!("  the tree differs: {}{}", compared.stdout, compared.stderr);
        done.mismatches += u64::try_from(compared.stdout.lines().count().max(1))?;
    }
    done.tree = Cost { bytes, seconds: to - from, ..cost };
    done.files = files;
    done.verified += bytes;
    Ok(())
}

/// Runs the whole load on a started stack.
pub(super) fn run(guests: &Guests<'_>, stack: Stack, mib: u64, with_tree: bool) -> Result<Done> {
    let mut done = Done::default();
    mount(guests, stack)?;
    large(guests, stack, mib, &mut done)?;
    progress!("  {} large: {} {}", stack.name(), done.write.json(), done.read.json());
    small(guests, stack, &mut done)?;
    progress!("  {} small: {:.0} µs emulated, {} exits", stack.name(), done.latency, done.small.exits);
    if with_tree {
        tree(guests, stack, &mut done)?;
        progress!("  {} tree: {}", stack.name(), done.tree.json());
    }
    unmount(guests)?;
    Ok(done)
}
