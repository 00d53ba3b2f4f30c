//! Trust in a neighbour's frames and pages: forwarded frames whose checksums aren't verified, and pages that an application still reads
//! when the driver is unbound.

use crate::rdma::Runs as _;
use crate::scenarios::neighbours_member::{Member, counter};
use crate::scenarios::neighbours_tools::{Found, TOOL_TIMEOUT};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::time::Duration;

/// Modules of the guest's kernel for [`checksums`].
pub(super) const MODULES: [&str; 2] = ["bridge", "veth"];
/// File with the load order of the modules and their dependencies.
pub(super) const MODULE_ORDER: &str = "bridge.order";
/// Unread bytes of the application: they fit into the receive buffer and one frame.
const HELD_BYTES: u64 = 48 << 10;
/// Sender address of the external frame, which no guest has.
const OUTSIDER: Ipv4Addr = Ipv4Addr::new(10, 81, 0, 9);

/// Returns commands that load the modules of a file, unless loaded.
pub(super) fn load_modules(order: &str) -> String {
    format!(
        "for m in $(cat /lab/{order}); do grep -q \"^$(echo $m | tr - _) \" /proc/modules || insmod /lab/$m.ko; done"
    )
}

/// Returns a TCP counter of a guest.
fn tcp_count(member: &Member<'_>, name: &str) -> Result<u64> {
    let text = member.sh("grep ^Tcp: /proc/net/snmp")?;
    snmp(&text, name).with_context(|| format!("guest {}: no counter {name} in {text:?}", member.name))
}

/// Returns a counter of `/proc/net/snmp`: a line of names, and one of values.
fn snmp(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines();
    let at = lines.next()?.split_whitespace().position(|word| word == name)?;
    lines.next()?.split_whitespace().nth(at)?.parse().ok()
}

/// Returns the Internet checksum of an even number of bytes (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let (pairs, _) = bytes.as_chunks::<2>();
    let sum: u32 = pairs.iter().map(|pair| u32::from(u16::from_be_bytes(*pair))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let [.., high, low] = (!(sum + (sum >> 16))).to_be_bytes();
    u16::from_be_bytes([high, low])
}

/// Returns an Ethernet frame with a TCP SYN to port 7100, which is closed. `error` is added to the correct checksum.
fn syn(to: [u8; 6], address: Ipv4Addr, error: u16) -> Vec<u8> {
    let mut tcp = vec![0x1b, 0xbd, 0x1b, 0xbc, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x02, 0xff, 0xff, 0, 0, 0, 0];
    let mut pseudo: Vec<u8> = OUTSIDER.octets().into_iter().chain(address.octets()).collect();
    pseudo.extend([0, 6, 0, 20]);
    pseudo.extend(&tcp);
    let sum = checksum(&pseudo).wrapping_add(error).to_be_bytes();
    tcp[16..18].copy_from_slice(&sum);
    let mut ip = vec![0x45, 0, 0, 40, 0, 1, 0x40, 0, 64, 6, 0, 0];
    ip.extend(OUTSIDER.octets().into_iter().chain(address.octets()));
    let sum = checksum(&ip).to_be_bytes();
    ip[10..12].copy_from_slice(&sum);
    let from = [0x02, 0, 0, 0, 0, 9];
    to.into_iter().chain(from).chain([0x08, 0x00]).chain(ip).chain(tcp).collect()
}

fn mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<u8> =
        text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect::<Option<_>>()?;
    bytes.try_into().ok()
}

/// Sends an external frame to `b` over a bridge in `a`. TCP drops it if its checksum is wrong, and replies if it is correct.
pub(super) fn checksums(a: &Member<'_>, b: &Member<'_>) -> Found {
    let text = b.sh("cat /sys/class/net/mm0/address")?;
    let to = mac(&text).with_context(|| format!("guest b's mm0 has the address {text:?}"))?;
    let [own, peer] = [a.sh("cat /sys/class/net/mm0/address")?, text];
    if own.trim() == peer.trim() {
        bail!("both ends of the pair have the address {peer:?}");
    }
    a.sh(&format!(
        "set -e; {}\n\
         ip link add v0 type veth peer name v1; ip link add br9 type bridge; ip link set v1 master br9; ip link set mm0 master br9\n\
         for d in v0 v1 br9; do ip link set $d up; done",
        load_modules(MODULE_ORDER)
    ))?;
    let mut dropped = 0;
    for error in [0x0101, 0] {
        let names = ["InCsumErrors", "OutRsts"];
        let before = names.map(|name| tcp_count(b, name));
        let [wrong, answered] = before;
        let (wrong, answered) = (wrong?, answered?);
        let mut octal = String::new();
        for byte in syn(to, Ipv4Addr::new(10, 81, 0, 2), error) {
            write!(octal, "\\{byte:03o}")?;
        }
        a.sh(&format!("printf '{octal}' | socat -u - INTERFACE:v0"))?;
        let mut left = 600;
        let (wrong, answered) = loop {
            let now = (tcp_count(b, names[0])? - wrong, tcp_count(b, names[1])? - answered);
            left -= 1;
            if now != (0, 0) || left == 0 {
                break now;
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        let wanted = if error == 0 { (0, 1) } else { (1, 0) };
        if (wrong, answered) != wanted {
            bail!(
                "a SYN whose checksum is off by {error} over a bridge: {wrong} found wrong, {answered} answered"
            );
        }
        dropped += wrong;
    }
    a.sh("set -e; ip link del br9; ip link del v0; ip addr show dev mm0 | grep 10.81.0.1 || ip addr add 10.81.0.1/24 dev mm0")?;
    Ok(json!({"dropped_for_their_checksum": dropped}))
}

/// Unbinds the driver while an application has unread data, and binds it again. The data is correct, and the neighbours reconnect after
/// it was read. `wait` waits for that in `b`.
pub(super) fn unbind_held(a: &Member<'_>, b: &Member<'_>, wait: &str) -> Found {
    let reader = b.start(&format!(
        "rm -f /tmp/go /tmp/sum; printf 'until [ -e /tmp/go ]; do sleep 0.1; done; head -c {HELD_BYTES} | sha256sum > /tmp/sum' > /tmp/reader\n\
         exec socat TCP-LISTEN:7003,reuseaddr EXEC:'sh /tmp/reader',nofork"
    ))?;
    b.sh("i=0; until ss -Hltn sport = :7003 | grep -q .; do i=$((i+1)); [ $i -gt 600 ] && exit 1; sleep 0.1; done")?;
    let sent = a.sh(&format!(
        "set -e; head -c {HELD_BYTES} /dev/urandom > /tmp/w; socat -u FILE:/tmp/w TCP:10.81.0.2:7003 >&2; i=0\n\
         until ss -Htan dport = :7003 | grep -q FIN-WAIT-2; do i=$((i+1)); [ $i -gt 600 ] && exit 1; sleep 0.1; done; sha256sum < /tmp/w"
    ))?;
    let held = {
        let counts = a.statistics("mm0")?;
        counter(&counts, "tx_frames")? - counter(&counts, "tx_returned")? - counter(&counts, "tx_lost")?
    };
    if held == 0 {
        bail!("the application holds no frame: {:?}", a.statistics("mm0")?);
    }
    let device = b.sh(
        "set -e; cd /sys/bus/pci/drivers/cw_neigh; d=$(basename $(ls -d 0000:*)); echo $d > unbind; [ ! -e /sys/class/net/mm0 ]; echo $d > bind; echo $d",
    )?;
    b.sh("touch /tmp/go")?;
    reader.wait(TOOL_TIMEOUT)?;
    let read = b.sh("cat /tmp/sum")?;
    if read.trim() != sent.trim() {
        bail!(
            "the application read other bytes than were sent after the driver had gone: {read:?}, not {sent:?}"
        );
    }
    b.sh(&format!("set -e; {wait}"))?;
    Ok(json!({"frames_held": held, "device": device.trim()}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_the_kernel_are_read() {
        let text = "Tcp: InErrs OutRsts InCsumErrors\nTcp: 1 2 3\n";
        assert_eq!(
            (snmp(text, "InCsumErrors"), snmp(text, "OutRsts"), snmp(text, "x")),
            (Some(3), Some(2), None)
        );
    }

    #[test]
    fn a_frame_has_a_right_or_a_wrong_checksum() {
        let address = Ipv4Addr::new(10, 81, 0, 2);
        let verify = |frame: &[u8]| {
            let mut pseudo = frame[26..34].to_vec();
            pseudo.extend([0, 6, 0, 20]);
            pseudo.extend(&frame[34..]);
            (checksum(&frame[14..34]), checksum(&pseudo))
        };
        assert_eq!(verify(&syn([2; 6], address, 0)), (0, 0));
        assert_ne!(verify(&syn([2; 6], address, 0x0101)).1, 0);
        assert_eq!(mac("02:00:00:00:00:ff\n"), Some([2, 0, 0, 0, 0, 0xff]));
    }
}
