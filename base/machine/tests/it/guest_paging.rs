//! Differential test of `guest-paging`'s page walks against KVM's (KVM_TRANSLATE), on random tables: both must find the same address or
//! none.
//!
//! The tables avoid one deviation of KVM from the manuals: for a 4 MiB page KVM uses only four physical address bits above 4 GiB,
//! whatever CPUID reports.
#![allow(unsafe_code)] // Memory is handed to KVM by its address.

use std::io::Write as _;

use guest_paging::state::{CR0_PE, CR0_PG, CR0_WP, CR4_LA57, CR4_PAE, CR4_PSE, EFER_LMA, EFER_NXE};
use guest_paging::{Access, EntryWidth, GuestPhysical, GuestVirtual, PagingState, walk};
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_sregs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::common::flat_segments;

const RAM_BYTES: usize = 1 << 20;
const TABLES: u64 = 0x1_0000;
const TABLE_COUNT: u64 = 12;
/// Number of random tables of each mode, and of addresses translated with each table.
const ROUNDS: u32 = 100;
const ADDRESSES: u32 = 300;
const EFER_LME: u64 = 1 << 8;
/// CR0.ET, which is always set, and CR0.NE.
const CR0_FIXED: u64 = 1 << 4 | 1 << 5;
const ACCESSED: u64 = 1 << 5;

/// Numbers from a seed (xorshift64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn one_in(&mut self, of: u64) -> bool {
        self.next() >> 8 & 0xffff_ffff < (1 << 32) / of
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Two,
    Pae,
    Four,
    Five,
}

struct Peer {
    // Dropped before the memory that they use.
    vcpu: VcpuFd,
    _vm: VmFd,
    memory: GuestMemoryMmap,
    physical_bits: u32,
    has_1g_pages: bool,
    is_amd: bool,
    has_five_levels: bool,
}

fn leaf(cpuid: &CpuId, function: u32) -> Option<(u32, u32, u32)> {
    let found = cpuid.as_slice().iter().find(|leaf| leaf.function == function && leaf.index == 0)?;
    Some((found.eax, found.ecx, found.edx))
}

impl Peer {
    fn new() -> Self {
        let kvm = Kvm::new().unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.set_tss_address(0xFFFB_D000).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM_BYTES)]).unwrap();
        let region = kvm_userspace_memory_region {
            memory_size: RAM_BYTES as u64,
            userspace_addr: memory.get_host_address(GuestAddress(0)).unwrap() as u64,
            ..Default::default()
        };
        // SAFETY: the mapping is owned by `memory`, which lives as long as the VM.
        unsafe { vm.set_user_memory_region(region) }.unwrap();
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        vcpu.set_cpuid2(&cpuid).unwrap();
        let vendor = leaf(&cpuid, 0).unwrap();
        Self {
            vcpu,
            _vm: vm,
            memory,
            physical_bits: leaf(&cpuid, 0x8000_0008).map_or(36, |(eax, ..)| eax & 0xff),
            has_1g_pages: leaf(&cpuid, 0x8000_0001).is_some_and(|(.., edx)| edx & 1 << 26 != 0),
            // "cAMD", or "uine" of Hygon.
            is_amd: [u32::from_le_bytes(*b"cAMD"), u32::from_le_bytes(*b"uine")].contains(&vendor.1),
            has_five_levels: leaf(&cpuid, 7).is_some_and(|(_, ecx, _)| ecx & 1 << 16 != 0),
        }
    }

    /// Fills the tables, and makes the vCPU use the first. Returns the state for the walk.
    fn enter(&mut self, mode: Mode, random: &mut Random) -> PagingState {
        for table in 0..TABLE_COUNT {
            let mut page = [0u8; 4096];
            let bytes = if mode == Mode::Two { 4 } else { 8 };
            for index in (0..4).chain(508..512) {
                let is_pointer = mode == Mode::Pae && table == 0 && index < 4;
                let entry = self.entry(mode, is_pointer, random);
                let at = index * bytes;
                page[at..at + bytes].copy_from_slice(&entry.to_le_bytes()[..bytes]);
            }
            self.memory.write_slice(&page, GuestAddress(TABLES + table * 4096)).unwrap();
        }
        let nx = if random.one_in(4) || mode == Mode::Two { 0 } else { EFER_NXE };
        let (cr4, efer) = match mode {
            Mode::Two => (if random.one_in(4) { 0 } else { CR4_PSE }, 0),
            Mode::Pae => (CR4_PAE, nx),
            Mode::Four => (CR4_PAE, EFER_LMA | nx),
            Mode::Five => (CR4_PAE | CR4_LA57, EFER_LMA | nx),
        };
        let cr0 = CR0_PE | CR0_PG | CR0_WP | CR0_FIXED;
        let mut sregs = kvm_sregs {
            cr0,
            cr3: TABLES,
            cr4,
            efer: efer | if efer & EFER_LMA != 0 { EFER_LME } else { 0 },
            apic_base: self.vcpu.get_sregs().unwrap().apic_base,
            ..Default::default()
        };
        flat_segments(&mut sregs, efer & EFER_LMA != 0);
        self.vcpu.set_sregs(&sregs).unwrap();
        let pointer = |index: u64| self.memory.read_obj(GuestAddress(TABLES + index * 8)).unwrap();
        PagingState {
            cr0,
            cr3: TABLES,
            cr4,
            efer,
            rflags: 2,
            cpl: 0,
            pdptes: (mode == Mode::Pae).then(|| [0, 1, 2, 3].map(pointer)),
            physical_bits: self.physical_bits,
            has_1g_pages: self.has_1g_pages,
            is_amd: self.is_amd,
        }
    }

    fn entry(&self, mode: Mode, is_pointer: bool, random: &mut Random) -> u64 {
        let target = if random.one_in(8) {
            // Mostly outside RAM.
            random.next() & ((1 << self.physical_bits) - 1) & !0xfff
        } else {
            TABLES + random.next() % TABLE_COUNT * 4096
        };
        let present = u64::from(!random.one_in(8));
        if is_pointer {
            // Reserved bits there would make the processor refuse the CR3.
            return target | present;
        }
        // KVM sets accessed bits, so entries have them set.
        let mut entry = target | present | ACCESSED | random.next() & 0b1_0101_1110;
        if random.one_in(3) {
            entry |= 1 << 7;
        }
        if mode == Mode::Two {
            return entry & 0xffff_f1ff & !(0xf << 17);
        }
        if random.one_in(3) {
            entry |= 1 << 63;
        }
        if random.one_in(16) {
            entry |= 1 << (self.physical_bits.min(51) + u32::from(random.next().to_le_bytes()[0]) % 11);
        }
        entry
    }

    /// Whether KVM uses the tables. Some versions, such as PVM, treat every address outside IA-32e mode as a physical one.
    fn walks_tables(&self, mode: Mode, random: &mut Random) -> bool {
        (0..ADDRESSES).map(|_| address(mode, random)).any(|address| self.translate(address) != Some(address))
    }

    /// KVM's translation.
    fn translate(&self, address: u64) -> Option<u64> {
        let found = self.vcpu.translate_gva(address).unwrap();
        (found.valid != 0).then_some(found.physical_address)
    }
}

/// An address whose indices mostly select filled entries.
fn address(mode: Mode, random: &mut Random) -> u64 {
    let mut index = |bits: u32| {
        let small = random.next() % 9;
        let highest = (1 << bits) - 1;
        if small < 4 {
            small
        } else if small < 8 {
            highest - (small - 4)
        } else {
            random.next() & highest
        }
    };
    let address = match mode {
        Mode::Two => index(10) << 22 | index(10) << 12,
        Mode::Pae => index(2) << 30 | index(9) << 21 | index(9) << 12,
        Mode::Four | Mode::Five => {
            let low = index(9) << 39 | index(9) << 30 | index(9) << 21 | index(9) << 12;
            let (low, bits) = if mode == Mode::Five { (low | index(9) << 48, 57) } else { (low, 48) };
            // Sign-extended to a canonical address.
            if low >> (bits - 1) & 1 != 0 { low | u64::MAX << bits } else { low }
        }
    };
    address | random.next() & 0xfff
}

/// Reports a mode that this machine can't compare, directly to standard error so that the test harness doesn't capture it.
fn skipped(mode: Mode, why: &str) {
    // Nothing can be done if standard error is closed.
    let _ =
        writeln!(std::io::stderr(), "guest_paging::walks_are_those_of_kvm, mode {mode:?}: SKIPPED: {why}");
}

#[test]
fn walks_are_those_of_kvm() {
    if !std::path::Path::new("/dev/kvm").exists() {
        facilities::missing(facilities::Facility::Kvm, "KVM_TRANSLATE needs /dev/kvm");
        return;
    }
    let mut peer = Peer::new();
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    for mode in [Mode::Four, Mode::Five, Mode::Pae, Mode::Two] {
        // Five levels only where the host's processor has them: KVM refuses CR4.LA57 elsewhere.
        if mode == Mode::Five && !peer.has_five_levels {
            skipped(mode, "the processor has no 5-level paging");
            continue;
        }
        peer.enter(mode, &mut random);
        if !peer.walks_tables(mode, &mut random) {
            skipped(mode, "this KVM translates no addresses outside of IA-32e mode");
            continue;
        }
        let (mut found, mut refused) = (0, 0);
        for round in 0..ROUNDS {
            let state = peer.enter(mode, &mut random);
            for _ in 0..ADDRESSES {
                let address = address(mode, &mut random);
                let tables = |at: GuestPhysical, width: EntryWidth| match width {
                    EntryWidth::Four => peer.memory.read_obj::<u32>(GuestAddress(at.0)).ok().map(u64::from),
                    EntryWidth::Eight => peer.memory.read_obj(GuestAddress(at.0)).ok(),
                };
                let ours = walk(&tables, &state, GuestVirtual(address), Access::Read);
                let kvms = peer.translate(address);
                let same = match &ours {
                    Ok(translation) => kvms == Some(translation.physical.0),
                    Err(_) => kvms.is_none(),
                };
                assert!(
                    same,
                    "{mode:?}, round {round}, {address:#x}: {ours:x?}, KVM says {kvms:x?}; {state:x?}"
                );
                *if ours.is_ok() { &mut found } else { &mut refused } += 1;
            }
        }
        assert!(found > 500 && refused > 500, "{mode:?}: {found} found, {refused} refused");
    }
}
