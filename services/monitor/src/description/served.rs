//! Validation of devices that other processes serve: `[[rdma]]` and `[[vfio-user]]`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::validate::{MAX_DEVICES_OF_ONE_KIND, at_most, interface, quoted, socket_path};
use super::vm::{Rdma, VfioUser};
use super::{Invalid, Key, MacAddress, written};

/// Default path of the host daemon's socket.
pub(super) const HOST_SOCKET: &str = "/run/causeway/host.sock";
/// Limit for the length of a device's name.
const MAX_NAME_BYTES: usize = 32;
/// Limit for the length of a segment's name.
const MAX_SEGMENT_BYTES: usize = 64;
/// First device number of RDMA NICs, for derived addresses. virtio-net devices start at 0.
const FIRST_NUMBER: usize = 1000;

/// Checks both lists. Names and slots must be unique in the VM.
pub(super) fn validate(vm: &written::Vm, vm_name: &str) -> Result<(Vec<Rdma>, Vec<VfioUser>), Invalid> {
    let mut taken = Taken::default();
    let nics = vm.rdma.iter().flatten().enumerate();
    let nics =
        nics.map(|(index, nic)| rdma(vm_name, index, nic, &mut taken)).collect::<Result<Vec<_>, _>>()?;
    at_most("rdma", nics.len(), MAX_DEVICES_OF_ONE_KIND)?;
    let devices = vm.vfio_user.iter().flatten().enumerate();
    let devices =
        devices.map(|(index, device)| served(index, device, &mut taken)).collect::<Result<Vec<_>, _>>()?;
    at_most("vfio-user", devices.len(), MAX_DEVICES_OF_ONE_KIND)?;
    Ok((nics, devices))
}

/// Names, slots, addresses and sockets in use, and the keys that use them.
#[derive(Default)]
struct Taken {
    names: BTreeMap<String, Key>,
    slots: BTreeMap<u8, Key>,
    macs: BTreeMap<String, Key>,
    sockets: BTreeMap<PathBuf, Key>,
}

fn once<T: Ord>(
    taken: &mut BTreeMap<T, Key>,
    value: T,
    text: &str,
    key: &Key,
    field: &str,
) -> Result<(), Invalid> {
    match taken.insert(value, key.clone()) {
        None => Ok(()),
        Some(other) => Err(Invalid::new(key.below(field), format!("{text} is taken by {other} already"))),
    }
}

fn rdma(vm: &str, index: usize, nic: &written::Rdma, taken: &mut Taken) -> Result<Rdma, Invalid> {
    let key = Key::root("rdma").item(index);
    let name = name(&key, nic.name.clone().unwrap_or_else(|| format!("rdma{index}")), taken)?;
    let mac = nic.mac.unwrap_or_else(|| MacAddress::derived(vm, FIRST_NUMBER + index));
    if !mac.is_unicast() {
        let problem =
            format!("{mac} is a group address or zero; a device's own address has an even first byte");
        return Err(Invalid::new(key.below("mac"), problem));
    }
    once(&mut taken.macs, mac.to_string(), &mac.to_string(), &key, "mac")?;
    let segment = &nic.segment;
    if !plain(segment, MAX_SEGMENT_BYTES, b"._-") {
        let rule = "a segment has 1 to 64 of a-z, A-Z, 0-9, '.', '_', '-', and begins with a letter or digit";
        return Err(Invalid::new(
            key.below("segment"),
            format!("{} is not a segment: {rule}", quoted(segment)),
        ));
    }
    let tap = nic.tap.as_ref().map(|tap| interface(&key.below("tap"), tap)).transpose()?;
    let host = nic.host.clone().unwrap_or_else(|| HOST_SOCKET.into());
    socket_path(&key.below("host"), &host)?;
    let slot = slot(&key, nic.slot, taken)?;
    Ok(Rdma { name, mac, segment: segment.clone(), tap, host, slot })
}

fn served(index: usize, device: &written::VfioUser, taken: &mut Taken) -> Result<VfioUser, Invalid> {
    let key = Key::root("vfio-user").item(index);
    let name = name(&key, device.name.clone().unwrap_or_else(|| format!("vfio-user{index}")), taken)?;
    socket_path(&key.below("socket"), &device.socket)?;
    // A server serves one client at a time.
    let text = quoted(&device.socket.to_string_lossy());
    once(&mut taken.sockets, device.socket.clone(), &text, &key, "socket")?;
    let slot = slot(&key, device.slot, taken)?;
    Ok(VfioUser { name, socket: device.socket.clone(), slot })
}

/// Whether the text begins with a letter or digit, and has no other characters than these and `others`.
fn plain(text: &str, longest: usize, others: &[u8]) -> bool {
    (1..=longest).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || others.contains(&byte))
}

fn name(key: &Key, name: String, taken: &mut Taken) -> Result<String, Invalid> {
    // Virtio and platform devices have these numbered names.
    let numbered = ["disk", "net", "nic", "rng", "vsock", "com"].iter().any(|kind| {
        name.strip_prefix(kind)
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    });
    if numbered || !plain(&name, MAX_NAME_BYTES, b"_-") {
        let rule = "a device's name has 1 to 32 of a-z, A-Z, 0-9, '_', '-', begins with a letter or digit, and is not \
                    one of disk, net, rng, vsock and com with a number";
        return Err(Invalid::new(key.below("name"), format!("{} is not a name: {rule}", quoted(&name))));
    }
    once(&mut taken.names, name.clone(), &quoted(&name), key, "name")?;
    Ok(name)
}

fn slot(key: &Key, slot: Option<u64>, taken: &mut Taken) -> Result<Option<u8>, Invalid> {
    let Some(written) = slot else { return Ok(None) };
    let slot = u8::try_from(written).ok().filter(|slot| (1..=31).contains(slot)).ok_or_else(|| {
        Invalid::new(key.below("slot"), format!("{written} is not a PCI slot; allowed are 1 to 31"))
    })?;
    once(&mut taken.slots, slot, &format!("slot {slot}"), key, "slot")?;
    Ok(Some(slot))
}

#[cfg(test)]
mod tests {
    use crate::description;

    fn validated(text: &str) -> Result<description::VmDescription, String> {
        let text = format!("kernel = \"k\"\n{text}");
        let (vm, _) = description::parse(&text, "/x/vm.toml".as_ref()).map_err(|error| error.to_string())?;
        description::validate(&vm).map_err(|invalid| format!("{}: {}", invalid.key, invalid.problem))
    }

    #[test]
    fn defaults_are_filled_in_and_paths_resolved() {
        let vm =
            validated("[[rdma]]\nsegment = \"s0\"\n[[vfio-user]]\nsocket = \"d.sock\"\nslot = 9").unwrap();
        let nic = &vm.rdma[0];
        assert_eq!((nic.name.as_str(), nic.segment.as_str()), ("rdma0", "s0"));
        assert_eq!(nic.host.to_str(), Some("/run/causeway/host.sock"));
        assert!(nic.mac.is_unicast() && nic.slot.is_none() && nic.tap.is_none());
        let device = &vm.vfio_user[0];
        assert_eq!((device.name.as_str(), device.slot), ("vfio-user0", Some(9)));
        assert_eq!(device.socket.to_str(), Some("/x/d.sock"));
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (text, expected) in [
            ("[[rdma]]\nsegment = \"\"", "rdma[0].segment: \"\" is not a segment"),
            ("[[rdma]]\nname = \"net0\"\nsegment = \"s\"", "rdma[0].name: \"net0\" is not a name"),
            ("[[rdma]]\nname = \"a b\"\nsegment = \"s\"", "rdma[0].name: \"a b\" is not a name"),
            ("[[rdma]]\nsegment = \"s\"\ntap = \"a/b\"", "rdma[0].tap: \"a/b\" is not an interface name"),
            (
                "[[rdma]]\nsegment = \"s\"\nmac = \"01:00:00:00:00:01\"",
                "rdma[0].mac: 01:00:00:00:00:01 is a group",
            ),
            ("[[rdma]]\nsegment = \"s\"\nslot = 32", "rdma[0].slot: 32 is not a PCI slot"),
            (
                "[[rdma]]\nsegment = \"s\"\nslot = 3\n[[vfio-user]]\nsocket = \"a\"\nslot = 3",
                "vfio-user[0].slot: slot 3 is taken by rdma[0] already",
            ),
            (
                "[[vfio-user]]\nsocket = \"a\"\n[[vfio-user]]\nsocket = \"a\"",
                "vfio-user[1].socket: \"/x/a\" is taken by vfio-user[0] already",
            ),
            ("[[vfio-user]]\nsocket = \"\"", "vfio-user[0].socket: the path is empty"),
        ] {
            let error = validated(text).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
