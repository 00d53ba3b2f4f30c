//! Three stacks of a storage appliance, which share guests where possible. This module starts each layer, so that a client can mount
//! the file system on top.
//!
//! ```text
//!   neighbours   client ─ virtio-net ─ net: bridge ─ mmnet ─ files: NFS, ext4 ─ mmblk ─ raid: md RAID-5 ─ mmblk ×3 ─ disks: virtio-blk
//!   virtio       client ─ virtio-net ─ net: bridge ─ virtio-net ─ files: NFS, ext4 ─ NBD ─ raid: md RAID-5 ─ NBD ×3 ─ disks: virtio-blk
//!   monolithic   client ─ virtio-net ─ mono: NFS, ext4, md RAID-5, virtio-blk
//! ```
//!
//! Debian's block device over a network is NBD: nbd-server and the kernel's client. It uses taps of one bridge of the host.

use crate::rdma::Runs;
use crate::scenarios::neighbours_member::{CONFIG, Member};
use anyhow::{Context, Result};
use std::time::Duration;

/// The stacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stack {
    Neighbours,
    Virtio,
    Monolithic,
}

impl Stack {
    pub(super) fn name(self) -> &'static str {
        match self {
            Stack::Neighbours => "neighbours",
            Stack::Virtio => "virtio",
            Stack::Monolithic => "monolithic",
        }
    }

    /// Returns the address of the file server for the client.
    pub(super) fn address(self) -> &'static str {
        if self == Stack::Monolithic { "10.83.0.7" } else { "10.83.0.4" }
    }
}

/// The guests.
pub(super) struct Guests<'a> {
    pub(super) client: Member<'a>,
    pub(super) net: Member<'a>,
    pub(super) files: Member<'a>,
    pub(super) raid: Member<'a>,
    pub(super) disks: Member<'a>,
    /// Present only if selected.
    pub(super) mono: Option<Member<'a>>,
}

impl<'a> Guests<'a> {
    /// Returns all guests, the client first.
    pub(super) fn all(&self) -> Vec<&Member<'a>> {
        [&self.client, &self.net, &self.files, &self.raid, &self.disks]
            .into_iter()
            .chain(&self.mono)
            .collect()
    }

    /// Returns the guests of a stack.
    pub(super) fn of(&self, stack: Stack) -> Vec<&Member<'a>> {
        match stack {
            Stack::Monolithic => self.mono.iter().collect(),
            _ => vec![&self.net, &self.files, &self.raid, &self.disks],
        }
    }
}

/// Size of each disk in MiB.
pub(super) const DISK_MIB: u64 = 40;
/// Export names of the RAID's members.
pub(super) const MEMBERS: [&str; 3] = ["d0", "d1", "d2"];
/// The export of the RAID device.
pub(super) const ARRAY: &str = "md";

/// Bridges the network guest's two sides: its NIC towards the client, and another.
fn bridge(net: &Member<'_>, inner: &str) -> Result<()> {
    net.sh(&format!(
        "set -e; modprobe bridge; ip link show br0 >/dev/null 2>&1 || ip link add br0 type bridge forward_delay 0; ip link set br0 mtu 9000 up\n\
         ip link set {inner} mtu 9000; for d in lan {inner}; do ip link set $d master br0 up; done"
    ))
    .map(drop)
}

/// Creates the RAID of three zeroed devices, whose parity is correct without a resync.
fn make_array(at: &Member<'_>, devices: &[String], skip_copy: bool) -> Result<()> {
    at.sh(&format!(
        "set -e; modprobe raid456; mkdir -p /run/mdadm; export MDADM_NO_UDEV=1\n\
         mdadm --create /dev/md0 --run --assume-clean --level=5 --raid-devices=3 --chunk=64 --metadata=1.2 --bitmap=none {} 2>&1\n\
         echo {} > /sys/block/md0/md/skip_copy; cat /proc/mdstat >&2",
        devices.join(" "),
        u8::from(skip_copy)
    ))
    .map(drop)
}

fn stop_array(at: &Member<'_>) -> Result<()> {
    at.sh("MDADM_NO_UDEV=1 mdadm --stop /dev/md0").map(drop)
}

/// Creates the file system and exports it.
///
/// `async`: the server replies before the data is durable, as an emulated host would need minutes for a commit per file. `fsync` still
/// reaches the disks.
fn serve_files(at: &Member<'_>, disk: &str) -> Result<()> {
    at.sh(&format!(
        "set -e; modprobe nfsd; mke2fs -q -F -t ext4 -J size=4 -N 4096 -m 0 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard,stride=16,stripe_width=32 {disk}\n\
         mount {disk} /srv; echo '/srv *(rw,fsid=0,insecure,no_root_squash,no_subtree_check,async)' > /etc/exports\n\
         [ -e /proc/fs/nfsd/threads ] || mount -t nfsd nfsd /proc/fs/nfsd; touch /var/lib/nfs/etab /var/lib/nfs/rmtab\n\
         exportfs -ra; pidof rpc.mountd >/dev/null || rpc.mountd --no-nfs-version 3\n\
         rpc.nfsd --no-nfs-version 3 --no-udp 4; echo Y > /proc/fs/nfsd/v4_end_grace"
    ))
    .with_context(|| format!("No file server on {disk}"))
    .map(drop)
}

fn stop_files(at: &Member<'_>) -> Result<()> {
    at.sh("set -e; rpc.nfsd 0; exportfs -ua; i=0; until umount /srv; do i=$((i+1)); [ $i -gt 50 ] && exit 1; sleep 0.2; done")
        .map(drop)
}

/// Brings the interface to the neighbour `peer` up, and returns its name.
pub(super) fn mmnet_to(at: &Member<'_>, peer: &str) -> Result<String> {
    let text = at.sh(&format!(
        "i=0; while :; do for d in /sys/class/net/mm*; do [ \"$(cat $d/ifalias 2>/dev/null)\" = {peer} ] || continue\n\
         ip link set ${{d##*/}} up; [ \"$(cat $d/carrier)\" = 1 ] && {{ echo ${{d##*/}}; exit 0; }}; done\n\
         i=$((i+1)); [ $i -gt 300 ] && {{ ip link >&2; dmesg | tail -n 8 >&2; exit 1; }}; sleep 0.2; done"
    ))?;
    Ok(text.trim().to_owned())
}

/// Loads the neighbour modules in the four guests.
pub(super) fn load_modules(guests: &Guests<'_>) -> Result<()> {
    for guest in guests.of(Stack::Neighbours) {
        guest.sh("set -e; for m in cw_neigh mmnet mmblk; do insmod /lab/$m.ko; done")?;
    }
    for (one, other) in
        [(&guests.net, "files"), (&guests.files, "raid"), (&guests.files, "disks"), (&guests.raid, "disks")]
    {
        mmnet_to(one, other)?;
    }
    Ok(())
}

/// Starts the stack of neighbours: mmnet and mmblk. `load_modules` must have run.
pub(super) fn start_neighbours(guests: &Guests<'_>, skip_copy: bool) -> Result<()> {
    let Guests { net, files, .. } = guests;
    start_blocks(guests, skip_copy)?;
    let disk = attach_top(files)?;
    serve_files(files, &disk)?;
    let (outer, inner) = (mmnet_to(net, "files")?, mmnet_to(files, "net")?);
    files.sh(&format!(
        "set -e; ip addr flush dev nas; ip link set {inner} mtu 9000; ip addr add 10.83.0.4/24 dev {inner}"
    ))?;
    bridge(net, &outer)
}

/// Creates the RAID guest's array over mmblk, and exports it to the file server.
pub(super) fn start_blocks(guests: &Guests<'_>, skip_copy: bool) -> Result<()> {
    let Guests { raid, disks, .. } = guests;
    // A new array assumes that all is zero.
    disks.host.sh(&format!(
        "for d in n0 n1 n2; do truncate -s 0 /disks/$d.raw; truncate -s {DISK_MIB}M /disks/$d.raw; done"
    ))?;
    let mut devices = Vec::new();
    for (export, path) in MEMBERS.iter().zip(["/dev/vdb", "/dev/vdc", "/dev/vdd"]) {
        disks.serve(export, path, "raid")?;
        devices.push(raid.attach("disks", export)?);
    }
    make_array(raid, &devices, skip_copy)?;
    raid.serve(ARRAY, "/dev/md0", "files")
}

/// Attaches the file server's disk.
pub(super) fn attach_top(files: &Member<'_>) -> Result<String> {
    files.attach("raid", ARRAY)
}

/// Stops the stack.
pub(super) fn stop_neighbours(guests: &Guests<'_>) -> Result<()> {
    stop_files(&guests.files)?;
    guests.net.sh("ip link del br0")?;
    stop_blocks(guests)
}

/// Stops the array over mmblk and the file server's disk.
pub(super) fn stop_blocks(guests: &Guests<'_>) -> Result<()> {
    let Guests { files, raid, disks, .. } = guests;
    files.take_away(&format!("devices/{ARRAY}"))?;
    raid.take_away(&format!("exports/{ARRAY}"))?;
    stop_array(raid)?;
    for member in MEMBERS {
        raid.take_away(&format!("devices/{member}"))?;
        disks.take_away(&format!("exports/{member}"))?;
    }
    Ok(())
}

/// Unloads the modules, which must be unused.
pub(super) fn unload_modules(guests: &Guests<'_>) -> Result<()> {
    for guest in guests.of(Stack::Neighbours) {
        guest.sh(&format!("set -e; ls {CONFIG}/exports {CONFIG}/devices; rmmod mmblk mmnet cw_neigh"))?;
    }
    Ok(())
}

/// Starts an NBD server for some devices.
fn nbd_serve(at: &Member<'_>, address: &str, exports: &[(&str, &str)]) -> Result<()> {
    let list: String = exports
        .iter()
        .map(|(name, path)| format!("[{name}]\\nexportname = {path}\\nflush = true\\nfua = true\\n"))
        .collect();
    at.sh(&format!(
        "set -e; mkdir -p /etc/nbd-server; printf '[generic]\\nlistenaddr = {address}\\n{list}' > /etc/nbd-server/config\n\
         nbd-server -C /etc/nbd-server/config -p /run/nbd-server.pid"
    ))
    .map(drop)
}

fn nbd_attach(at: &Member<'_>, address: &str, names: &[&str]) -> Result<Vec<String>> {
    at.sh("modprobe nbd max_part=0 nbds_max=4")?;
    let mut devices = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let device = format!("/dev/nbd{number}");
        at.sh(&format!("nbd-client -N {name} {address} {device} 2>&1"))?;
        devices.push(device);
    }
    Ok(devices)
}

/// Starts the same layers over virtio devices and the host's bridge.
pub(super) fn start_virtio(guests: &Guests<'_>) -> Result<()> {
    let Guests { net, files, raid, disks, .. } = guests;
    for (guest, address) in [(files, "10.84.0.4"), (raid, "10.84.0.5"), (disks, "10.84.0.6")] {
        guest.sh(&format!("set -e; ip addr add {address}/24 dev nas; ip link set nas up"))?;
    }
    let paths = ["/dev/vde", "/dev/vdf", "/dev/vdg"];
    let exports: Vec<(&str, &str)> = MEMBERS.into_iter().zip(paths).collect();
    nbd_serve(disks, "10.84.0.6", &exports)?;
    let devices = nbd_attach(raid, "10.84.0.6", &MEMBERS)?;
    make_array(raid, &devices, false)?;
    nbd_serve(raid, "10.84.0.5", &[(ARRAY, "/dev/md0")])?;
    let top = nbd_attach(files, "10.84.0.5", &[ARRAY])?;
    serve_files(files, &top.concat())?;
    files.sh("ip addr add 10.83.0.4/24 dev nas")?;
    bridge(net, "nas")
}

/// Stops the stack.
pub(super) fn stop_virtio(guests: &Guests<'_>) -> Result<()> {
    let Guests { net, files, raid, disks, .. } = guests;
    stop_files(files)?;
    files.sh("nbd-client -d /dev/nbd0")?;
    raid.sh("kill $(cat /run/nbd-server.pid)")?;
    stop_array(raid)?;
    raid.sh("for d in 0 1 2; do nbd-client -d /dev/nbd$d; done")?;
    disks.sh("kill $(cat /run/nbd-server.pid)")?;
    net.sh("ip link del br0")?;
    for guest in [files, raid, disks] {
        guest.sh("ip addr flush dev nas; ip link set nas down")?;
    }
    net.sh("ip link set nas down").map(drop)
}

/// Starts one guest with all layers.
pub(super) fn start_monolithic(guests: &Guests<'_>) -> Result<()> {
    let mono = guests.mono.as_ref().context("the guest with all layers was not booted")?;
    make_array(mono, &["/dev/vdb", "/dev/vdc", "/dev/vdd"].map(str::to_owned), false)?;
    serve_files(mono, "/dev/md0")?;
    mono.sh("ip addr add 10.83.0.7/24 dev lan").map(drop)
}

/// Stops the stack.
pub(super) fn stop_monolithic(guests: &Guests<'_>) -> Result<()> {
    let mono = guests.mono.as_ref().context("the guest with all layers was not booted")?;
    stop_files(mono)?;
    stop_array(mono)
}

/// Compares each stripe with its parity. Returns the compared bytes of the members, and the bytes of sectors with a mismatch.
pub(super) fn check_parity(at: &Member<'_>) -> Result<u64> {
    let text = at.sh(
        "set -e; cd /sys/block/md0/md; sync; echo check > sync_action; i=0\n\
         until [ \"$(cat sync_action)\" = idle ]; do i=$((i+1)); [ $i -gt 900 ] && exit 1; sleep 0.2; done; cat mismatch_cnt",
    )?;
    text.trim().parse().with_context(|| format!("The number of mismatches is {text:?}"))
}

/// Drops the caches, so that the next reads come from the disks.
pub(super) fn drop_caches(guests: &Guests<'_>, stack: Stack) -> Result<()> {
    for guest in guests.of(stack) {
        guest.run("sync; echo 3 > /proc/sys/vm/drop_caches", Duration::from_secs(120))?.success()?;
    }
    Ok(())
}
