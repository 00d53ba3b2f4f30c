//! Kernel consumers of RDMA: NVMe over RDMA (a RAM disk of one guest is a disk of the other) and NFS over RDMA, with verification by
//! fio and checksums on both sides.

use crate::lab::Lab;
use crate::progress;
use crate::rdma::{self, Pair};
use crate::scenario::{Options, Report, Scenario};
use crate::unfinished::Unfinished;
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rdma-ulp",
    about: "NVMe over RDMA and NFS over RDMA between two guests, every byte verified",
    topology: rdma::topology,
    run,
    prompt: Some(rdma::prompt),
};

/// MiB of each fio job, and of each file with a checksum.
const MIB: u32 = 32;
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(600);

/// Data that one consumer verified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Verified {
    bytes: u64,
    mismatches: u64,
}

impl Verified {
    fn add(&mut self, other: Verified) {
        self.bytes += other.bytes;
        self.mismatches += other.mismatches;
    }
}

/// Runs fio in the first guest: random writes of several sizes, then reads all of it back and verifies.
fn fio(pair: &Pair<'_>, target: &str, engine: &str) -> Result<Verified> {
    let script = format!(
        "fio --eta=never --name=v --filename={target} --size={MIB}m --rw=randwrite --bsrange=4k-128k --blockalign=4k --ioengine={engine} --iodepth=8 \\\n\
         --direct=1 --verify=crc32c --do_verify=1 --verify_fatal=0 --verify_dump=0 --output-format=json --output=/tmp/fio.json >/tmp/fio.err 2>&1\n\
         s=$?; cat /tmp/fio.json; [ $s = 0 ] || tail -n 5 /tmp/fio.err >&2; exit $s"
    );
    let output = pair.a.run(&script, PROGRAM_TIMEOUT)?;
    let verified = fio_result(&output.stdout).with_context(|| {
        format!("fio on {target} ended with status {}: {}", output.code, output.stderr.trim())
    })?;
    if output.code != 0 && verified.mismatches == 0 {
        bail!("fio on {target} ended with status {}: {}", output.code, output.stderr.trim());
    }
    Ok(verified)
}

/// Returns the bytes that fio read back, and its number of errors.
fn fio_result(text: &str) -> Result<Verified> {
    let start = text.find('{').context("fio printed no JSON")?;
    let tree: Value = serde_json::from_str(&text[start..]).context("fio's JSON can't be read")?;
    let job = tree.get("jobs").and_then(|j| j.get(0)).context("fio's JSON has no job")?;
    let number = |v: Option<&Value>| v.and_then(Value::as_u64).unwrap_or(0);
    Ok(Verified {
        bytes: number(job.get("read").and_then(|r| r.get("io_bytes"))),
        mismatches: number(job.get("total_err")) + u64::from(number(job.get("error")) != 0),
    })
}

/// Returns a word that a script printed after a marker.
fn said<'a>(text: &'a str, marker: &str) -> Result<&'a str> {
    text.lines()
        .find_map(|l| l.strip_prefix(marker)?.split_whitespace().next())
        .with_context(|| format!("The guest didn't say {marker:?}: {text}"))
}

fn nvme(pair: &Pair<'_>) -> Result<Verified> {
    let address = &pair.b.port.address;
    pair.b.sh(&format!(
        "set -e; modprobe brd rd_nr=1 rd_size={kib}; modprobe -a configfs nvmet nvmet-rdma\n\
         [ -d /sys/kernel/config/nvmet ] || mount -t configfs configfs /sys/kernel/config; cd /sys/kernel/config/nvmet\n\
         mkdir subsystems/lab; echo 1 > subsystems/lab/attr_allow_any_host; mkdir subsystems/lab/namespaces/1\n\
         printf /dev/ram0 > subsystems/lab/namespaces/1/device_path; echo 1 > subsystems/lab/namespaces/1/enable\n\
         mkdir ports/1; cd ports/1; echo ipv4 > addr_adrfam; echo rdma > addr_trtype; echo {address} > addr_traddr; echo 4420 > addr_trsvcid\n\
         ln -s /sys/kernel/config/nvmet/subsystems/lab subsystems/lab",
        kib = 2 * MIB * 1024
    ))?;
    let connect = pair.a.sh(&format!(
        "set -e; modprobe -a nvme-fabrics nvme-rdma; mkdir -p /etc/nvme\n\
         nvme connect -t rdma -a {address} -s 4420 -n lab -i 2 -Q 32 --hostnqn nqn.2014-08.org.nvmexpress:uuid:6c61622d-6775-6573-742d-610000000001 \\\n\
           --hostid 6c61622d-6775-6573-742d-610000000001\n\
         i=0; until [ -b /dev/nvme0n1 ]; do i=$((i+1)); [ $i -gt 100 ] && exit 1; sleep 0.1; done; echo NVME $(blockdev --getsize64 /dev/nvme0n1)"
    ))?;
    progress!("NVMe over RDMA: a disk of {} bytes", said(&connect, "NVME ")?);
    let mut verified = fio(pair, "/dev/nvme0n1", "libaio")?;
    // One side's writes are on the other side's RAM disk.
    let bytes = u64::from(MIB) << 20;
    let here = pair.a.run(
        &format!("dd if=/dev/urandom of=/tmp/w bs=1M count={MIB} status=none && dd if=/tmp/w of=/dev/nvme0n1 bs=1M oflag=direct conv=fsync status=none && echo SUM $(sha256sum < /tmp/w); rm -f /tmp/w; \
                  echo AGAIN $(dd if=/dev/nvme0n1 bs=1M count={MIB} iflag=direct status=none | sha256sum)"),
        PROGRAM_TIMEOUT,
    )?.success()?;
    let there = pair
        .b
        .run(
            &format!("echo SUM $(dd if=/dev/ram0 bs=1M count={MIB} status=none | sha256sum)"),
            PROGRAM_TIMEOUT,
        )?
        .success()?;
    for (side, sum) in [("target", said(&there, "SUM ")?), ("initiator", said(&here, "AGAIN ")?)] {
        let same = said(&here, "SUM ")? == sum;
        progress!("NVMe over RDMA: checksum at the {side} {}", if same { "agrees" } else { "DIFFERS" });
        verified.add(if same {
            Verified { bytes, mismatches: 0 }
        } else {
            Verified { bytes: 0, mismatches: 1 }
        });
    }
    pair.a.sh("nvme disconnect -n lab")?;
    pair.b.sh("set -e; cd /sys/kernel/config/nvmet; rm ports/1/subsystems/lab; rmdir ports/1; echo 0 > subsystems/lab/namespaces/1/enable; rmdir subsystems/lab/namespaces/1 subsystems/lab; modprobe -r brd")?;
    Ok(verified)
}

fn nfs(pair: &Pair<'_>) -> Result<Verified> {
    let address = &pair.b.port.address;
    // Only version 4, which needs no port mapper. No client has state to reclaim, so its grace period of 90 s ends at once.
    pair.b.sh(&format!(
        "set -ex; mount -t tmpfs -o size={size}m srv /srv; echo '/srv *(rw,fsid=0,insecure,no_root_squash,no_subtree_check,async)' > /etc/exports\n\
         modprobe -a sunrpc nfsd rpcrdma; [ -e /proc/fs/nfsd/threads ] || mount -t nfsd nfsd /proc/fs/nfsd; mkdir -p /var/lib/nfs/v4recovery; touch /var/lib/nfs/etab /var/lib/nfs/rmtab\n\
         ip link set lo up\n\
         exportfs -ra; rpc.mountd --no-nfs-version 3; rpc.nfsd --no-nfs-version 3 --no-udp 4; echo Y > /proc/fs/nfsd/v4_end_grace; echo 'rdma 20049' > /proc/fs/nfsd/portlist; cat /proc/fs/nfsd/portlist",
        size = 3 * MIB
    ))?;
    let mount = format!("mount -t nfs4 -o rdma,port=20049,vers=4.1,sec=sys {address}:/ /mnt");
    let mounted = pair.a.sh(&format!(
        "set -e; modprobe -a nfsv4 rpcrdma; {mount}; echo NFS $(sed -n 's/.* \\/mnt nfs4 //p' /proc/mounts)"
    ))?;
    if !mounted.contains("proto=rdma") {
        bail!("The mount doesn't use RDMA: {mounted}");
    }
    progress!("NFS over RDMA: {}", mounted.trim());
    let mut verified = fio(pair, "/mnt/fio", "libaio")?;
    let bytes = u64::from(MIB) << 20;
    // Mounted again, so that reads come from the server and not from a cache.
    let here = pair.a.run(
        &format!("set -e; dd if=/dev/urandom of=/tmp/w bs=1M count={MIB} status=none; rm -f /mnt/fio; cp /tmp/w /mnt/w; sync; echo SUM $(sha256sum < /tmp/w); rm /tmp/w\n\
                  umount /mnt; {mount}; echo AGAIN $(sha256sum < /mnt/w)"),
        PROGRAM_TIMEOUT,
    )?.success()?;
    let there = pair.b.run("echo SUM $(sha256sum < /srv/w)", PROGRAM_TIMEOUT)?.success()?;
    for (side, sum) in [("server", said(&there, "SUM ")?), ("client", said(&here, "AGAIN ")?)] {
        let same = said(&here, "SUM ")? == sum;
        progress!("NFS over RDMA: checksum at the {side} {}", if same { "agrees" } else { "DIFFERS" });
        verified.add(if same {
            Verified { bytes, mismatches: 0 }
        } else {
            Verified { bytes: 0, mismatches: 1 }
        });
    }
    pair.a.sh("umount /mnt")?;
    pair.b.sh("rpc.nfsd 0; exportfs -ua; umount /proc/fs/nfsd /srv; true")?;
    Ok(verified)
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    type Part = (&'static str, fn(&Pair<'_>) -> Result<Verified>);
    const PARTS: [Part; 2] = [("nvme", nvme), ("nfs", nfs)];
    let pair = Pair::start(lab, options)?;
    let mut all = Verified::default();
    let mut parts = Map::new();
    for (name, part) in PARTS.into_iter().filter(|p| options.wants(p.0)) {
        match part(&pair) {
            Ok(v) => {
                progress!("{name}: {} bytes verified, {} mismatches", v.bytes, v.mismatches);
                report.check(v.mismatches == 0, format!("{} mismatches over {name}", v.mismatches));
                report.check(v.bytes > 0, format!("nothing was verified over {name}"));
                all.add(v);
                parts.insert(name.into(), json!({"bytes_verified": v.bytes, "mismatches": v.mismatches}));
            }
            Err(e) => {
                progress!("{name} FAILED: {e:#}");
                let unfinished = e.is::<Unfinished>();
                if !unfinished {
                    // Immediately: a wrong answer counts, independent of later events.
                    report.check(false, format!("{name}: {e:#}"));
                }
                for m in [&pair.a, &pair.b] {
                    m.answers()?;
                    progress!("  kernel of {}:\n{}", m.name, m.kernel_log(12));
                }
                report.check(!unfinished, format!("{name}: {e:#}"));
                parts.insert(name.into(), json!({"error": format!("{e:#}")}));
            }
        }
    }
    report.check(!parts.is_empty(), "no part was run");
    report.figure("bytes_verified", all.bytes);
    report.figure("mismatches", all.mismatches);
    report.figure("device", pair.device.name());
    report.figure("parts", parts);
    pair.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_is_read() {
        let text = r#"note: x
{"jobs":[{"error":0,"total_err":0,"read":{"io_bytes":4096},"write":{"io_bytes":4096}}]}"#;
        assert_eq!(fio_result(text).unwrap(), Verified { bytes: 4096, mismatches: 0 });
        let text = r#"{"jobs":[{"error":84,"total_err":3,"read":{"io_bytes":4096}}]}"#;
        assert_eq!(fio_result(text).unwrap().mismatches, 4);
        assert!(fio_result("nothing").is_err());
    }

    #[test]
    fn words_after_markers() {
        assert_eq!(said("x\nSUM abc -\n", "SUM ").unwrap(), "abc");
        assert!(said("x", "SUM ").is_err());
    }
}
