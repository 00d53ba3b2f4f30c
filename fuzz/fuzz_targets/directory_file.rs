//! The directory file of hosts and VMs with any content: damaged, contradictory, or valid.
//!
//! Checked: the result is an error sentence or a directory, and an accepted directory has no contradiction.

#![no_main]

use std::collections::BTreeSet;
use std::fmt::Write as _;

use arbitrary::Arbitrary;
use host::transport::{Directory as _, FileDirectory};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct File {
    mtu: Option<u8>,
    sockets: Option<u8>,
    hosts: Vec<(u8, u8, u16)>,
    vms: Vec<Vm>,
    /// Replaced bytes.
    damage: Vec<(u16, u8)>,
    /// Appended text.
    text: String,
}

#[derive(Debug, Arbitrary)]
struct Vm {
    name: u8,
    id: u8,
    host: u8,
    pin: u8,
    nics: Vec<(u8, u8, u8)>,
}

fn text(file: &File) -> String {
    let mut text = String::new();
    if let Some(mtu) = file.mtu {
        let _ = writeln!(text, "mtu = {}", 128 + u32::from(mtu) * 24);
    }
    if let Some(sockets) = file.sockets {
        let _ = writeln!(text, "sockets = {}", sockets % 20);
    }
    for (name, address, port) in file.hosts.iter().take(6) {
        let _ = writeln!(text, "[[host]]\nname = \"h{}\"\naddress = \"10.0.0.{address}:{port}\"", name % 8);
    }
    for vm in file.vms.iter().take(8) {
        let _ = writeln!(
            text,
            "[[vm]]\nname = \"v{}\"\nid = {}\nhost = \"h{}\"",
            vm.name % 10,
            vm.id % 10,
            vm.host % 8
        );
        let pins = ["", "local", "fabric", "wire", "verbs", "pigeon"];
        if let Some(pin) = pins.get(usize::from(vm.pin % 8)).filter(|pin| !pin.is_empty()) {
            let _ = writeln!(text, "transport = \"{pin}\"");
        }
        for (segment, address, mac) in vm.nics.iter().take(3) {
            let _ = writeln!(
                text,
                "[[vm.nic]]\nsegment = \"s{}\"\naddresses = [\"192.168.0.{address}\"]",
                segment % 3
            );
            if mac % 2 == 0 {
                let _ = writeln!(text, "mac = \"52:54:00:00:00:{mac:02x}\"");
            }
        }
    }
    text
}

fuzz_target!(|file: File| {
    let mut text = text(&file).into_bytes();
    for (at, byte) in file.damage.iter().take(4) {
        let len = text.len().max(1);
        if let Some(place) = text.get_mut(usize::from(*at) % len) {
            *place = *byte;
        }
    }
    text.extend_from_slice(file.text.as_bytes());
    let text = String::from_utf8_lossy(&text);
    let Ok(directory) = FileDirectory::parse(&text, "fuzzed".as_ref()) else { return };
    assert!((256..=4096).contains(&directory.mtu().bytes()) && directory.mtu().bytes() % 4 == 0);
    assert!((1..=16).contains(&directory.sockets()));
    let hosts: BTreeSet<_> = directory.hosts().into_iter().collect();
    for host in &hosts {
        assert!(host.port().checked_add(directory.sockets()).is_some(), "all its ports exist");
    }
    let mut numbers = BTreeSet::new();
    for name in 0..10 {
        let Some(vm) = directory.vm(&format!("v{name}")) else { continue };
        assert!(vm.0 != 0 && numbers.insert(vm), "a number is one VM's");
        assert!(directory.host(vm).is_some_and(|host| hosts.contains(&host)), "it is on a host");
    }
});
