//! Checks the tables' bytes: checksums, lengths and fields. If Debian's `iasl` is installed, it disassembles them, too.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use super::*;
use crate::layout::{GIB, MIB};
use crate::map::{Cpu, PciRoute, PciWindows, PowerPorts, default_pci_routes};

fn machine(cpus: u8, node_sizes: &[u64], node_distances: Vec<Vec<u8>>) -> MachineMap {
    let nodes = u32::try_from(node_sizes.len()).unwrap();
    let ram = layout::place_ram(node_sizes);
    MachineMap {
        pci: PciWindows { memory32: layout::PCI_MEMORY32, memory64: layout::pci_memory64(&ram, 40) },
        ram,
        cpus: (0..cpus).map(|apic_id| Cpu { apic_id, node: u32::from(apic_id) % nodes }).collect(),
        node_distances,
        pci_routes: default_pci_routes(),
        power: PowerPorts {
            reset: 0x600,
            reset_value: 1,
            sleep_control: 0x604,
            sleep_status: 0x605,
            events: 0x608,
        },
        x2apic: false,
        console: true,
    }
}

fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn index(value: u64) -> usize {
    usize::try_from(value).unwrap()
}

/// Walks the tables from the RSDP as an operating system does, and checks every checksum and length.
fn walk(bytes: &[u8], base: u64) -> BTreeMap<String, Vec<u8>> {
    let sum = |bytes: &[u8]| bytes.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte));
    assert_eq!(&bytes[..8], b"RSD PTR ");
    assert_eq!((sum(&bytes[..20]), sum(&bytes[..36])), (0, 0));
    let mut tables = BTreeMap::new();
    let mut take = |address: u64| {
        let at = index(address - base);
        let len = index(number(bytes, at + 4, 4));
        let table = bytes[at..at + len].to_vec();
        let signature = String::from_utf8(table[..4].to_vec()).unwrap();
        assert_eq!(sum(&table), 0, "checksum of {signature}");
        assert_eq!(&table[10..16], b"CAUSWY");
        tables.insert(signature, table.clone());
        table
    };
    let xsdt = take(number(bytes, 24, 8));
    for entry in xsdt[36..].chunks(8) {
        let table = take(number(entry, 0, 8));
        if table.starts_with(b"FACP") {
            assert_eq!(number(&table, 40, 4), 0);
            take(number(&table, 140, 8));
        }
    }
    tables
}

fn tables(map: &MachineMap) -> BTreeMap<String, Vec<u8>> {
    let base = layout::ACPI_TABLES;
    walk(&build(map, base).unwrap(), base)
}

#[test]
fn the_fadt_says_hardware_reduced_and_where_the_registers_are() {
    let tables = tables(&machine(2, &[GIB], vec![]));
    assert_eq!(tables.keys().collect::<Vec<_>>(), ["APIC", "DSDT", "FACP", "MCFG", "XSDT"]);
    let fadt = &tables["FACP"];
    let flags = number(fadt, 112, 4);
    assert_eq!(flags & (1 << 20 | 1 << 10 | 1 << 5 | 1 << 4), 1 << 20 | 1 << 10 | 1 << 5 | 1 << 4);
    assert_eq!(number(fadt, 109, 2), 0b11_0100);
    // Generic addresses: system I/O, 8 bits wide, byte access.
    for (at, port) in [(116, 0x600), (244, 0x604), (256, 0x605)] {
        assert_eq!((fadt[at], fadt[at + 1], fadt[at + 3], number(fadt, at + 4, 8)), (1, 8, 1, port));
    }
    assert_eq!(fadt[128], 1);
    assert_eq!(&fadt[268..276], b"CAUSEWAY");
}

#[test]
fn the_madt_lists_254_cpus_one_io_apic_and_the_nmi_line() {
    let tables = tables(&machine(254, &[GIB], vec![]));
    let madt = &tables["APIC"];
    assert_eq!(number(madt, 36, 4), layout::LOCAL_APIC);
    let mut rest = &madt[44..];
    let mut kinds = [0; 5];
    while let [kind, len, ..] = *rest {
        if kind == 0 {
            assert_eq!((usize::from(rest[2]), rest[2], number(rest, 4, 4)), (kinds[0], rest[3], 1));
        }
        if kind == 1 {
            assert_eq!((rest[2], number(rest, 4, 4), number(rest, 8, 4)), (0xfe, layout::IO_APIC, 0));
        }
        kinds[usize::from(kind)] += 1;
        rest = &rest[usize::from(len)..];
    }
    assert_eq!(kinds, [254, 1, 0, 0, 1]);
}

#[test]
fn x2apics_have_entries_of_their_own() {
    let distances = vec![vec![10, 20], vec![20, 10]];
    let tables = tables(&MachineMap { x2apic: true, ..machine(3, &[GIB, GIB], distances) });
    let mut rest = &tables["APIC"][44..];
    let mut kinds = Vec::new();
    while let [kind, len, ..] = *rest {
        match kind {
            9 => {
                let id = kinds.len() as u64;
                assert_eq!((number(rest, 4, 4), number(rest, 8, 4), number(rest, 12, 4)), (id, 1, id));
            }
            10 => assert_eq!((number(rest, 4, 4), rest[8]), (0xffff_ffff, 1)),
            _ => assert_eq!(kind, 1),
        }
        kinds.push((kind, len));
        rest = &rest[usize::from(len)..];
    }
    assert_eq!(kinds, [(9, 16), (9, 16), (9, 16), (1, 12), (10, 12)]);
    for (id, cpu) in tables["SRAT"][48..48 + 3 * 24].chunks(24).enumerate() {
        let fields = (number(cpu, 0, 2), number(cpu, 4, 4), number(cpu, 8, 4), number(cpu, 12, 4));
        assert_eq!(fields, (24 << 8 | 2, id as u64 % 2, id as u64, 1));
    }
}

#[test]
fn the_mcfg_names_bus_0_only() {
    let tables = tables(&machine(1, &[GIB], vec![]));
    let mcfg = &tables["MCFG"];
    assert_eq!((number(mcfg, 44, 8), mcfg[54], mcfg[55]), (layout::ECAM.start, 0, 0));
    assert_eq!(mcfg.len(), 60);
}

#[test]
fn srat_and_slit_describe_the_nodes() {
    let distances = vec![vec![10, 20, 40], vec![21, 10, 30], vec![40, 30, 10]];
    let tables = tables(&machine(4, &[2 * GIB, 2 * GIB, GIB], distances));
    let srat = &tables["SRAT"];
    assert_eq!(number(srat, 36, 4), 1);
    let (cpus, memory) = srat[48..].split_at(4 * 16);
    for (id, cpu) in cpus.chunks(16).enumerate() {
        assert_eq!((cpu[0], cpu[1], usize::from(cpu[2]), usize::from(cpu[3])), (0, 16, id % 3, id));
        assert_eq!(number(cpu, 4, 4), 1);
    }
    let found: Vec<_> = memory
        .chunks(40)
        .map(|m| (number(m, 2, 4), number(m, 8, 8), number(m, 16, 8), number(m, 28, 4)))
        .collect();
    assert_eq!(found, [(0, 0, 2 * GIB, 1), (1, 2 * GIB, GIB, 1), (1, 4 * GIB, GIB, 1), (2, 5 * GIB, GIB, 1)]);
    let slit = &tables["SLIT"];
    assert_eq!(number(slit, 36, 8), 3);
    assert_eq!(slit[44..], [10, 20, 40, 21, 10, 30, 40, 30, 10]);
}

#[test]
fn machines_that_can_not_be_described_are_refused() {
    let refuse = |map: &MachineMap| build(map, 0).unwrap_err().to_string();
    let good = machine(2, &[GIB], vec![]);
    assert!(refuse(&MachineMap { cpus: vec![], ..good.clone() }).contains("0 CPUs"));
    let twice = MachineMap { cpus: vec![Cpu { apic_id: 1, node: 0 }; 2], ..good.clone() };
    assert!(refuse(&twice).contains("APIC id 1"));
    let broadcast = MachineMap { cpus: vec![Cpu { apic_id: 255, node: 0 }], ..good.clone() };
    assert!(refuse(&broadcast).contains("APIC id 255"));
    let route = MachineMap { pci_routes: vec![PciRoute { slot: 32, pin: 0, gsi: 16 }], ..good.clone() };
    assert!(refuse(&route).contains("slot 32"));
    assert!(refuse(&machine(2, &[GIB, GIB], vec![])).contains("NUMA node 1"));
    assert!(refuse(&machine(2, &[GIB, GIB], vec![vec![10, 10], vec![20, 10]])).contains("distance"));
    assert!(refuse(&machine(2, &[GIB, GIB], vec![vec![10], vec![20, 10]])).contains("1 distances"));
    let nodes = 254u8;
    let far = (0..nodes).map(|a| (0..nodes).map(|b| if a == b { 10 } else { 20 }).collect()).collect();
    // 254 nodes still fit: 64 KiB of distances.
    let sizes = vec![16 * MIB; usize::from(nodes)];
    assert!(build(&machine(nodes, &sizes, far), 0).unwrap().len() < 0x2_0000);
}

#[test]
fn tables_lie_in_guest_memory_where_a_scan_finds_them() {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 16 << 20)]).unwrap();
    let map = machine(4, &[16 * MIB], vec![]);
    let rsdp = write(&memory, &map).unwrap();
    assert_eq!((rsdp, rsdp % 16), (0xe_0000, 0));
    let mut bytes = vec![0; 0x2_0000];
    memory.read_slice(&mut bytes, GuestAddress(rsdp)).unwrap();
    walk(&bytes, rsdp);
}

/// Runs `iasl` in `directory`; returns its output.
fn iasl(directory: &Path, arguments: &[&str]) -> String {
    let output = Command::new("iasl").current_dir(directory).args(arguments).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "iasl {arguments:?}: {text}");
    text
}

#[test]
fn iasl_reads_all_tables_and_compiles_the_dsdt_again_without_complaint() {
    if Command::new("iasl").arg("-v").output().is_err() {
        eprintln!(
            "SKIPPED: iasl is not installed (Debian package acpica-tools); the DSDT was not disassembled"
        );
        return;
    }
    let directory = std::env::temp_dir().join(format!("firmware-iasl-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let distances = vec![vec![10, 20], vec![20, 10]];
    for (name, table) in tables(&machine(4, &[4 * GIB, 4 * GIB], distances)) {
        std::fs::write(directory.join(format!("{name}.dat")), &table).unwrap();
        let text = iasl(&directory, &["-d", &format!("{name}.dat")]);
        for complaint in ["Error", "Warning", "nvalid", "ncorrect"] {
            assert!(!text.contains(complaint), "{name}: {text}");
        }
    }
    let dsl = std::fs::read_to_string(directory.join("DSDT.dsl")).unwrap();
    for expected in [
        "Device (PCI0)",
        "EisaId (\"PNP0A08\")",
        "ToUUID (\"33db4d5b-1ff7-401c-9657-7441c03dd766\")",
        "Device (COM1)",
        "Device (PWRB)",
        "\"ACPI0013\"",
        "Notify (\\_SB.PWRB, 0x80)",
        "Name (_S5",
        "0x0000001000000000, // Range Minimum",
    ] {
        assert!(dsl.contains(expected), "no {expected} in\n{dsl}");
    }
    let text = iasl(&directory, &["DSDT.dsl"]);
    assert!(text.contains("0 Errors, 0 Warnings"), "{text}");
    std::fs::remove_dir_all(&directory).unwrap();
}
