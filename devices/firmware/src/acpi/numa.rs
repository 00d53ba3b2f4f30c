//! SRAT and SLIT: the NUMA nodes of CPUs and memory, and the distances between nodes.

use acpi_tables::Aml;
use acpi_tables::srat::MemoryAffinity;

use super::{AcpiError, table};
use crate::map::MachineMap;

/// Distance of a node to itself (5.2.17).
const LOCAL_DISTANCE: u8 = 10;

/// Processor local APIC affinity (5.2.16.1), which the crate lacks.
fn cpu_affinity(apic_id: u8, node: u32) -> [u8; 16] {
    let [low, rest @ ..] = node.to_le_bytes();
    let mut bytes = [0u8; 16];
    bytes[1] = 16;
    bytes[2] = low;
    bytes[3] = apic_id;
    // Enabled.
    bytes[4] = 1;
    bytes[9..12].copy_from_slice(&rest);
    bytes
}

/// Processor local x2APIC affinity (5.2.16.3), which the crate lacks.
fn x2apic_affinity(apic_id: u8, node: u32) -> [u8; 24] {
    let mut bytes = [0u8; 24];
    bytes[0] = 2;
    bytes[1] = 24;
    bytes[4..8].copy_from_slice(&node.to_le_bytes());
    bytes[8..12].copy_from_slice(&u32::from(apic_id).to_le_bytes());
    // Enabled.
    bytes[12] = 1;
    bytes
}

pub(super) fn srat(map: &MachineMap) -> Vec<u8> {
    // Reserved: 1 for backward compatibility, then eight zeroes.
    let mut body = vec![1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for cpu in &map.cpus {
        if map.x2apic {
            body.extend_from_slice(&x2apic_affinity(cpu.apic_id, cpu.node));
        } else {
            body.extend_from_slice(&cpu_affinity(cpu.apic_id, cpu.node));
        }
    }
    for ram in &map.ram {
        MemoryAffinity::new(ram.node, ram.range.start, ram.range.len).enabled().to_aml_bytes(&mut body);
    }
    table(*b"SRAT", 3, &body)
}

/// Written here, as the crate's table is always symmetric.
pub(super) fn slit(map: &MachineMap) -> Vec<u8> {
    let mut body = (map.node_distances.len() as u64).to_le_bytes().to_vec();
    body.extend(map.node_distances.iter().flatten());
    table(*b"SLIT", 1, &body)
}

pub(super) fn check(map: &MachineMap) -> Result<(), AcpiError> {
    let error = |what| Err(AcpiError::Machine { what });
    let nodes = map.node_distances.len();
    for (from, row) in map.node_distances.iter().enumerate() {
        if row.len() != nodes {
            return error(format!(
                "NUMA node {from} has {} distances and there are {nodes} nodes",
                row.len()
            ));
        }
        for (to, &distance) in row.iter().enumerate() {
            if (distance == LOCAL_DISTANCE) != (from == to) || distance < LOCAL_DISTANCE {
                return error(format!(
                    "the distance from NUMA node {from} to {to} is {distance}; it is 10 to the node itself \
                     and 11 to 255 to others"
                ));
            }
        }
    }
    let used = map.cpus.iter().map(|cpu| cpu.node).chain(map.ram.iter().map(|ram| ram.node));
    match used.max() {
        Some(node) if node as usize >= nodes.max(1) => {
            error(format!("NUMA node {node} is used and there are {}", nodes.max(1)))
        }
        _ => Ok(()),
    }
}
