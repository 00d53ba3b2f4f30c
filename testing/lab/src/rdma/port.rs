//! RDMA devices of guests and hosts, as their user space sees them.

use super::Runs;
use anyhow::{Context, Result, bail};
use std::time::Duration;

/// The RDMA device of the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// Causeway's device.
    Pvrdma,
    /// Linux's software RoCE over virtio-net.
    Rxe,
}

impl Device {
    /// Parses a `--device` option.
    pub fn parse(text: &str) -> Result<Self> {
        Ok(match text {
            "pvrdma" => Device::Pvrdma,
            "rxe" => Device::Rxe,
            _ => bail!("There is no RDMA device {text:?}; there are pvrdma and rxe"),
        })
    }

    /// Returns the name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Device::Pvrdma => "pvrdma",
            Device::Rxe => "rxe",
        }
    }

    /// Returns the device's kernel module.
    fn module(self) -> &'static str {
        match self {
            Device::Pvrdma => "vmw_pvrdma",
            Device::Rxe => "rdma_rxe",
        }
    }
}

/// An RDMA device in a guest's user space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The device's name.
    pub device: String,
    /// The index of its GID for an IPv4 address.
    pub gid: u32,
    /// The IPv4 address.
    pub address: String,
    /// The network interface.
    pub interface: String,
}

/// Finds the device of a kind in a guest or host, and its first GID for an IPv4 address (RoCE version 2).
pub fn find_port(at: &dyn Runs, device: Device) -> Result<Port> {
    let script = format!(
        "i=0; while [ $i -lt 100 ]; do i=$((i+1)); for d in /sys/class/infiniband/*; do [ -e $d ] || continue\n\
         n=$(ls $d/ports/1/gid_attrs/ndevs | head -n 1); net=$(cat $d/ports/1/gid_attrs/ndevs/0 2>/dev/null); name=${{d##*/}}\n\
         if [ {module} = rdma_rxe ]; then [ -e $d/parent ] || continue; else [ \"$(basename $(readlink $d/device/driver))\" = {module} ] || continue; fi\n\
         for g in $d/ports/1/gids/*; do case $(cat $g) in 0000:0000:0000:0000:0000:ffff:*) \n\
         x=${{g##*/}}; case $(cat $d/ports/1/gid_attrs/types/$x) in *v2*) echo \"$name $x $(cat $g) $net\"; exit 0;; esac;; esac; done; done; sleep 0.2; done\n\
         ls -l /sys/class/infiniband >&2; dmesg | grep -i -e rdma -e vmxnet -e rxe | tail -n 12 >&2; exit 1",
        module = device.module()
    );
    let text = at
        .run(&script, Duration::from_secs(180))?
        .success()
        .with_context(|| format!("There is no {} device with an IPv4 GID", device.name()))?;
    parse_port(&text).with_context(|| format!("The RDMA port was described as {text:?}"))
}

/// Parses `device index gid interface`. The address is in the GID's last 32 bits.
fn parse_port(text: &str) -> Option<Port> {
    let mut words = text.split_whitespace();
    let (device, gid, raw) = (words.next()?, words.next()?.parse().ok()?, words.next()?);
    let interface = words.next()?.to_owned();
    let groups: Vec<u16> =
        raw.split(':').map(|g| u16::from_str_radix(g, 16)).collect::<Result<_, _>>().ok()?;
    let [.., high, low] = groups[..] else { return None };
    let [a, b] = high.to_be_bytes();
    let [c, d] = low.to_be_bytes();
    Some(Port { device: device.to_owned(), gid, address: format!("{a}.{b}.{c}.{d}"), interface })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read() {
        let got = parse_port("rxe0 1 0000:0000:0000:0000:0000:ffff:0a4f:0001 net0\n").unwrap();
        assert_eq!(
            got,
            Port { device: "rxe0".into(), gid: 1, address: "10.79.0.1".into(), interface: "net0".into() }
        );
        assert_eq!(parse_port("rxe0 1"), None);
    }
}
