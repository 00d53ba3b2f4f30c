//! vCPUs, RAM and NUMA nodes.

use firmware::layout::MINIMUM_RAM;
use machine::x86::{CpuTopology, MAX_APIC_ID, MAX_VCPUS, TopologyError};

use super::super::vm::{Cpus, HugePages, Memory, NumaNode};
use super::super::{ByteSize, CpuList, Invalid, Key, written};

/// Limit for RAM: 16 TiB.
const MAX_MEMORY_BYTES: u64 = 16 << 40;
/// Minimum RAM of a payload: page tables, boot data and a small program. A kernel needs [`MINIMUM_RAM`].
const MIN_PAYLOAD_MEMORY_BYTES: u64 = 2 << 20;
const DEFAULT_MEMORY: u64 = 512 << 20;
/// Limit for NUMA nodes, as the SLIT grows with their square.
const MAX_NUMA_NODES: usize = 64;

pub(super) fn hugepages(size: Option<ByteSize>) -> Result<HugePages, Invalid> {
    match size.map(|size| size.0) {
        None => Ok(HugePages::None),
        Some(0x20_0000) => Ok(HugePages::Size2M),
        Some(0x4000_0000) => Ok(HugePages::Size1G),
        Some(other) => Err(Invalid::new(
            Key::root("hugepages"),
            format!("x86-64 has no huge pages of {}; allowed are 2M and 1G", ByteSize(other)),
        )),
    }
}

pub(super) fn cpus(vm: &written::Vm) -> Result<Cpus, Invalid> {
    let key = Key::root("cpus");
    let (sockets, cores) = match vm.cpus {
        Some(written::Cpus::Count(count)) => (1, count),
        Some(written::Cpus::Topology(topology)) => (topology.sockets, topology.cores),
        None => {
            let named = vm.numa.iter().flatten().map(|node| node.cpus.len() as u64).sum();
            (1, std::cmp::max(named, 1))
        }
    };
    let count = sockets.checked_mul(cores).filter(|count| (1..=u64::from(MAX_VCPUS)).contains(count));
    let fit = |number: u64| u8::try_from(number).ok();
    match (count, fit(sockets), fit(cores)) {
        (Some(_), Some(sockets), Some(cores)) => topology(Cpus { sockets, cores }),
        _ if sockets == 1 => {
            Err(Invalid::new(key, format!("{cores} vCPUs are not possible; allowed are 1 to 254")))
        }
        _ => Err(Invalid::new(
            key,
            format!("{sockets} sockets of {cores} cores are not possible; their product is 1 to 254"),
        )),
    }
}

/// APIC ids of a socket begin at a multiple of a power of two, so not every product up to 254 has enough ids.
fn topology(cpus: Cpus) -> Result<Cpus, Invalid> {
    match CpuTopology::packages(&vec![u32::from(cpus.cores); usize::from(cpus.sockets)]) {
        Ok(_) => Ok(cpus),
        Err(TopologyError::ApicIds { highest, .. }) => Err(Invalid::new(
            Key::root("cpus"),
            format!(
                "{} sockets of {} cores are not possible: each socket takes {} APIC ids, so the last vCPU would have id {highest}, and \
                 {MAX_APIC_ID} is the highest; choose fewer sockets, or a power of two as cores",
                cpus.sockets,
                cpus.cores,
                u32::from(cpus.cores).next_power_of_two()
            ),
        )),
        Err(other) => Err(Invalid::new(Key::root("cpus"), other.to_string())),
    }
}

pub(super) fn pinning(pin: Option<&[CpuList]>, cpus: Cpus) -> Result<Vec<CpuList>, Invalid> {
    let key = Key::root("pin");
    let Some(pin) = pin else { return Ok(Vec::new()) };
    if let Some(index) = pin.iter().position(CpuList::is_empty) {
        return Err(Invalid::new(
            key.item(index),
            "the list is empty; name the host CPUs that the vCPU may run on",
        ));
    }
    if pin.len() != usize::from(cpus.count()) {
        let problem = format!("{} entries don't fit {} vCPUs; write one for each", pin.len(), cpus.count());
        return Err(Invalid::new(key, problem));
    }
    Ok(pin.to_vec())
}

pub(super) fn memory(
    vm: &written::Vm,
    cpus: Cpus,
    hugepages: HugePages,
) -> Result<(Memory, Vec<NumaNode>), Invalid> {
    let key = Key::root("memory");
    let nodes = vm.numa.as_deref().unwrap_or_default();
    let numa_key = Key::root("numa");
    if nodes.len() > MAX_NUMA_NODES {
        return Err(Invalid::new(
            numa_key.item(MAX_NUMA_NODES),
            format!("{} nodes are too many; at most 64", nodes.len()),
        ));
    }
    let sum = nodes.iter().try_fold(0_u64, |sum, node| sum.checked_add(node.memory.0));
    let Some(sum) = sum.filter(|sum| *sum <= MAX_MEMORY_BYTES) else {
        return Err(Invalid::new(numa_key, "the nodes' memory adds up to more than 16T"));
    };
    let size = match vm.memory {
        Some(size) if !nodes.is_empty() && size.0 != sum => {
            let problem = format!(
                "{size} is not what the NUMA nodes add up to, {}; leave one of them out",
                ByteSize(sum)
            );
            return Err(Invalid::new(key, problem));
        }
        Some(size) => size.0,
        None if nodes.is_empty() => DEFAULT_MEMORY.max(hugepages.page_size()),
        None => sum,
    };
    let written = if vm.memory.is_none() && !nodes.is_empty() { &numa_key } else { &key };
    let least = if vm.payload.is_some() { MIN_PAYLOAD_MEMORY_BYTES } else { MINIMUM_RAM };
    if !(least..=MAX_MEMORY_BYTES).contains(&size) {
        return Err(Invalid::new(
            written.clone(),
            format!("{} is not possible; allowed are {} to 16T", ByteSize(size), ByteSize(least)),
        ));
    }
    let page = hugepages.page_size();
    let whole = |size: u64, key: &Key| {
        if size.is_multiple_of(page) {
            return Ok(());
        }
        let problem = format!("{} is not a whole number of {} pages", ByteSize(size), ByteSize(page));
        Err(Invalid::new(key.clone(), problem))
    };
    whole(size, written)?;
    for (index, node) in nodes.iter().enumerate() {
        whole(node.memory.0, &numa_key.item(index).below("memory"))?;
    }
    let memory = Memory { size, hugepages };
    if nodes.is_empty() {
        let everything = NumaNode {
            cpus: (0..u16::from(cpus.count())).collect(),
            memory: size,
            distances: vec![10],
            host_node: None,
        };
        return Ok((memory, vec![everything]));
    }
    Ok((memory, numa(nodes, cpus)?))
}

fn numa(nodes: &[written::Numa], cpus: Cpus) -> Result<Vec<NumaNode>, Invalid> {
    let key = Key::root("numa");
    let mut owner = vec![None; usize::from(cpus.count())];
    for (index, node) in nodes.iter().enumerate() {
        let key = key.item(index).below("cpus");
        for cpu in node.cpus.iter() {
            let Some(slot) = owner.get_mut(usize::from(cpu)) else {
                let problem = format!("vCPU {cpu} doesn't exist; the VM has 0 to {}", cpus.count() - 1);
                return Err(Invalid::new(key, problem));
            };
            if let Some(other) = slot.replace(index) {
                return Err(Invalid::new(key, format!("vCPU {cpu} is in node {other} already")));
            }
        }
    }
    if let Some(cpu) = owner.iter().position(Option::is_none) {
        return Err(Invalid::new(key, format!("vCPU {cpu} is in no node; name it in the cpus of one")));
    }
    nodes.iter().enumerate().map(|(index, node)| numa_node(nodes.len(), index, node)).collect()
}

fn numa_node(count: usize, index: usize, node: &written::Numa) -> Result<NumaNode, Invalid> {
    let key = Key::root("numa").item(index);
    if node.cpus.is_empty() && node.memory.0 == 0 {
        return Err(Invalid::new(key, "the node has neither vCPUs nor memory; give it one of them"));
    }
    let distances = match &node.distances {
        None => (0..count).map(|other| if other == index { 10 } else { 20 }).collect(),
        Some(written) => {
            let key = key.below("distances");
            if written.len() != count {
                let problem =
                    format!("{} distances don't fit {count} nodes; write one to each", written.len());
                return Err(Invalid::new(key, problem));
            }
            let check = |(other, distance): (usize, &u64)| {
                let fits = if other == index { *distance == 10 } else { (11..=255).contains(distance) };
                u8::try_from(*distance).ok().filter(|_| fits).ok_or_else(|| {
                    let problem = format!(
                        "{distance} is not a distance from node {index} to node {other}; it is 10 to itself and \
                         11 to 255 to others"
                    );
                    Invalid::new(key.item(other), problem)
                })
            };
            written.iter().enumerate().map(check).collect::<Result<Vec<_>, _>>()?
        }
    };
    Ok(NumaNode { cpus: node.cpus.clone(), memory: node.memory.0, distances, host_node: node.host_node })
}
