//! A guest's network through a tap: iperf3 both ways, and bulk transfers with compared checksums.

use crate::guest::{Guest, GuestSpec, Vmm};
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::Topology;
use anyhow::{Context, Result};
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "net",
    about: "iperf3 both ways and checksummed bulk transfers between a guest and its host over tap",
    topology: |_| Topology::single(),
    run,
    prompt: None,
};

/// Creates a tap with an address in the host; the guest's side is .2.
pub fn tap(host: &Host, name: &str, net: &str) -> Result<()> {
    host.sh(&format!(
        "ip tuntap add {name} mode tap vnet_hdr && ip addr add {net}.1/24 dev {name} && ip link set {name} up"
    ))
    .map(drop)
}

/// Returns the guest's commands that bring its NIC up.
pub fn guest_up(net: &str) -> String {
    format!(
        "n=$(ls /sys/class/net | grep -v lo | head -n 1); ip addr add {net}.2/24 dev $n; ip link set $n up; \
         i=0; while ! ping -c 1 -W 1 {net}.1 >/dev/null 2>&1; do i=$((i+1)); [ $i -gt 20 ] && echo 'NET no answer' && exit 1; done\n"
    )
}

/// Returns the guest's script. Each transfer prints `SUM direction sha256`.
fn script(mib: u32, rounds: u32, seconds: u64) -> String {
    let mut s = guest_up("10.78.0");
    s.push_str(&format!(
        "for d in up down; do r=; [ $d = down ] && r=-R\n\
         iperf3 -c 10.78.0.1 -t {seconds} $r -f m > /tmp/i 2>&1 || {{ cat /tmp/i; exit 2; }}\n\
         echo \"IPERF $d $(grep receiver /tmp/i | sed 's/.*Bytes *//;s/ Mbits.*//')\"; done\n\
         for i in $(seq {rounds}); do\n\
         head -c {bytes} /dev/urandom > /tmp/up; echo \"SUM up $i $(sha256sum < /tmp/up | cut -c1-64)\"\n\
         socat -u FILE:/tmp/up TCP:10.78.0.1:7001 || exit 3; rm /tmp/up\n\
         socat -u TCP:10.78.0.1:7002 CREATE:/tmp/down || exit 4\n\
         echo \"SUM down $i $(sha256sum < /tmp/down | cut -c1-64)\"; rm /tmp/down\n\
         done\n",
        bytes = u64::from(mib) << 20
    ));
    s
}

fn sums(text: &str, direction: &str) -> Vec<String> {
    let prefix = format!("SUM {direction} ");
    text.lines().filter_map(|l| l[l.find(&prefix)?..].split_whitespace().nth(3).map(str::to_owned)).collect()
}

fn rate(text: &str, direction: &str) -> Option<f64> {
    let prefix = format!("IPERF {direction} ");
    text.lines().find_map(|l| l[l.find(&prefix)? + prefix.len()..].trim().parse().ok())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let vmm = options.vmm()?;
    if vmm == Vmm::Causeway {
        lab.install_causeway()?;
    }
    let host = lab.host(0)?;
    tap(host, "tap0", "10.78.0")?;
    let (mib, rounds) = (16, options.count.unwrap_or(3));
    let seconds = options.seconds.unwrap_or(8);
    let _iperf = host.spawn("iperf3 server", "exec iperf3 -s")?;
    // Up: received bytes are summed. Down: every connection gets new bytes, which are summed as they are sent.
    host.sh(&format!(
        "mkdir -p /tmp/n && cat > /tmp/n/up <<'E'\n#!/bin/sh\necho \"SUM up 0 $(sha256sum | cut -c1-64)\" >> /tmp/n/up.sums\nE\n\
         cat > /tmp/n/down <<'E'\n#!/bin/sh\nhead -c {} /dev/urandom > /tmp/n/d.$$; echo \"SUM down 0 $(sha256sum < /tmp/n/d.$$ | cut -c1-64)\" >> /tmp/n/down.sums; cat /tmp/n/d.$$; rm /tmp/n/d.$$\nE\nchmod +x /tmp/n/up /tmp/n/down",
        u64::from(mib) << 20
    ))?;
    let _up = host.spawn("sink", "exec socat TCP-LISTEN:7001,reuseaddr,fork EXEC:/tmp/n/up")?;
    let _down = host.spawn("source", "exec socat TCP-LISTEN:7002,reuseaddr,fork EXEC:/tmp/n/down")?;
    let kernel = options.kernels.first().map_or("6.1-cloud", String::as_str);
    let spec =
        GuestSpec::new("net", kernel, 2).memory(768).root().tap("tap0").script(&script(mib, rounds, seconds));
    let g = Guest::start(host, &spec, vmm)?;
    let status = g.script_status(Duration::from_secs(300 + u64::from(rounds) * 60 + seconds * 4))?;
    g.ended(Duration::from_secs(60))?;
    let guest = g.session.out.text();
    // The host's sum is computed after the guest has ended the transfer.
    let all = format!(
        "i=0; while [ $i -lt 120 ] && [ $(cat /tmp/n/*.sums 2>/dev/null | wc -l) -lt {} ]; do i=$((i+1)); sleep 0.5; done; cat /tmp/n/up.sums /tmp/n/down.sums; true",
        rounds * 2
    );
    let outside = host.sh(&all)?;
    let mut mismatches = 0;
    let mut verified = 0u64;
    for direction in ["up", "down"] {
        let (a, b) = (sums(&guest, direction), sums(&outside, direction));
        for i in 0..a.len().max(b.len()) {
            if a.get(i).is_some() && a.get(i) == b.get(i) {
                verified += u64::from(mib) << 20;
            } else {
                mismatches += 1;
                progress!(
                    "transfer {} {direction}: the guest has {:?}, the host {:?}",
                    i + 1,
                    a.get(i),
                    b.get(i)
                );
            }
        }
    }
    for direction in ["up", "down"] {
        let r = rate(&guest, direction)
            .with_context(|| format!("iperf3 printed no rate for {direction}: {}", g.session.out.tail(10)))?;
        progress!("iperf3 {direction}: {r:.0} Mbit/s (emulated: only says that it works)");
        report.figure(&format!("iperf3_{direction}_mbits"), r);
    }
    report.figure("bytes_verified", verified);
    report.figure("mismatches", mismatches);
    report.figure("monitor", vmm.name());
    report.check(status == 0, format!("the guest's script ended with status {status}"));
    report.check(mismatches == 0, format!("{mismatches} transfers arrived changed"));
    report.check(
        verified == u64::from(rounds) * 2 * (u64::from(mib) << 20),
        format!("only {verified} bytes were verified"),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_rates_are_read_from_a_console() {
        let text = "junk\r\nIPERF up 123.5\r\nSUM up 1 abc\r\nSUM down 1 def\nSUM up 2 ghi";
        assert_eq!(sums(text, "up"), ["abc", "ghi"]);
        assert_eq!(rate(text, "up"), Some(123.5));
        assert_eq!(rate(text, "down"), None);
    }
}
