//! Parsers of single flags. They check the form. [`monitor::description::validate`] checks the values.

use std::path::PathBuf;

use monitor::description::{
    BootProtocol, IrqchipKind, NicPermission, NicPolicy, OnReboot, SandboxMode, written,
};

use super::options::Options;

fn one_of<T: Copy>(text: &str, choices: &[(&str, T)]) -> Result<T, String> {
    choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
        format!("allowed: {}", names.join(", "))
    })
}

/// Parses `--protocol`: `auto`, `pvh` or `linux64`.
pub fn protocol(text: &str) -> Result<BootProtocol, String> {
    let choices =
        [("auto", BootProtocol::Auto), ("pvh", BootProtocol::Pvh), ("linux64", BootProtocol::Linux64)];
    one_of(text, &choices)
}

/// Parses `--sandbox`: `on`, `log` or `off`.
pub fn sandbox(text: &str) -> Result<SandboxMode, String> {
    one_of(text, &[("on", SandboxMode::On), ("log", SandboxMode::Log), ("off", SandboxMode::Off)])
}

/// Parses `--interrupts`: `kernel` or `monitor`.
pub fn interrupts(text: &str) -> Result<IrqchipKind, String> {
    one_of(text, &[("kernel", IrqchipKind::Kernel), ("monitor", IrqchipKind::Monitor)])
}

/// Parses `--on-reboot`: `restart` or `stop`.
pub fn on_reboot(text: &str) -> Result<OnReboot, String> {
    one_of(text, &[("restart", OnReboot::Restart), ("stop", OnReboot::Stop)])
}

/// Parses `--rng`: `on` or `off`.
pub fn on_off(text: &str) -> Result<bool, String> {
    one_of(text, &[("on", true), ("off", false)])
}

/// `--cpus 4` or `--cpus sockets=2,cores=2`.
pub fn cpus(text: &str) -> Result<written::Cpus, String> {
    const KNOWN: &[&str] = &["sockets", "cores"];
    if let Ok(count) = text.parse() {
        return Ok(written::Cpus::Count(count));
    }
    if !text.contains('=') {
        return Err("write a number of vCPUs, or sockets=S,cores=C".to_owned());
    }
    let mut options = Options::parse(text)?;
    let sockets = options.parsed("sockets")?.unwrap_or(1);
    let cores = options.parsed("cores")?.unwrap_or(1);
    options.finish(KNOWN)?;
    Ok(written::Cpus::Topology(written::Topology { sockets, cores }))
}

/// `--disk root.raw,readonly,serial=S`.
pub fn disk(text: &str) -> Result<written::Disk, String> {
    const KNOWN: &[&str] =
        &["path", "readonly", "serial", "queues", "direct", "logical_block_size", "format"];
    let mut options = Options::parse(text)?;
    let path = match options.first(KNOWN) {
        Some(path) => path,
        None => options.value("path")?.ok_or("the image is missing; write it first, or as path=FILE")?,
    };
    let format = match options.value("format")? {
        None => written::DiskFormat::Auto,
        Some(format) => one_of(
            format,
            &[
                ("auto", written::DiskFormat::Auto),
                ("raw", written::DiskFormat::Raw),
                ("qcow2", written::DiskFormat::Qcow2),
            ],
        )
        .map_err(|error| format!("format={} is not known; {error}", format.escape_debug()))?,
    };
    let disk = written::Disk {
        path: PathBuf::from(path),
        readonly: options.switch("readonly")?,
        serial: options.value("serial")?.map(str::to_owned),
        queues: options.parsed("queues")?,
        direct: options.switch("direct")?,
        logical_block_size: options.parsed("logical_block_size")?,
        format,
    };
    options.finish(KNOWN)?;
    Ok(disk)
}

/// `--net tap:tap0,mac=...`.
pub fn net(text: &str) -> Result<written::Net, String> {
    const KNOWN: &[&str] = &["mac", "queues", "mtu"];
    let mut options = Options::parse(text)?;
    let backend = options.first(KNOWN).ok_or("begin with tap:NAME, fd:NUMBER, user or neighbours")?;
    let mut net = written::Net::default();
    match backend.split_once(':') {
        Some(("tap", name)) => net.tap = Some(name.to_owned()),
        Some(("fd", number)) => {
            net.fd =
                Some(number.parse().map_err(|_| {
                    format!("fd:{} has no number of a file descriptor", number.escape_debug())
                })?);
        }
        None if backend == "user" => net.user = true,
        None if backend == "neighbours" => net.neighbours = true,
        _ => {
            return Err(format!(
                "\"{}\" is not known; begin with tap:NAME, fd:NUMBER, user or neighbours",
                backend.escape_debug()
            ));
        }
    }
    net.mac = options.parsed("mac")?;
    net.queues = options.parsed("queues")?;
    net.mtu = options.parsed("mtu")?;
    options.finish(KNOWN)?;
    Ok(net)
}

/// `--vsock cid=3,socket=PATH`.
pub fn vsock(text: &str) -> Result<written::Vsock, String> {
    const KNOWN: &[&str] = &["cid", "socket"];
    let mut options = Options::parse(text)?;
    let vsock = written::Vsock {
        cid: options.parsed("cid")?.ok_or("cid is missing; write cid=N,socket=PATH")?,
        socket: options.value("socket")?.ok_or("socket is missing; write cid=N,socket=PATH")?.into(),
    };
    options.finish(KNOWN)?;
    Ok(vsock)
}

/// `--nic vpio:0000:03:00.0,policy=stop`, `--nic virtual:rtl8139,tap=tap0`.
pub fn nic(text: &str) -> Result<written::Nic, String> {
    const KNOWN: &[&str] = &["tap", "mac", "policy", "allow", "violations"];
    const BEGIN: &str = "begin with vpio:ADDRESS, passthrough:ADDRESS or virtual:CARD";
    let mut options = Options::parse(text)?;
    let mode = options.first(KNOWN).ok_or(BEGIN)?;
    let mut nic = written::Nic::default();
    match mode.split_once(':') {
        Some(("vpio", device)) => nic.vpio = Some(device.to_owned()),
        Some(("passthrough", device)) => nic.passthrough = Some(device.to_owned()),
        Some(("virtual", card)) => nic.emulate = Some(card.to_owned()),
        _ => return Err(format!("\"{}\" is not known; {BEGIN}", mode.escape_debug())),
    }
    nic.tap = options.value("tap")?.map(str::to_owned);
    nic.mac = options.parsed("mac")?;
    nic.violations = options.value("violations")?.map(Into::into);
    let named =
        |key: &str, value: &str, error| format!("{key}={} is not known; {error}", value.escape_debug());
    nic.policy = match options.value("policy")? {
        None => None,
        Some(policy) => {
            let choices = [
                ("ignore", NicPolicy::Ignore),
                ("device-error", NicPolicy::DeviceError),
                ("machine-check", NicPolicy::MachineCheck),
                ("stop", NicPolicy::Stop),
            ];
            Some(one_of(policy, &choices).map_err(|error| named("policy", policy, error))?)
        }
    };
    nic.allow = match options.value("allow")? {
        None => None,
        Some(list) => {
            let choices = [
                ("promiscuous", NicPermission::Promiscuous),
                ("loopback", NicPermission::Loopback),
                ("any-address", NicPermission::AnyAddress),
            ];
            let one = |word| one_of(word, &choices).map_err(|error| named("allow", word, error));
            Some(list.split('+').map(one).collect::<Result<Vec<_>, _>>()?)
        }
    };
    options.finish(KNOWN)?;
    Ok(nic)
}

/// `--rdma name=rdma0,segment=s0,...`.
pub fn rdma(text: &str) -> Result<written::Rdma, String> {
    const KNOWN: &[&str] = &["name", "segment", "mac", "tap", "host", "slot"];
    let mut options = Options::parse(text)?;
    let rdma = written::Rdma {
        name: options.value("name")?.map(str::to_owned),
        segment: options.value("segment")?.ok_or("segment is missing; write segment=NAME")?.to_owned(),
        mac: options.parsed("mac")?,
        tap: options.value("tap")?.map(str::to_owned),
        host: options.value("host")?.map(PathBuf::from),
        slot: options.parsed("slot")?,
    };
    options.finish(KNOWN)?;
    Ok(rdma)
}

/// `--vfio-user SOCKET,name=N`.
pub fn vfio_user(text: &str) -> Result<written::VfioUser, String> {
    const KNOWN: &[&str] = &["socket", "name", "slot"];
    let mut options = Options::parse(text)?;
    let socket = match options.first(KNOWN) {
        Some(socket) => socket,
        None => options.value("socket")?.ok_or("the socket is missing; write it first, or as socket=PATH")?,
    };
    let device = written::VfioUser {
        socket: PathBuf::from(socket),
        name: options.value("name")?.map(str::to_owned),
        slot: options.parsed("slot")?,
    };
    options.finish(KNOWN)?;
    Ok(device)
}

/// `causeway card --guest NAME,mac=M,uid=N`.
pub fn card_guest(text: &str) -> Result<host::card::Guest, String> {
    const KNOWN: &[&str] = &["mac", "uid"];
    let mut options = Options::parse(text)?;
    let name = options.first(KNOWN).ok_or("the name is missing; write it first: NAME,mac=M")?;
    let mac: Option<monitor::description::MacAddress> = options.parsed("mac")?;
    let guest = host::card::Guest {
        name: name.to_owned(),
        address: mac.map(|mac| mac.octets()),
        uid: options.parsed("uid")?,
    };
    options.finish(KNOWN)?;
    if guest.name.is_empty() {
        Err("the name is missing; write it first: NAME,mac=M".to_owned())
    } else {
        Ok(guest)
    }
}

/// `causeway card --policy stop`.
pub fn card_policy(text: &str) -> Result<host::card::FailurePolicy, String> {
    use host::card::FailurePolicy;
    one_of(
        text,
        &[
            ("ignore", FailurePolicy::Ignore),
            ("device-error", FailurePolicy::DeviceError),
            ("stop", FailurePolicy::Stop),
        ],
    )
}

#[cfg(test)]
mod tests {
    use monitor::description::MacAddress;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_manuals_examples_are_understood() {
        let root = disk("root.raw,readonly,serial=S").unwrap();
        assert_eq!(
            (root.path.to_str(), root.readonly, root.serial.as_deref()),
            (Some("root.raw"), true, Some("S"))
        );
        assert_eq!(disk("a,logical_block_size=4096").unwrap().logical_block_size, Some(4096));
        assert_eq!(disk("path=a=b,queues=4").unwrap().path.to_str(), Some("a=b"));
        assert_eq!(disk("readonly,path=x").unwrap().path.to_str(), Some("x"));
        let tap = net("tap:tap0,mac=02:00:00:00:00:01,queues=2,mtu=9000").unwrap();
        assert_eq!((tap.tap.as_deref(), tap.queues, tap.mtu), (Some("tap0"), Some(2), Some(9000)));
        assert_eq!(tap.mac, Some(MacAddress([2, 0, 0, 0, 0, 1])));
        assert!(net("user").unwrap().user);
        assert!(net("neighbours").unwrap().neighbours);
        assert_eq!(net("fd:7").unwrap().fd, Some(7));
        assert_eq!(vsock("cid=3,socket=/x").unwrap().cid, 3);
        let served = rdma("name=rdma0,segment=s0,mac=02:00:00:00:00:01,tap=tap1,host=/h,slot=5").unwrap();
        assert_eq!(
            (served.name.as_deref(), served.segment.as_str(), served.slot),
            (Some("rdma0"), "s0", Some(5))
        );
        assert_eq!((served.tap.as_deref(), served.host.unwrap().to_str()), (Some("tap1"), Some("/h")));
        let card =
            nic("vpio:0000:03:00.0,policy=stop,allow=promiscuous+loopback,violations=/x/refused").unwrap();
        assert_eq!(card.violations.unwrap().to_str(), Some("/x/refused"));
        assert_eq!((card.vpio.as_deref(), card.policy), (Some("0000:03:00.0"), Some(NicPolicy::Stop)));
        assert_eq!(card.allow, Some(vec![NicPermission::Promiscuous, NicPermission::Loopback]));
        assert_eq!(nic("passthrough:0000:04:00.0").unwrap().passthrough.as_deref(), Some("0000:04:00.0"));
        let card = nic("virtual:rtl8139,tap=tap0").unwrap();
        assert_eq!((card.emulate.as_deref(), card.tap.as_deref()), (Some("rtl8139"), Some("tap0")));
        let device = vfio_user("/run/x.sock,name=x").unwrap();
        assert_eq!((device.socket.to_str(), device.name.as_deref()), (Some("/run/x.sock"), Some("x")));
        assert_eq!(cpus("4"), Ok(written::Cpus::Count(4)));
        let topology = written::Topology { sockets: 2, cores: 3 };
        assert_eq!(cpus("sockets=2,cores=3"), Ok(written::Cpus::Topology(topology)));
    }

    #[test]
    fn wrong_options_are_named_with_what_is_known() {
        for (error, expected) in [
            (disk("").unwrap_err(), "nothing between"),
            (disk("a,b").unwrap_err(), "\"b\" is not an option; known: path, readonly"),
            (disk("readonly").unwrap_err(), "the image is missing"),
            (disk("a,serial").unwrap_err(), "serial needs a value"),
            (disk("a,queues=x").unwrap_err(), "queues=x: invalid digit"),
            (disk("a,format=vmdk").unwrap_err(), "format=vmdk is not known; allowed: auto, raw, qcow2"),
            (disk("a,direct,direct").unwrap_err(), "\"direct\" is given twice"),
            (disk("a,readonly=maybe").unwrap_err(), "readonly=maybe is not known"),
            (net("tap").unwrap_err(), "\"tap\" is not known; begin with"),
            (net("fd:x").unwrap_err(), "fd:x has no number"),
            (net("mac=1").unwrap_err(), "begin with tap:NAME"),
            (net("user,mac=zz").unwrap_err(), "mac=zz: \"zz\" is not an Ethernet address"),
            (net("user,speed=1").unwrap_err(), "\"speed\" is not an option; known: mac, queues, mtu"),
            (vsock("socket=x").unwrap_err(), "cid is missing"),
            (vsock("cid=3").unwrap_err(), "socket is missing"),
            (rdma("name=x").unwrap_err(), "segment is missing"),
            (rdma("segment=s,queues=2").unwrap_err(), "\"queues\" is not an option; known: name, segment"),
            (nic("rtl8139").unwrap_err(), "\"rtl8139\" is not known; begin with vpio:ADDRESS"),
            (nic("vpio:0,policy=crash").unwrap_err(), "policy=crash is not known; allowed: ignore"),
            (nic("vpio:0,allow=all").unwrap_err(), "allow=all is not known; allowed: promiscuous"),
            (vfio_user("name=x").unwrap_err(), "the socket is missing"),
            (vfio_user("/x,slot=a").unwrap_err(), "slot=a: invalid digit"),
            (cpus("many").unwrap_err(), "write a number of vCPUs"),
            (cpus("threads=2").unwrap_err(), "\"threads\" is not an option; known: sockets, cores"),
            (on_off("yes").unwrap_err(), "allowed: on, off"),
        ] {
            assert!(error.contains(expected), "{error:?} has no {expected:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

        /// Any text yields a value or one line.
        #[test]
        fn no_text_panics(text in "((tap|fd|user|path|readonly|serial|queues|mac|mtu|cid|socket|cores)?[:=,]?\\PC{0,6}){0,6}") {
            for error in [disk(&text).err(), net(&text).err(), vsock(&text).err(), cpus(&text).err(), rdma(&text).err(), vfio_user(&text).err(), nic(&text).err()].into_iter().flatten() {
                prop_assert!(!error.is_empty() && !error.contains('\n'), "{:?}", error);
            }
        }
    }
}
