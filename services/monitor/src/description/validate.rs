//! Validates a written description. Pure: opens no file and makes no system call.

mod resources;

use std::path::Path;

use machine::interrupt::IrqchipKind;

use self::resources::{cpus, hugepages, memory, pinning};
use super::vm::{
    Console, Disk, DiskFormat, Guest, LinuxBoot, Net, NetBackend, Payload, VmDescription, Vsock,
};
use super::{BootProtocol, Invalid, Key, MacAddress, OnReboot, SandboxMode, written};

/// Limit for the command line's length: Linux truncates longer ones (`COMMAND_LINE_SIZE` of arch/x86 without the NUL).
const MAX_CMDLINE_BYTES: usize = 2047;
const MAX_NAME_BYTES: usize = 64;
/// virtio 1.2, 5.2.6.1: VIRTIO_BLK_ID_BYTES.
const MAX_SERIAL_BYTES: usize = 20;
/// PCI slots without the host bridge's; every device needs one.
const PCI_SLOTS: usize = 31;
/// Limit for the devices of one type.
pub(super) const MAX_DEVICES_OF_ONE_KIND: usize = 26;
const MAX_QUEUES: u64 = 32;
const DEFAULT_CONSOLE_LIMIT_BYTES: u64 = 64 << 20;
/// A smaller file holds less than a kernel's boot messages; a larger one is unlimited in practice.
const CONSOLE_LIMIT_RANGE_BYTES: std::ops::RangeInclusive<u64> = 64 << 10..=1 << 40;
/// IFNAMSIZ without the NUL.
const MAX_INTERFACE_NAME_BYTES: usize = 15;
/// sun_path without the NUL.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Checks a description, and adds the defaults. The error names the key and what is allowed.
pub fn validate(vm: &written::Vm) -> Result<VmDescription, Invalid> {
    let name = name(vm.name.as_deref())?;
    let hugepages = hugepages(vm.hugepages)?;
    let cpus = cpus(vm)?;
    let (memory, numa) = memory(vm, cpus, hugepages)?;
    let console = console(vm.console.as_deref())?;
    let console_limit_bytes = console_limit(vm, &console)?;
    let net = vm.net.iter().flatten().enumerate();
    let net = net.map(|(index, net)| network(&name, index, net)).collect::<Result<Vec<_>, _>>()?;
    unique(&net, "mac", "net", |net| Some(net.mac.to_string()))?;
    unique(&net, "tap", "net", |net| match &net.backend {
        NetBackend::Tap(name) => Some(name.clone()),
        _ => None,
    })?;
    unique(&net, "fd", "net", |net| match &net.backend {
        NetBackend::Fd(fd) => Some(fd.to_string()),
        _ => None,
    })?;
    at_most("net", net.len(), MAX_DEVICES_OF_ONE_KIND)?;
    let disks = vm.disks.iter().flatten().enumerate();
    let disks = disks.map(|(index, written)| disk(index, written)).collect::<Result<Vec<_>, _>>()?;
    at_most("disks", disks.len(), MAX_DEVICES_OF_ONE_KIND)?;
    writable_once(&disks)?;
    let nics = super::nic::validate(vm, &name)?;
    let (rdma, vfio_user) = super::served::validate(vm, &name)?;
    let neighbour = super::neighbour::validate(vm, &name)?;
    super::neighbour::check_network(&net, neighbour.as_ref())?;
    // The neighbourhood has either a device of its own or one of `net`.
    let own_neighbour = neighbour.is_some() && !net.iter().any(|net| net.backend == NetBackend::Neighbours);
    // A payload has no drivers.
    let rng = vm.rng.unwrap_or(vm.payload.is_none());
    let single = [rng, vm.vsock.is_some(), own_neighbour].into_iter().filter(|present| *present).count();
    fit_slots(&[disks.len(), net.len(), nics.len(), rdma.len(), vfio_user.len(), single])?;
    let api_socket = vm.api_socket.clone();
    if let Some(path) = &api_socket {
        socket_path(&Key::root("api_socket"), path)?;
    }
    Ok(VmDescription {
        pinning: pinning(vm.pin.as_deref(), cpus)?,
        guest: guest(vm)?,
        vsock: vm.vsock.as_ref().map(vsock).transpose()?,
        rng,
        interrupts: interrupts(vm)?,
        sandbox: vm.sandbox.unwrap_or(SandboxMode::On),
        on_reboot: vm.on_reboot.unwrap_or(OnReboot::Restart),
        name,
        cpus,
        memory,
        numa,
        disks,
        net,
        nics,
        rdma,
        vfio_user,
        neighbour,
        console,
        console_limit_bytes,
        api_socket,
    })
}

fn interrupts(vm: &written::Vm) -> Result<IrqchipKind, Invalid> {
    match vm.interrupts {
        Some(kind) if vm.payload.is_some() => {
            let problem =
                format!("a payload has no interrupt controllers, in the {kind} or elsewhere; leave it out");
            Err(Invalid::new(Key::root("interrupts"), problem))
        }
        kind => Ok(kind.unwrap_or_default()),
    }
}

pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", text.escape_debug())
}

pub(super) fn at_most(key: &str, count: usize, most: usize) -> Result<(), Invalid> {
    if count > most {
        return Err(Invalid::new(
            Key::root(key).item(most),
            format!("{count} are too many; at most {most} fit"),
        ));
    }
    Ok(())
}

/// Devices of all types share one bus.
fn fit_slots(counts: &[usize]) -> Result<(), Invalid> {
    let count: usize = counts.iter().sum();
    if count > PCI_SLOTS {
        let problem = format!(
            "disks, net, nic, rdma, vfio-user, vsock, rng and neighbour are {count} devices together, and {PCI_SLOTS} fit; leave some out"
        );
        return Err(Invalid::new(Key::root("disks"), problem));
    }
    Ok(())
}

fn name(name: Option<&str>) -> Result<String, Invalid> {
    let key = || Key::root("name");
    let Some(name) = name else {
        return Err(Invalid::new(key(), "the VM has no name; give it one"));
    };
    let fits = (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if !fits {
        let rule = "a name has 1 to 64 of a-z, A-Z, 0-9, '.', '_', '-', and begins with a letter or digit";
        return Err(Invalid::new(key(), format!("{} is not a name: {rule}", quoted(name))));
    }
    if name == "host" {
        let problem = "\"host\" stands for the host daemon in `causeway inspect`; choose another name";
        return Err(Invalid::new(key(), problem));
    }
    Ok(name.to_owned())
}

fn guest(vm: &written::Vm) -> Result<Guest, Invalid> {
    match (&vm.kernel, &vm.payload) {
        (None, None) => {
            Err(Invalid::new(Key::root("kernel"), "there is nothing to run; name a kernel or a payload"))
        }
        (Some(_), Some(_)) => {
            Err(Invalid::new(Key::root("payload"), "a VM runs a kernel or a payload; leave one of them out"))
        }
        (Some(kernel), None) => linux(vm, kernel).map(Guest::Linux),
        (None, Some(payload)) => {
            let present = [
                ("initrd", vm.initrd.is_some()),
                ("cmdline", vm.cmdline.is_some()),
                ("protocol", vm.protocol.is_some()),
                ("disks", vm.disks.is_some()),
                ("net", vm.net.is_some()),
                ("nic", vm.nic.is_some()),
                ("rdma", vm.rdma.is_some()),
                ("vfio-user", vm.vfio_user.is_some()),
                ("vsock", vm.vsock.is_some()),
                ("rng", vm.rng == Some(true)),
                ("numa", vm.numa.is_some()),
                ("api_socket", vm.api_socket.is_some()),
            ];
            if let Some((name, _)) = present.into_iter().find(|(_, present)| *present) {
                let problem = "it belongs to a kernel; a payload has vCPUs, memory, arguments and a console";
                return Err(Invalid::new(Key::root(name), problem));
            }
            let key = Key::root("payload");
            path(&key.below("program"), &payload.program)?;
            for (index, argument) in payload.arguments.iter().enumerate() {
                no_nul(&key.below("arguments").item(index), argument)?;
            }
            // Arguments are on the payload's stack.
            let total: usize = payload.arguments.iter().map(|argument| argument.len() + 1).sum();
            if total > 64 << 10 {
                let problem = format!("{total} bytes are too many; arguments take at most 65536");
                return Err(Invalid::new(key.below("arguments"), problem));
            }
            Ok(Guest::Payload(Payload {
                program: payload.program.clone(),
                arguments: payload.arguments.clone(),
            }))
        }
    }
}

fn linux(vm: &written::Vm, kernel: &Path) -> Result<LinuxBoot, Invalid> {
    path(&Key::root("kernel"), kernel)?;
    let initrd = vm.initrd.as_ref().map(|list| list.0.as_slice()).unwrap_or_default();
    for (index, archive) in initrd.iter().enumerate() {
        path(&Key::root("initrd").item(index), archive)?;
    }
    let cmdline = vm.cmdline.clone().unwrap_or_default();
    let key = Key::root("cmdline");
    no_nul(&key, &cmdline)?;
    if cmdline.len() > MAX_CMDLINE_BYTES {
        let problem =
            format!("{} bytes are too long; Linux takes at most {MAX_CMDLINE_BYTES}", cmdline.len());
        return Err(Invalid::new(key, problem));
    }
    if cmdline.contains('\n') {
        return Err(Invalid::new(key, "it has a line break; a command line is one line"));
    }
    Ok(LinuxBoot {
        kernel: kernel.to_owned(),
        initrd: initrd.to_vec(),
        cmdline,
        protocol: vm.protocol.unwrap_or(BootProtocol::Auto),
    })
}

fn no_nul(key: &Key, text: &str) -> Result<(), Invalid> {
    if text.contains('\0') {
        return Err(Invalid::new(
            key.clone(),
            format!("{} has a NUL character, which ends a text", quoted(text)),
        ));
    }
    Ok(())
}

pub(super) fn path(key: &Key, path: &Path) -> Result<(), Invalid> {
    if path.as_os_str().is_empty() {
        return Err(Invalid::new(key.clone(), "the path is empty; name a file"));
    }
    no_nul(key, &path.to_string_lossy())
}

pub(super) fn socket_path(key: &Key, socket: &Path) -> Result<(), Invalid> {
    path(key, socket)?;
    let len = socket.as_os_str().len();
    if len > MAX_SOCKET_PATH_BYTES {
        let problem = format!("the path has {len} bytes; Unix sockets take at most {MAX_SOCKET_PATH_BYTES}");
        return Err(Invalid::new(key.clone(), problem));
    }
    Ok(())
}

fn disk(index: usize, disk: &written::Disk) -> Result<Disk, Invalid> {
    let key = Key::root("disks").item(index);
    path(&key.below("path"), &disk.path)?;
    if let Some(serial) = &disk.serial {
        let key = key.below("serial");
        if serial.len() > MAX_SERIAL_BYTES {
            let problem = format!("{} has {} bytes; at most 20 fit", quoted(serial), serial.len());
            return Err(Invalid::new(key, problem));
        }
        if serial.is_empty() || !serial.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
            return Err(Invalid::new(key, format!("{} is not printable ASCII", quoted(serial))));
        }
    }
    let format = match disk.format {
        written::DiskFormat::Raw => DiskFormat::Raw,
        written::DiskFormat::Qcow2 => DiskFormat::Qcow2,
        written::DiskFormat::Auto if disk.path.extension().is_some_and(|name| name == "qcow2") => {
            DiskFormat::Qcow2
        }
        written::DiskFormat::Auto => DiskFormat::Auto,
    };
    if format == DiskFormat::Qcow2 && !disk.readonly {
        let problem = "a qcow2 image can only be read; make the disk readonly, or convert the image to raw";
        return Err(Invalid::new(key.below("format"), problem));
    }
    Ok(Disk {
        path: disk.path.clone(),
        readonly: disk.readonly,
        serial: disk.serial.clone(),
        queues: queues(&key.below("queues"), disk.queues)?,
        direct: disk.direct,
        logical_block_size: disk.logical_block_size.map(|bytes| block_size(&key, bytes)).transpose()?,
        format,
    })
}

fn block_size(disk: &Key, bytes: u64) -> Result<u32, Invalid> {
    u32::try_from(bytes).ok().filter(|bytes| matches!(bytes, 512 | 4096)).ok_or_else(|| {
        let problem = format!("blocks of {bytes} bytes are not possible; allowed are 512 and 4096");
        Invalid::new(disk.below("logical_block_size"), problem)
    })
}

/// Refuses two devices with one image of which one may write: they would destroy it.
fn writable_once(disks: &[Disk]) -> Result<(), Invalid> {
    for (index, disk) in disks.iter().enumerate() {
        let other = disks[..index].iter().position(|other| other.path == disk.path);
        if let Some(other) = other.filter(|other| !(disk.readonly && disks[*other].readonly)) {
            let problem =
                format!("disk {other} has the same file, and one of them may write; make both readonly");
            return Err(Invalid::new(Key::root("disks").item(index).below("path"), problem));
        }
    }
    Ok(())
}

fn queues(key: &Key, queues: Option<u64>) -> Result<u16, Invalid> {
    let queues = queues.unwrap_or(1);
    u16::try_from(queues).ok().filter(|_| (1..=MAX_QUEUES).contains(&queues)).ok_or_else(|| {
        Invalid::new(key.clone(), format!("{queues} queues are not possible; allowed are 1 to 32"))
    })
}

fn network(vm: &str, index: usize, net: &written::Net) -> Result<Net, Invalid> {
    let key = Key::root("net").item(index);
    let backend = match (&net.tap, net.fd, net.user, net.neighbours) {
        (Some(name), None, false, false) => NetBackend::Tap(interface(&key.below("tap"), name)?),
        (None, Some(fd), false, false) => {
            let fits = i32::try_from(fd).ok().filter(|fd| *fd >= 3);
            NetBackend::Fd(fits.ok_or_else(|| {
                let problem = format!("{fd} is not an inherited file descriptor; they are 3 or more");
                Invalid::new(key.below("fd"), problem)
            })?)
        }
        (None, None, true, false) => NetBackend::User,
        (None, None, false, true) => NetBackend::Neighbours,
        _ => {
            return Err(Invalid::new(
                key,
                "write exactly one of tap = \"NAME\", fd = NUMBER, user = true and neighbours = true",
            ));
        }
    };
    let mac = net.mac.unwrap_or_else(|| MacAddress::derived(vm, index));
    if !mac.is_unicast() {
        let problem =
            format!("{mac} is a group address or zero; a device's own address has an even first byte");
        return Err(Invalid::new(key.below("mac"), problem));
    }
    let mtu = net.mtu.map(|mtu| {
        u16::try_from(mtu).ok().filter(|mtu| *mtu >= 68).ok_or_else(|| {
            Invalid::new(key.below("mtu"), format!("{mtu} is not an MTU; allowed are 68 to 65535"))
        })
    });
    let queues = queues(&key.below("queues"), net.queues)?;
    if queues > 1 && !matches!(backend, NetBackend::Tap(_)) {
        let problem = format!("only tap = \"NAME\" can have {queues} queue pairs; leave queues out");
        return Err(Invalid::new(key.below("queues"), problem));
    }
    Ok(Net { backend, mac, queues, mtu: mtu.transpose()? })
}

pub(super) fn interface(key: &Key, name: &str) -> Result<String, Invalid> {
    let fits = (1..=MAX_INTERFACE_NAME_BYTES).contains(&name.len())
        && name != "."
        && name != ".."
        && name.bytes().all(|byte| byte.is_ascii_graphic() && !b"/:%".contains(&byte));
    if !fits {
        let problem = format!(
            "{} is not an interface name; it has 1 to 15 characters without space, /, : and %",
            quoted(name)
        );
        return Err(Invalid::new(key.clone(), problem));
    }
    Ok(name.to_owned())
}

fn unique<T>(
    items: &[T],
    key: &str,
    list: &str,
    value: impl Fn(&T) -> Option<String>,
) -> Result<(), Invalid> {
    for (index, item) in items.iter().enumerate() {
        let Some(wanted) = value(item) else { continue };
        if let Some(other) = items[..index].iter().position(|other| value(other).as_deref() == Some(&wanted))
        {
            let problem = format!("{wanted} is taken by {list}[{other}] already");
            return Err(Invalid::new(Key::root(list).item(index).below(key), problem));
        }
    }
    Ok(())
}

fn vsock(vsock: &written::Vsock) -> Result<Vsock, Invalid> {
    let key = Key::root("vsock");
    socket_path(&key.below("socket"), &vsock.socket)?;
    let cid = u32::try_from(vsock.cid).ok().filter(|cid| (3..u32::MAX).contains(cid)).ok_or_else(|| {
        let problem = format!("{} is not a guest's context id; allowed are 3 to 4294967294", vsock.cid);
        Invalid::new(key.below("cid"), problem)
    })?;
    Ok(Vsock { cid, socket: vsock.socket.clone() })
}

fn console(console: Option<&str>) -> Result<Console, Invalid> {
    let key = Key::root("console");
    let Some(console) = console else { return Ok(Console::Stdio) };
    match (console, console.split_once(':')) {
        ("stdio", _) => Ok(Console::Stdio),
        ("pty", _) => Ok(Console::Pty),
        ("null", _) => Ok(Console::Null),
        (_, Some(("file", file))) => {
            path(&key, Path::new(file))?;
            Ok(Console::File(file.into()))
        }
        (_, Some(("socket", socket))) => {
            socket_path(&key, Path::new(socket))?;
            Ok(Console::Socket(socket.into()))
        }
        _ => Err(Invalid::new(
            key,
            format!(
                "{} is not known; allowed are stdio, pty, file:PATH, socket:PATH and null",
                quoted(console)
            ),
        )),
    }
}

fn console_limit(vm: &written::Vm, console: &Console) -> Result<u64, Invalid> {
    let Some(limit) = vm.console_limit else { return Ok(DEFAULT_CONSOLE_LIMIT_BYTES) };
    let key = Key::root("console_limit");
    if !matches!((console, &vm.payload), (Console::File(_), None)) {
        let problem = "only a guest with a kernel and console = \"file:PATH\" has a limit; leave it out";
        return Err(Invalid::new(key, problem));
    }
    if !CONSOLE_LIMIT_RANGE_BYTES.contains(&limit.0) {
        return Err(Invalid::new(key, format!("{limit} is not possible; allowed are 64K to 1T")));
    }
    Ok(limit.0)
}
