//! Valid descriptions, and a sentence for every invalid one.

use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;

/// Uses every key.
const FULL: &str = r#"
name = "web-1"
cpus = { sockets = 2, cores = 2 }
pin = ["0", [1, 2], 3, "4-7"]
hugepages = "2M"
kernel = "vmlinuz"
initrd = ["base.cpio", "/abs/extra.cpio"]
cmdline = "console=ttyS0 root=/dev/vda"
protocol = "pvh"
rng = false
console = "file:out/console.log"
console_limit = "1M"
api_socket = "/run/causeway/web-1.sock"
sandbox = "log"
on_reboot = "stop"

[[numa]]
cpus = "0-1"
memory = "512M"
distances = [10, 21]
host_node = 0

[[numa]]
cpus = [2, 3]
memory = "1.5G"
distances = [21, 10]

[[disks]]
path = "root.raw"
serial = "root"
queues = 4
direct = true
logical_block_size = 4096

[[disks]]
path = "data.qcow2"
readonly = true

[[net]]
tap = "tap0"
mac = "02:00:00:00:00:01"
queues = 2
mtu = 9000

[[net]]
user = true

[[net]]
fd = 7

[vsock]
cid = 3
socket = "vsock.sock"
"#;

fn valid(text: &str) -> VmDescription {
    let path = Path::new("dir/vm.toml");
    let (vm, positions) = parse(text, path).unwrap();
    validate(&vm).map_err(|invalid| positions.invalid(invalid)).unwrap()
}

/// From text to a description, with the error as the program prints it.
fn check(text: &str) -> Result<VmDescription, String> {
    let (vm, positions) = parse(text, Path::new("vm.toml")).map_err(|error| error.to_string())?;
    validate(&vm).map_err(|invalid| positions.invalid(invalid).to_string())
}

#[test]
fn every_key_arrives_and_relative_paths_start_at_the_file() {
    let vm = valid(FULL);
    assert_eq!((vm.name.as_str(), vm.cpus.count()), ("web-1", 4));
    assert_eq!(vm.pinning.iter().map(ToString::to_string).collect::<Vec<_>>(), ["0", "1-2", "3", "4-7"]);
    assert_eq!(vm.memory, Memory { size: 2 << 30, hugepages: HugePages::Size2M });
    assert_eq!(vm.numa[1].memory, 3 << 29);
    assert_eq!(vm.numa[0].distances, [10, 21]);
    let Guest::Linux(boot) = vm.guest else { panic!("a kernel") };
    assert_eq!(boot.kernel, PathBuf::from("dir/vmlinuz"));
    assert_eq!(boot.initrd, [PathBuf::from("dir/base.cpio"), PathBuf::from("/abs/extra.cpio")]);
    assert_eq!(boot.protocol, BootProtocol::Pvh);
    assert_eq!((vm.disks[0].format, vm.disks[0].queues), (DiskFormat::Auto, 4));
    assert_eq!((vm.disks[0].direct, vm.disks[0].logical_block_size), (true, Some(4096)));
    assert_eq!((vm.disks[1].format, vm.disks[1].readonly), (DiskFormat::Qcow2, true));
    assert_eq!(vm.net[0].backend, NetBackend::Tap("tap0".into()));
    assert_eq!(vm.net[1].backend, NetBackend::User);
    assert_eq!(vm.net[2].backend, NetBackend::Fd(7));
    assert_eq!(vm.console, Console::File("dir/out/console.log".into()));
    assert_eq!(vm.console_limit_bytes, 1 << 20);
    assert_eq!(vm.vsock, Some(Vsock { cid: 3, socket: "dir/vsock.sock".into() }));
    assert_eq!((vm.sandbox, vm.on_reboot, vm.rng), (SandboxMode::Log, OnReboot::Stop, false));
}

#[test]
fn the_manuals_example_is_valid_and_uses_every_key_of_the_file() {
    let manual = include_str!("../../../../docs/reference/vm-description.md");
    let example = manual.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    check(example).unwrap();
    for key in
        ["hugepages", "pin", "api_socket", "interrupts", "on_reboot", "direct", "host_node", "mtu", "cid"]
    {
        assert!(example.contains(&format!("{key} = ")), "{key}");
    }
    let neighbour = manual.split("```toml\n").nth(2).and_then(|rest| rest.split("```").next()).unwrap();
    let vm = check(&format!("kernel = \"k\"\n{neighbour}")).unwrap();
    assert_eq!(vm.neighbour.unwrap().permit.len(), 2);
}

#[test]
fn one_line_is_enough() {
    let vm = valid("kernel = \"/boot/vmlinuz\"");
    assert_eq!((vm.name.as_str(), vm.cpus.count(), vm.memory.size), ("vm", 1, 512 << 20));
    assert_eq!(vm.numa.len(), 1);
    assert_eq!(vm.numa[0].cpus.to_string(), "0");
    assert_eq!((vm.rng, vm.sandbox, vm.on_reboot), (true, SandboxMode::On, OnReboot::Restart));
    assert_eq!(vm.interrupts, IrqchipKind::Kernel);
    assert_eq!(valid("kernel = \"k\"\ninterrupts = \"monitor\"").interrupts, IrqchipKind::Monitor);
    assert_eq!(vm.console, Console::Stdio);
}

#[test]
fn a_payload_is_a_guest_too() {
    let vm = valid("[payload]\nprogram = \"hello.elf\"\narguments = [\"a\", \"\"]");
    let payload = Payload { program: "dir/hello.elf".into(), arguments: vec!["a".into(), String::new()] };
    assert_eq!(vm.guest, Guest::Payload(payload));
}

#[test]
fn the_content_of_an_image_never_decides_its_format() {
    let image = tempfile::NamedTempFile::with_suffix(".raw").unwrap();
    std::fs::write(image.path(), b"QFI\xfb\0\0\0\x03").unwrap();
    let vm = valid(&format!("kernel = \"k\"\n[[disks]]\npath = {:?}", image.path()));
    assert_eq!(vm.disks[0].format, DiskFormat::Auto);
}

/// Text, and the expected error.
const WRONG: &[(&str, &str)] = &[
    ("", "vm.toml, kernel: there is nothing to run"),
    ("kernel = \"k\"\nkernle = \"k\"", "vm.toml, line 2, kernle: Unknown key `kernle`; known: `name`"),
    ("kernel = \"k\"\ncpus = 0", "vm.toml, line 2, cpus: 0 vCPUs are not possible; allowed are 1 to 254"),
    ("kernel = \"k\"\ncpus = 255", "line 2, cpus: 255 vCPUs"),
    ("kernel = \"k\"\ncpus = -1", "line 2, cpus: Invalid value: integer `-1`, expected a number of vCPUs"),
    (
        "kernel = \"k\"\ncpus = \"two\"",
        "line 2, cpus: Invalid type: string \"two\", expected a number of vCPUs",
    ),
    ("kernel = \"k\"\ncpus = { sockets = 16, cores = 16 }", "line 2, cpus: 16 sockets of 16 cores"),
    ("kernel = \"k\"\ncpus = { sockets = 4294967296, cores = 4294967296 }", "line 2, cpus: "),
    ("kernel = \"k\"\ncpus = { threads = 2 }", "Unknown key `threads`; known: `sockets`"),
    (
        "kernel = \"k\"\nmemory = 1024",
        "line 2, memory: Invalid type: integer `1024`, expected a size with its unit",
    ),
    ("kernel = \"k\"\nmemory = \"1GB\"", "line 2, memory: \"1GB\" is not a size: units are"),
    ("kernel = \"k\"\nmemory = \"1M\"", "line 2, memory: 1M is not possible; allowed are 16M to 16T"),
    ("kernel = \"k\"\nmemory = \"15M\"", "line 2, memory: 15M is not possible; allowed are 16M to 16T"),
    (
        "kernel = \"k\"\ncpus = { sockets = 2, cores = 127 }",
        "line 2, cpus: 2 sockets of 127 cores are not possible: each socket takes 128 APIC ids",
    ),
    (
        "kernel = \"k\"\ncpus = { sockets = 84, cores = 3 }",
        "line 2, cpus: 84 sockets of 3 cores are not possible",
    ),
    ("kernel = \"k\"\nmemory = \"17T\"", "line 2, memory: 17T is not possible"),
    ("kernel = \"k\"\nmemory = \"30000001B\"", "line 2, memory: 30000001B is not a whole number of 4K pages"),
    (
        "kernel = \"k\"\nmemory = \"1537M\"\nhugepages = \"1G\"",
        "line 2, memory: 1537M is not a whole number of 1G",
    ),
    ("kernel = \"k\"\nhugepages = \"4M\"", "line 2, hugepages: x86-64 has no huge pages of 4M"),
    ("kernel = \"k\"\nname = \"../etc\"", "line 2, name: \"../etc\" is not a name"),
    ("kernel = \"k\"\nname = \"\"", "line 2, name: \"\" is not a name"),
    ("kernel = \"\"", "line 1, kernel: the path is empty"),
    ("kernel = \"a\\u0000b\"", "line 1, kernel: \"a\\0b\" has a NUL"),
    ("kernel = \"k\"\nprotocol = \"efi\"", "line 2, protocol: Unknown value `efi`; allowed: `auto`, `pvh`"),
    ("kernel = \"k\"\ncmdline = \"a\\nb\"", "line 2, cmdline: it has a line break"),
    ("kernel = \"k\"\n[payload]\nprogram = \"p\"", "line 2, payload: a VM runs a kernel or a payload"),
    ("cmdline = \"x\"\n[payload]\nprogram = \"p\"", "line 1, cmdline: it belongs to a kernel"),
    ("[payload]\narguments = []", "Missing key `program`"),
    ("kernel = \"k\"\npin = [\"0\"]\ncpus = 2", "line 2, pin: 1 entries don't fit 2 vCPUs"),
    ("kernel = \"k\"\npin = [[]]", "line 2, pin[0]: the list is empty"),
    ("kernel = \"k\"\npin = [\"9000\"]", "line 2, pin[0]: CPU number 9000 is too large"),
    (
        "kernel = \"k\"\n[[numa]]\ncpus = \"0\"\nmemory = \"1G\"\n[[numa]]\ncpus = \"0\"\nmemory = \"1G\"\n",
        "numa[1].cpus: vCPU 0 ",
    ),
    (
        "kernel = \"k\"\ncpus = 1\n[[numa]]\ncpus = \"0-1\"\nmemory = \"1G\"",
        "line 4, numa[0].cpus: vCPU 1 doesn't exist",
    ),
    (
        "kernel = \"k\"\ncpus = 2\n[[numa]]\ncpus = \"0\"\nmemory = \"1G\"",
        "line 3, numa: vCPU 1 is in no node",
    ),
    (
        "kernel = \"k\"\nmemory = \"2G\"\n[[numa]]\ncpus = \"0\"\nmemory = \"1G\"",
        "line 2, memory: 2G is not what the NUMA",
    ),
    (
        "kernel = \"k\"\n[[numa]]\ncpus = \"0\"\nmemory = \"1G\"\ndistances = [20]",
        "line 5, numa[0].distances[0]: 20",
    ),
    (
        "kernel = \"k\"\n[[numa]]\ncpus = \"0\"\nmemory = \"1G\"\ndistances = []",
        "line 5, numa[0].distances: 0 distances",
    ),
    ("kernel = \"k\"\n[[disks]]\nreadonly = true", "line 2, disks[0]: Missing key `path`"),
    (
        "kernel = \"k\"\n[[disks]]\npath = \"d\"\nserial = \"123456789012345678901\"",
        "line 4, disks[0].serial: ",
    ),
    (
        "kernel = \"k\"\n[[disks]]\npath = \"d\"\nserial = \"\\t\"",
        "line 4, disks[0].serial: \"\\t\" is not printable",
    ),
    ("kernel = \"k\"\n[[disks]]\npath = \"d\"\nqueues = 33", "line 4, disks[0].queues: 33 queues"),
    (
        "kernel = \"k\"\n[[disks]]\npath = \"d\"\nlogical_block_size = 1024",
        "line 4, disks[0].logical_block_size: blocks of 1024 bytes are not possible; allowed are 512 and 4096",
    ),
    (
        "kernel = \"k\"\n[[disks]]\npath = \"d\"\nformat = \"vmdk\"",
        "line 4, disks[0].format: Unknown value `vmdk`",
    ),
    (
        "kernel = \"k\"\n[[disks]]\npath = \"d\"\n[[disks]]\npath = \"d\"",
        "line 5, disks[1].path: disk 0 has the same file",
    ),
    ("kernel = \"k\"\n[[net]]\nmtu = 1500", "line 2, net[0]: write exactly one of tap"),
    ("kernel = \"k\"\n[[net]]\ntap = \"a\"\nuser = true", "line 2, net[0]: write exactly one of tap"),
    ("kernel = \"k\"\n[[net]]\ntap = \"a-name-that-is-too-long\"", "line 3, net[0].tap: "),
    (
        "kernel = \"k\"\n[[net]]\ntap = \"a\"\n[[net]]\ntap = \"a\"",
        "line 5, net[1].tap: a is taken by net[0]",
    ),
    ("kernel = \"k\"\n[[net]]\nfd = 1", "line 3, net[0].fd: 1 is not an inherited"),
    (
        "kernel = \"k\"\n[[net]]\nuser = true\nmac = \"01:00:00:00:00:00\"",
        "line 4, net[0].mac: 01:00:00:00:00:00 is a group",
    ),
    (
        "kernel = \"k\"\n[[net]]\nuser = true\nmac = \"no\"",
        "line 4, net[0].mac: \"no\" is not an Ethernet address",
    ),
    ("kernel = \"k\"\n[[net]]\nuser = true\nmtu = 67", "line 4, net[0].mtu: 67 is not an MTU"),
    ("kernel = \"k\"\n[[net]]\nuser = true\nqueues = 2", "line 4, net[0].queues: only tap = "),
    ("kernel = \"k\"\n[vsock]\ncid = 2\nsocket = \"s\"", "line 3, vsock.cid: 2 is not a guest's context id"),
    ("kernel = \"k\"\n[vsock]\ncid = 3", "line 2, vsock: Missing key `socket`"),
    ("kernel = \"k\"\nconsole = \"tty\"", "line 2, console: \"tty\" is not known; allowed are stdio"),
    (
        "kernel = \"k\"\nconsole = \"file:c\"\nconsole_limit = \"1K\"",
        "line 3, console_limit: 1K is not possible; allowed are 64K to 1T",
    ),
    (
        "kernel = \"k\"\nconsole_limit = \"1M\"",
        "line 2, console_limit: only a guest with a kernel and console",
    ),
    ("kernel = \"k\"\nconsole = \"file:\"", "line 2, console: the path is empty"),
    ("kernel = \"k\"\nsandbox = true", "line 2, sandbox: "),
    ("kernel = \"k\"\nsandbox = \"maybe\"", "line 2, sandbox: Unknown value `maybe`; allowed: `on`, `log`"),
    (
        "kernel = \"k\"\ninterrupts = \"host\"",
        "line 2, interrupts: Unknown value `host`; allowed: `kernel` or `monitor`",
    ),
    (
        "interrupts = \"monitor\"\n[payload]\nprogram = \"p\"",
        "line 1, interrupts: a payload has no interrupt controllers",
    ),
    ("kernel = \"k\"\non_reboot = \"halt\"", "line 2, on_reboot: Unknown value `halt`"),
    ("kernel = \"k\"\nkernel = \"k\"", "vm.toml, line 2"),
    ("kernel = ", "vm.toml, line 1"),
    ("kernel = \"k", "vm.toml, line 1"),
    ("\u{0}", "vm.toml, line 1"),
];

#[test]
fn an_image_that_can_only_be_read_is_never_attached_for_writing() {
    for disk in ["path = \"d.qcow2\"", "path = \"d\"\nformat = \"qcow2\""] {
        let error = check(&format!("kernel = \"k\"\n[[disks]]\n{disk}")).unwrap_err();
        assert!(error.contains("disks[0].format: a qcow2 image can only be read"), "{error}");
    }
}

/// Every accepted pair of sockets and cores has a topology that firmware can describe.
#[test]
fn accepted_vcpus_have_apic_ids_that_firmware_can_describe() {
    use machine::x86::CpuTopology;
    let mut refused = 0;
    for sockets in 1..=254_u32 {
        for cores in 1..=254 / sockets {
            let text = format!("kernel = \"k\"\ncpus = {{ sockets = {sockets}, cores = {cores} }}");
            let Ok(vm) = check(&text) else {
                refused += 1;
                continue;
            };
            assert_eq!((u32::from(vm.cpus.sockets), u32::from(vm.cpus.cores)), (sockets, cores));
            let topology = CpuTopology::packages(&vec![cores; sockets as usize]).unwrap();
            let last = topology.apic_id(topology.vcpus() - 1);
            assert!(last < u32::from(firmware::layout::IO_APIC_ID), "{sockets} x {cores}");
        }
    }
    assert!(refused > 0);
}

/// Devices of any types fill all slots, and one more is refused.
#[test]
fn devices_of_all_kinds_fit_the_bus_together() {
    let with = |disks: usize, nets: usize| {
        let disks: String = (0..disks).map(|n| format!("[[disks]]\npath = \"d{n}\"\n")).collect();
        let nets: String = (0..nets).map(|n| format!("[[net]]\ntap = \"t{n}\"\n")).collect();
        check(&format!("kernel = \"k\"\n{disks}{nets}"))
    };
    // The random-number device has one slot.
    with(26, 4).unwrap();
    let error = with(26, 5).unwrap_err();
    assert!(error.contains("disks: disks, net, nic, rdma") && error.contains("32 devices"), "{error}");
}

#[test]
fn every_wrong_value_is_named_with_file_line_and_key() {
    for (text, expected) in WRONG {
        let error = check(text).expect_err(text);
        assert!(error.contains(expected), "{text:?} gives {error:?}, not {expected:?}");
        assert!(!error.contains('\n'), "{error:?} is more than a sentence");
    }
}

#[test]
fn too_long_socket_paths_and_command_lines_are_refused() {
    let long = "x".repeat(2048);
    assert!(
        check(&format!("kernel = \"k\"\ncmdline = \"{long}\""))
            .unwrap_err()
            .contains("2048 bytes are too long")
    );
    let socket = format!("kernel = \"k\"\napi_socket = \"/{}\"", &long[..107]);
    assert!(check(&socket).unwrap_err().contains("line 2, api_socket: the path has 108 bytes"));
}

#[test]
fn files_that_are_none_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vm.toml");
    assert!(load(&path).unwrap_err().to_string().contains("can't be read"));
    std::fs::write(&path, b"name = \"\xff\"").unwrap();
    assert!(load(&path).unwrap_err().to_string().contains("byte 8 is not UTF-8"));
    std::fs::File::create(&path).unwrap().set_len(2 << 20).unwrap();
    assert!(load(&path).unwrap_err().to_string().contains("longer than 1048576 bytes"));
    assert!(load(directory.path()).unwrap_err().to_string().contains("can't be read"));
}

/// A change to a text, as typing errors and broken tools make them.
#[derive(Debug, Clone)]
enum Mutation {
    Remove { at: usize, len: usize },
    Insert { at: usize, text: String },
    Duplicate { line: usize },
    Swap { first: usize, second: usize },
    Value { line: usize, value: String },
    Truncate { at: usize },
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let value = prop_oneof![
        any::<i64>().prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| format!("{number:?}")),
        "[0-9]{0,20}(\\.[0-9]{0,8})?[KMGTB]?i?B?".prop_map(|size| format!("\"{size}\"")),
        "\\PC{0,24}".prop_map(|text| format!("{text:?}")),
        Just("true".to_owned()),
        Just("[]".to_owned()),
        Just("{}".to_owned()),
        Just("[[[[[[1]]]]]]".to_owned()),
        Just("1979-05-27".to_owned()),
        "[\\[\\]{}=\",.0-9a-z\\\\ ]{0,16}",
    ];
    prop_oneof![
        (any::<usize>(), 1..40_usize).prop_map(|(at, len)| Mutation::Remove { at, len }),
        (any::<usize>(), "[\\PC\n\r\t\0]{1,8}").prop_map(|(at, text)| Mutation::Insert { at, text }),
        any::<usize>().prop_map(|line| Mutation::Duplicate { line }),
        (any::<usize>(), any::<usize>()).prop_map(|(first, second)| Mutation::Swap { first, second }),
        (any::<usize>(), value).prop_map(|(line, value)| Mutation::Value { line, value }),
        any::<usize>().prop_map(|at| Mutation::Truncate { at }),
    ]
}

fn apply(text: &mut Vec<char>, mutation: &Mutation) {
    let mut lines: Vec<String> = text.iter().collect::<String>().split('\n').map(str::to_owned).collect();
    let line = |number: usize| number % lines.len();
    match mutation {
        Mutation::Remove { at, len } => {
            let at = at % (text.len() + 1);
            text.drain(at..(at + len).min(text.len()));
            return;
        }
        Mutation::Insert { at, text: new } => {
            let at = at % (text.len() + 1);
            text.splice(at..at, new.chars());
            return;
        }
        Mutation::Truncate { at } => {
            text.truncate(at % (text.len() + 1));
            return;
        }
        Mutation::Duplicate { line: number } => {
            let number = line(*number);
            lines.insert(number, lines[number].clone());
        }
        Mutation::Swap { first, second } => {
            let (first, second) = (line(*first), line(*second));
            lines.swap(first, second);
        }
        Mutation::Value { line: number, value } => {
            let number = line(*number);
            if let Some((key, _)) = lines[number].split_once('=') {
                lines[number] = format!("{key}= {value}");
            }
        }
    }
    *text = lines.join("\n").chars().collect();
}

/// Properties of every valid description.
fn consistent(vm: &VmDescription) {
    let count = usize::from(vm.cpus.count());
    assert!((1..=254).contains(&count));
    assert_eq!(vm.numa.iter().map(|node| node.memory).sum::<u64>(), vm.memory.size);
    assert_eq!(vm.numa.iter().map(|node| node.cpus.len()).sum::<usize>(), count);
    assert!(vm.numa.iter().all(|node| node.distances.len() == vm.numa.len()));
    assert!(vm.pinning.is_empty() || vm.pinning.len() == count);
    assert!(vm.memory.size.is_multiple_of(vm.memory.hugepages.page_size()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12_000, ..ProptestConfig::default() })]

    /// Any text gives a consistent description or one sentence.
    #[test]
    fn mutated_files_end_in_a_description_or_one_sentence(mutations in proptest::collection::vec(mutation(), 1..4)) {
        let mut text = FULL.chars().collect();
        for mutation in &mutations {
            apply(&mut text, mutation);
        }
        let text: String = text.into_iter().collect();
        match check(&text) {
            Ok(vm) => consistent(&vm),
            Err(error) => {
                prop_assert!(error.starts_with("vm.toml"), "{}", error);
                prop_assert!(!error.contains('\n') && error.len() < 2000, "{:?}", error);
            }
        }
    }
}
