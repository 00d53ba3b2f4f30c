//! Validation of `[neighbour]`.

use super::served::HOST_SOCKET;
use super::validate::{quoted, socket_path};
use super::vm::{Neighbour, NeighbourPeer, Net, NetBackend};
use super::{Invalid, Key, written};

/// Limit for the length of a group's or a VM's name.
const MAX_NAME_BYTES: usize = 64;
/// Limit for the VMs that one VM may permit.
const MAX_PEERS: usize = 64;

/// Checks the table, and that the VM has no device that excludes a neighbourhood.
pub(super) fn validate(vm: &written::Vm, vm_name: &str) -> Result<Option<Neighbour>, Invalid> {
    let Some(table) = &vm.neighbour else { return Ok(None) };
    let key = Key::root("neighbour");
    if vm.payload.is_some() {
        return Err(Invalid::new(key, "a payload guest has no devices, so it has no neighbours either"));
    }
    let served = vm.rdma.iter().flatten().count() + vm.vfio_user.iter().flatten().count();
    check_name(&key.below("group"), &table.group)?;
    let host = table.host.clone().unwrap_or_else(|| HOST_SOCKET.into());
    socket_path(&key.below("host"), &host)?;
    if table.permit.len() > MAX_PEERS {
        let problem = format!("{} are too many; at most {MAX_PEERS} fit", table.permit.len());
        return Err(Invalid::new(key.below("permit"), problem));
    }
    let mut permit: Vec<NeighbourPeer> = Vec::new();
    for (index, text) in table.permit.iter().enumerate() {
        let key = key.below("permit").item(index);
        let peer = peer(&key, text)?;
        // The VM's memory can't be sealed against writes; see `machine::memory::Readers`.
        if served > 0 && peer.uid.is_none() {
            let problem = format!(
                "{} is a VM of the same user, from which memory that devices of [[rdma]] and [[vfio-user]] write can't be \
                 protected; run that VM as another user, and write {}@NUMBER with that user's number",
                quoted(text),
                peer.vm
            );
            return Err(Invalid::new(key, problem));
        }
        if peer.vm == vm_name && peer.uid.is_none() {
            return Err(Invalid::new(key, format!("{} is this VM itself", quoted(text))));
        }
        if permit.contains(&peer) {
            return Err(Invalid::new(key, format!("{} is there already", quoted(text))));
        }
        permit.push(peer);
    }
    Ok(Some(Neighbour { group: table.group.clone(), permit, host }))
}

/// Checks that a network device with neighbours has a neighbourhood, and is the only such device.
pub(super) fn check_network(net: &[Net], neighbour: Option<&Neighbour>) -> Result<(), Invalid> {
    let mut to_neighbours = net
        .iter()
        .enumerate()
        .filter(|(_, net)| net.backend == NetBackend::Neighbours)
        .map(|(index, _)| index);
    let Some(first) = to_neighbours.next() else { return Ok(()) };
    let key = |index| Key::root("net").item(index).below("neighbours");
    if neighbour.is_none() {
        let problem = "a device to neighbours needs to know which; add [neighbour] with group = \"NAME\" and permit = [\"VM\"]";
        return Err(Invalid::new(key(first), problem));
    }
    match to_neighbours.next() {
        Some(second) => {
            let problem =
                format!("net[{first}] is there already, and reaches all neighbours; leave this one out");
            Err(Invalid::new(key(second), problem))
        }
        None => Ok(()),
    }
}

/// `VM`, or `VM@UID`.
fn peer(key: &Key, text: &str) -> Result<NeighbourPeer, Invalid> {
    let (vm, uid) = match text.split_once('@') {
        None => (text, None),
        Some((vm, uid)) => {
            let number = uid.parse().ok().filter(|_| uid.bytes().all(|byte| byte.is_ascii_digit()));
            let number = number.ok_or_else(|| {
                let problem =
                    format!("{} names no user; write VM@NUMBER with the user's number", quoted(text));
                Invalid::new(key.clone(), problem)
            })?;
            (vm, Some(number))
        }
    };
    check_name(key, vm)?;
    Ok(NeighbourPeer { vm: vm.to_owned(), uid })
}

fn check_name(key: &Key, name: &str) -> Result<(), Invalid> {
    let fits = (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if fits {
        return Ok(());
    }
    let rule = "a name has 1 to 64 of a-z, A-Z, 0-9, '.', '_', '-', and begins with a letter or digit";
    Err(Invalid::new(key.clone(), format!("{} is not a name: {rule}", quoted(name))))
}

#[cfg(test)]
mod tests {
    use crate::description::{self, NeighbourPeer, NetBackend};

    fn validated(text: &str) -> Result<description::VmDescription, String> {
        let text = format!("kernel = \"k\"\n{text}");
        let (vm, _) =
            description::parse(&text, "/x/raid.toml".as_ref()).map_err(|error| error.to_string())?;
        description::validate(&vm).map_err(|invalid| format!("{}: {}", invalid.key, invalid.problem))
    }

    #[test]
    fn nobody_is_permitted_unless_it_is_written() {
        let vm = validated("[neighbour]\ngroup = \"nas\"").unwrap().neighbour.unwrap();
        assert_eq!((vm.group.as_str(), vm.permit.len()), ("nas", 0));
        assert_eq!(vm.host.to_str(), Some("/run/causeway/host.sock"));
        let text = "[neighbour]\ngroup = \"nas\"\npermit = [\"files\", \"disks@1001\"]\nhost = \"h.sock\"";
        let vm = validated(text).unwrap().neighbour.unwrap();
        assert_eq!(
            vm.permit,
            [
                NeighbourPeer { vm: "files".to_owned(), uid: None },
                NeighbourPeer { vm: "disks".to_owned(), uid: Some(1001) },
            ]
        );
        assert_eq!(vm.host.to_str(), Some("/x/h.sock"));
        assert!(validated("").unwrap().neighbour.is_none());
    }

    /// One virtio-net device may be the neighbourhood's member.
    #[test]
    fn a_network_device_may_have_the_neighbourhood() {
        let group = "[neighbour]\ngroup = \"g\"\npermit = [\"b\"]\n";
        let one = "[[net]]\nneighbours = true\n";
        let vm = validated(&format!("{group}{one}")).unwrap();
        assert_eq!(vm.net[0].backend, NetBackend::Neighbours);
        let error = validated(one).unwrap_err();
        assert!(
            error.starts_with("net[0].neighbours: a device to neighbours needs to know which"),
            "{error}"
        );
        let error = validated(&format!("{group}{one}{one}")).unwrap_err();
        assert!(error.starts_with("net[1].neighbours: net[0] is there already"), "{error}");
        let error = validated(&format!("{group}{one}tap = \"t0\"")).unwrap_err();
        assert!(error.starts_with("net[0]: write exactly one of"), "{error}");
    }

    #[test]
    fn devices_of_other_processes_go_with_neighbours_of_other_users() {
        let text = "[neighbour]\ngroup = \"g\"\npermit = [\"b@1001\"]\n[[rdma]]\nsegment = \"s\"";
        let vm = validated(text).unwrap();
        assert_eq!((vm.rdma.len(), vm.neighbour.unwrap().permit.len()), (1, 1));
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (text, expected) in [
            ("[neighbour]\ngroup = \"\"", "neighbour.group: \"\" is not a name"),
            ("[neighbour]\ngroup = \"a/b\"", "neighbour.group: \"a/b\" is not a name"),
            (
                "[neighbour]\ngroup = \"g\"\npermit = [\"a@root\"]",
                "neighbour.permit[0]: \"a@root\" names no user",
            ),
            (
                "[neighbour]\ngroup = \"g\"\npermit = [\"a@+1\"]",
                "neighbour.permit[0]: \"a@+1\" names no user",
            ),
            (
                "[neighbour]\ngroup = \"g\"\npermit = [\"b\", \"b\"]",
                "neighbour.permit[1]: \"b\" is there already",
            ),
            (
                "[neighbour]\ngroup = \"g\"\npermit = [\"raid\"]",
                "neighbour.permit[0]: \"raid\" is this VM itself",
            ),
            (
                "[neighbour]\ngroup = \"g\"\npermit = [\"a@7\", \"b\"]\n[[rdma]]\nsegment = \"s\"",
                "neighbour.permit[1]: \"b\" is a VM of the same user",
            ),
            (
                "[neighbour]\ngroup = \"g\"\npermit = [\"b\"]\n[[vfio-user]]\nsocket = \"s\"",
                "neighbour.permit[0]: \"b\" is a VM of the same user",
            ),
        ] {
            let error = validated(text).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
