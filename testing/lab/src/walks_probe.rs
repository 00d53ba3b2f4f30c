//! The host's part of `lab walks`: write-protects a guest's page tables by userfaultfd, and counts the faults of the guest's page
//! walks. A walk that only loads causes none. A walk that requests a store causes one per table.
#![allow(unsafe_code)] // memory that a guest and userfaultfd share with this program, and their ioctls.

use anyhow::{Context, Result, bail};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::ioctl::{Updater, ioctl, opcode};
use rustix::mm::{
    Advice, MapFlags, ProtFlags, UserfaultfdFlags, madvise, mmap_anonymous, munmap, userfaultfd,
};
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

const PAGE: u64 = 4096;
/// Table pages, in the order of [`Faults::pages`].
pub const TABLES: [&str; 5] = ["PML4", "PDPT", "PD", "PT of the code", "PT of the data"];
/// Guest-physical addresses: code is at [`CODE`] in the lowest 2 MiB, then tables, then data.
const TABLES_AT: u64 = 0x100_0000;
const DATA_AT: u64 = 0x200_0000;
const CODE: u64 = 0x1_0000;
/// Linear address of the data.
const DATA_LINEAR: u64 = 0x20_0000;
/// Pages that the guest touches, and how often.
const PAGES: u64 = 64;
const PASSES: u32 = 10;

const ACCESSED: u64 = 0x20;
const DIRTY: u64 = 0x40;
/// Present, writable, user.
const PRESENT: u64 = 7;

/// The guest's accesses, and the bits of its tables at the start.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Name for messages.
    pub name: &'static str,
    store: bool,
    leaf_bits: u64,
    upper_bits: u64,
    /// Write faults at each of [`TABLES`] if walks only load.
    pub read_walks: [u32; 5],
}

/// All cases. If walks store, each case has one write fault at each table.
pub const CASES: [Case; 6] = [
    Case {
        name: "loads, accessed and dirty set",
        store: false,
        leaf_bits: ACCESSED | DIRTY,
        upper_bits: ACCESSED,
        read_walks: [0; 5],
    },
    Case {
        name: "stores, accessed and dirty set",
        store: true,
        leaf_bits: ACCESSED | DIRTY,
        upper_bits: ACCESSED,
        read_walks: [0; 5],
    },
    Case {
        name: "loads, dirty clear in the leaves",
        store: false,
        leaf_bits: ACCESSED,
        upper_bits: ACCESSED,
        read_walks: [0; 5],
    },
    Case {
        name: "stores, dirty clear in the leaves",
        store: true,
        leaf_bits: ACCESSED,
        upper_bits: ACCESSED,
        read_walks: [0, 0, 0, 0, 1],
    },
    Case {
        name: "loads, accessed clear in the leaves",
        store: false,
        leaf_bits: 0,
        upper_bits: ACCESSED,
        read_walks: [0, 0, 0, 0, 1],
    },
    Case {
        name: "loads, accessed clear in the upper levels",
        store: false,
        leaf_bits: ACCESSED | DIRTY,
        upper_bits: 0,
        read_walks: [1, 1, 1, 0, 0],
    },
];

/// Results of a case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    /// The case's name.
    pub case: String,
    /// Write faults at each of [`TABLES`].
    pub pages: [u32; 5],
    /// Data pages whose entry has the accessed bit at the end.
    pub accessed: u64,
    /// Data pages whose entry has the dirty bit at the end.
    pub dirty: u64,
}

/// Anonymous memory in small pages. Dropping it unmaps it.
struct Memory {
    at: NonNull<u8>,
    len: usize,
}

impl Memory {
    fn new(len: usize) -> Result<Self> {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which nothing else has.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, flags, MapFlags::PRIVATE)? };
        // SAFETY: the mapping that was just made.
        unsafe { madvise(at, len, Advice::LinuxNoHugepage)? };
        let at = NonNull::new(at.cast()).context("A mapping is at address 0")?;
        Ok(Memory { at, len })
    }

    fn address(&self) -> u64 {
        self.at.as_ptr().addr() as u64
    }

    /// Returns a 64-bit word, which a guest may change meanwhile.
    fn word(&self, index: u64) -> &AtomicU64 {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        assert!(index < self.len / 8, "word {index} of {} bytes", self.len);
        // SAFETY: inside of the mapping, aligned, and only accessed through atomics by this program.
        unsafe { AtomicU64::from_ptr(self.at.as_ptr().cast::<u64>().add(index)) }
    }

    fn set_bytes(&self, offset: u64, bytes: &[u8]) {
        for (word, chunk) in (offset / 8..).zip(bytes.chunks(8)) {
            let mut padded = [0; 8];
            padded[..chunk.len()].copy_from_slice(chunk);
            self.word(word).store(u64::from_le_bytes(padded), Ordering::Relaxed);
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more: VMs over it are dropped first.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.len) };
    }
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct WriteProtect {
    start: u64,
    len: u64,
    mode: u64,
}

const API: u64 = 0xaa;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
/// `UFFDIO_REGISTER_MODE_WP`, and `UFFD_PAGEFAULT_FLAG_WP` of a fault.
const WP: u64 = 2;
const WRITEPROTECT_WP: u64 = 1;

fn write_protect(uffd: &OwnedFd, start: u64, len: u64, mode: u64) -> Result<()> {
    let mut request = WriteProtect { start, len, mode };
    // SAFETY: UFFDIO_WRITEPROTECT takes this structure.
    let call = unsafe { Updater::<{ opcode::read_write::<WriteProtect>(0xaa, 6) }, _>::new(&mut request) };
    // SAFETY: it changes the write protection of a mapping of this program.
    unsafe { ioctl(uffd, call) }.context("UFFDIO_WRITEPROTECT failed")
}

/// Write-protects the tables.
fn protect(tables: &Memory) -> Result<OwnedFd> {
    // SAFETY: a descriptor of this program's.
    let uffd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }
        .context("userfaultfd can't be had; it needs root")?;
    let mut api = Api { api: API, features: FEATURE_PAGEFAULT_FLAG_WP, ioctls: 0 };
    let mut register = Register { start: tables.address(), len: tables.len as u64, mode: WP, ioctls: 0 };
    // SAFETY: UFFDIO_API and UFFDIO_REGISTER take these structures, and the range is a mapping of this program's.
    unsafe {
        ioctl(&uffd, Updater::<{ opcode::read_write::<Api>(0xaa, 0x3f) }, _>::new(&mut api))
            .context("UFFDIO_API failed")?;
        ioctl(&uffd, Updater::<{ opcode::read_write::<Register>(0xaa, 0) }, _>::new(&mut register))
            .context("UFFDIO_REGISTER failed")?;
    }
    write_protect(&uffd, tables.address(), TABLES.len() as u64 * PAGE, WRITEPROTECT_WP)?;
    Ok(uffd)
}

/// Counts faults at tables and resolves each, until `done`.
fn serve(uffd: &OwnedFd, tables: u64, faults: &[AtomicU32; 5], done: &AtomicBool) -> Result<()> {
    while !done.load(Ordering::Acquire) {
        let wait = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        poll(&mut [PollFd::new(uffd, PollFlags::IN)], Some(&wait))?;
        let mut message = [0; 32];
        match rustix::io::read(uffd, &mut message) {
            Ok(32) => {}
            Ok(other) => bail!("userfaultfd told {other} bytes"),
            Err(rustix::io::Errno::AGAIN) => continue,
            Err(e) => return Err(e).context("userfaultfd can't be read"),
        }
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| message[at + i]));
        let (flags, page) = (word(8), word(16) & !(PAGE - 1));
        let index = usize::try_from(page.wrapping_sub(tables) / PAGE)?;
        let fault = faults.get(index).with_context(|| format!("a fault at {page:#x} is at no table"))?;
        if flags & WP == 0 {
            bail!("{} had a fault with flags {flags:#x}, and not one of write protection", TABLES[index]);
        }
        fault.fetch_add(1, Ordering::Relaxed);
        write_protect(uffd, page, PAGE, 0)?;
    }
    Ok(())
}

/// Fills an identity mapping of the lowest 2 MiB, and the mapping of the data at [`DATA_LINEAR`].
fn fill_tables(tables: &Memory, case: &Case) {
    let set = |table: u64, entry: u64, value: u64| {
        tables.word(table * PAGE / 8 + entry).store(value, Ordering::Relaxed);
    };
    let next = |table: u64| (TABLES_AT + table * PAGE) | PRESENT | case.upper_bits;
    set(0, 0, next(1));
    set(1, 0, next(2));
    set(2, 0, next(3));
    set(2, 1, next(4));
    for page in 0..512 {
        set(3, page, (page * PAGE) | PRESENT | ACCESSED | DIRTY);
    }
    for page in 0..PAGES {
        set(4, page, (DATA_AT + page * PAGE) | PRESENT | case.leaf_bits);
    }
}

/// Returns code that loads or stores a byte at RDI, adds a page to RDI, RCX times, and then writes to a port.
fn code(store: bool) -> [u8; 16] {
    let touch = if store { 0x88 } else { 0x8a };
    [touch, 0x07, 0x48, 0x81, 0xc7, 0, 0x10, 0, 0, 0x48, 0xff, 0xc9, 0x75, 0xf2, 0xe6, 0x10]
}

/// Creates a vCPU in 64-bit mode on the tables.
fn vcpu(kvm: &Kvm, vm: &VmFd) -> Result<VcpuFd> {
    let vcpu = vm.create_vcpu(0)?;
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cr3, sregs.cr4, sregs.cr0, sregs.efer) = (TABLES_AT, 0x620, 0x8005_0033, 0x500);
    let flat = kvm_segment { limit: u32::MAX, present: 1, s: 1, g: 1, ..Default::default() };
    sregs.cs = kvm_segment { selector: 8, type_: 11, l: 1, ..flat };
    let data = kvm_segment { selector: 16, type_: 3, db: 1, ..flat };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    vcpu.set_sregs(&sregs)?;
    Ok(vcpu)
}

/// Runs the code once.
fn pass(vcpu: &mut VcpuFd) -> Result<()> {
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rdi, regs.rcx, regs.rflags) = (CODE, DATA_LINEAR, PAGES, 2);
    vcpu.set_regs(&regs)?;
    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(0x10, _)) => return Ok(()),
            Ok(exit) => bail!("the guest left with {exit:?}"),
            Err(e) if e.errno() == rustix::io::Errno::INTR.raw_os_error() => {}
            Err(e) => return Err(e).context("KVM_RUN failed"),
        }
    }
}

/// Runs one case in a VM of its own.
fn try_case(case: &Case) -> Result<Faults> {
    let (low, tables, data) = (Memory::new(2 << 20)?, Memory::new(8 * 4096)?, Memory::new(2 << 20)?);
    low.set_bytes(CODE, &code(case.store));
    for page in 0..PAGES {
        data.word(page * PAGE / 8).store(page, Ordering::Relaxed);
    }
    fill_tables(&tables, case);
    let kvm = Kvm::new().context("/dev/kvm can't be opened")?;
    let vm = kvm.create_vm()?;
    for (slot, (memory, at)) in (0..).zip([(&low, 0), (&tables, TABLES_AT), (&data, DATA_AT)]) {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: at,
            memory_size: memory.len as u64,
            userspace_addr: memory.address(),
        };
        // SAFETY: the memory lives longer than the VM, and this program touches it by atomics only.
        unsafe { vm.set_user_memory_region(region)? };
    }
    let mut vcpu = vcpu(&kvm, &vm)?;
    let uffd = protect(&tables)?;
    let faults: [AtomicU32; 5] = Default::default();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let at = tables.address();
        let (uffd, faults, done) = (&uffd, &faults, &done);
        let server = scope.spawn(move || serve(uffd, at, faults, done));
        let ran = (0..PASSES).try_for_each(|_| pass(&mut vcpu));
        done.store(true, Ordering::Release);
        let served = server.join().map_err(|_| anyhow::anyhow!("the thread that serves faults panicked"))?;
        ran.and(served)
    })?;
    let with = |bit: u64| {
        let entries = (0..PAGES).map(|page| tables.word(4 * PAGE / 8 + page).load(Ordering::Relaxed));
        entries.filter(|entry| entry & bit != 0).count() as u64
    };
    Ok(Faults {
        case: case.name.to_owned(),
        pages: faults.map(AtomicU32::into_inner),
        accessed: with(ACCESSED),
        dirty: with(DIRTY),
    })
}

/// Runs all cases and prints a line of JSON for each.
///
/// # Errors
/// KVM or userfaultfd isn't available, or a guest doesn't behave as expected.
pub fn run() -> Result<()> {
    for case in &CASES {
        let found = try_case(case).with_context(|| format!("The case \"{}\" failed", case.name))?;
        println!("{}", serde_json::to_string(&found)?);
    }
    Ok(())
}
