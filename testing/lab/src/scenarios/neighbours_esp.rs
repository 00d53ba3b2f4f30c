//! IPsec between neighbours. The kernel decrypts a frame in place, and a window's pages are read-only. So the module copies frames that
//! may be decrypted. Data must arrive correctly, and no store may reach a window.
//!
//! ```text
//!   10.81.0.1 mm0 ── mm0 10.81.0.2                                      ESP in the network namespace of the device
//!   10.81.0.1 mm0 ── mm0, forwarded ── v0 ── v1 10.81.5.2, namespace    ESP in another one, as that of a container
//! ```

use crate::progress;
use crate::rdma::Runs as _;
use crate::scenarios::neighbours_integrity::load_modules;
use crate::scenarios::neighbours_member::{Counts, Member, counter};
use crate::scenarios::neighbours_tools::{Found, number};
use anyhow::{Context, Result, bail};
use serde_json::{Map, json};
use std::time::Duration;

/// Modules of the guest's kernel, unless built in: ESP with its GRO hook, its cipher and random number generator, and veth.
pub(super) const MODULES: [&str; 8] =
    ["sha512_generic", "drbg", "echainiv", "authenc", "xfrm_user", "esp4", "esp4_offload", "veth"];
/// File with the load order of the modules and their dependencies.
pub(super) const MODULE_ORDER: &str = "esp.order";
/// Bytes of a transfer: some hundred frames, decrypted by an emulated processor.
const BYTES: u64 = 4 << 20;
/// Time-out of a transfer. A frame that was decrypted wrongly is dropped, and retransmitted forever.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(300);
const NAMESPACE: &str = "inner";

/// A pair of addresses with ESP between them, and the second guest's namespace.
struct Net {
    name: &'static str,
    addresses: [&'static str; 2],
    /// Prefix of commands in the second guest's namespace.
    inside: &'static str,
}

const NETS: [Net; 2] = [
    Net { name: "same_namespace", addresses: ["10.81.0.1", "10.81.0.2"], inside: "" },
    Net { name: "other_namespace", addresses: ["10.81.0.1", "10.81.5.2"], inside: "ip netns exec inner " },
];

impl Net {
    /// Returns the prefix of commands at the address of `of`.
    fn inside(&self, of: &Member<'_>) -> &'static str {
        if number(of) == 2 { self.inside } else { "" }
    }

    /// Returns states and policies for all packets between the addresses, with public test keys.
    fn protect(&self, of: &Member<'_>) -> String {
        let [a, b] = self.addresses;
        let ip = format!("{}ip xfrm", self.inside(of));
        let keys = format!(
            "auth 'hmac(sha256)' 0x{} enc 'cbc(aes)' 0x{}",
            "0123456789abcdef".repeat(4),
            "00112233445566778899aabbccddeeff"
        );
        let state = |from: &str, to: &str, spi: u32| {
            format!("{ip} state add src {from} dst {to} proto esp spi {spi:#x} mode transport {keys}")
        };
        let policy = |from: &str, to: &str, direction: &str| {
            format!(
                "{ip} policy add src {from} dst {to} dir {direction} tmpl src {from} dst {to} proto esp mode transport"
            )
        };
        let (out, into) = if number(of) == 1 { ("out", "in") } else { ("in", "out") };
        ["set -e".to_owned(), state(a, b, 0x1001), state(b, a, 0x1002), policy(a, b, out), policy(b, a, into)]
            .join("; ")
    }

    /// Transfers bytes from one guest to the other, and compares checksums.
    fn transfer(&self, from: &Member<'_>, to: &Member<'_>) -> Result<()> {
        let reader = to.start(&format!(
            "exec {}timeout {} sh -c 'socat -u TCP-LISTEN:7005,reuseaddr - | sha256sum'",
            self.inside(to),
            TRANSFER_TIMEOUT.as_secs()
        ))?;
        to.sh(&format!(
            "i=0; until {}ss -Hltn sport = :7005 | grep -q .; do i=$((i+1)); [ $i -gt 600 ] && exit 1; sleep 0.1; done",
            self.inside(to)
        ))?;
        let address = self.addresses.get(number(to) - 1).context("two guests")?;
        let sent = from.sh(&format!(
            "set -e; head -c {BYTES} /dev/urandom > /tmp/w; {}timeout {} socat -u FILE:/tmp/w TCP:{address}:7005 >&2; sha256sum < /tmp/w",
            self.inside(from),
            TRANSFER_TIMEOUT.as_secs()
        ))?;
        let code = reader.wait(TRANSFER_TIMEOUT)?;
        let got = reader.out.lines_from(0).join("");
        if code != Some(0) || got.trim() != sent.trim() {
            bail!(
                "{BYTES} bytes by ESP to {} arrived changed, or not at all: {sent:?} became {got:?}",
                to.name
            );
        }
        Ok(())
    }

    /// Returns the number of packets that went through ESP in `of`, both ways. Fails if ESP refused some.
    fn protected(&self, of: &Member<'_>) -> Result<u64> {
        let inside = self.inside(of);
        let text = of.sh(&format!(
            "{inside}ip -s xfrm state | grep -A1 'lifetime current' | sed -n 's/.* \\([0-9]*\\)(packets).*/\\1/p'"
        ))?;
        let errors =
            of.sh(&format!("{inside}grep ^XfrmIn /proc/net/xfrm_stat | grep -v '[[:space:]]0 *$' || true"))?;
        if !errors.trim().is_empty() {
            bail!("guest {} received what ESP refuses: {errors:?}", of.name);
        }
        Ok(text.split_whitespace().filter_map(|word| word.parse::<u64>().ok()).sum())
    }
}

fn grown(before: &Counts, after: &Counts, name: &str) -> Result<u64> {
    Ok(counter(after, name)? - counter(before, name)?)
}

/// Transfers both ways by ESP, in the device's namespace and in another.
pub(super) fn esp(a: &Member<'_>, b: &Member<'_>) -> Found {
    for member in [a, b] {
        member.sh(&load_modules(MODULE_ORDER))?;
    }
    b.sh(&format!(
        "set -e; ip netns add {NAMESPACE}; ip link add v0 mtu $(cat /sys/class/net/mm0/mtu) type veth peer name v1 netns {NAMESPACE}; \
         ip addr add 10.81.5.254/24 dev v0; ip link set v0 up; ip -n {NAMESPACE} link set v1 mtu $(cat /sys/class/net/mm0/mtu) up; \
         ip -n {NAMESPACE} addr add 10.81.5.2/24 dev v1; ip -n {NAMESPACE} route add default via 10.81.5.254; \
         echo 1 > /proc/sys/net/ipv4/ip_forward"
    ))?;
    a.sh("ip route add 10.81.5.0/24 via 10.81.0.2")?;
    let mut found = Map::new();
    for net in &NETS {
        let stores = [a.discarded_stores()?, b.discarded_stores()?];
        for member in [a, b] {
            member.sh(&net.protect(member))?;
        }
        let before = b.statistics("mm0")?;
        net.transfer(a, b)?;
        net.transfer(b, a)?;
        let after = b.statistics("mm0")?;
        let packets = net.protected(b)?;
        for member in [a, b] {
            let inside = net.inside(member);
            member.sh(&format!("{inside}ip xfrm policy flush; {inside}ip xfrm state flush"))?;
        }
        let stored = [a.discarded_stores()? - stores[0], b.discarded_stores()? - stores[1]];
        let (by_reference, copied) =
            (grown(&before, &after, "rx_by_reference")?, grown(&before, &after, "rx_copied_xfrm")?);
        let line = json!({
            "packets_by_esp": packets, "frames_by_reference": by_reference, "frames_copied_for_ipsec": copied, "stores_into_windows": stored,
        });
        progress!("  {}: {line}", net.name);
        if stored != [0, 0] {
            bail!("{}: the kernels stored into windows: {line}", net.name);
        }
        // If the device's own namespace decrypts, all frames are copied on arrival; otherwise before decryption.
        let wanted = if net.inside.is_empty() { by_reference == 0 && copied > 0 } else { by_reference > 0 };
        if packets == 0 || !wanted {
            bail!("{}: other frames were copied than should be: {line}", net.name);
        }
        found.insert(net.name.to_owned(), line);
    }
    b.sh(&format!("echo 0 > /proc/sys/net/ipv4/ip_forward; ip netns del {NAMESPACE}"))?;
    a.sh("ip route del 10.81.5.0/24")?;
    Ok(found.into())
}
