//! Guest RAM in sealed memfds.
#![allow(unsafe_code)] // mbind and madvise on mappings that this module made.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestRegionCollection, GuestRegionMmap, MmapRegion};

use super::{
    AtomicBitmap, FileOffset, GuestAddress, GuestMemory, GuestMemorySpace, MemoryError, RamLayout, RamRange,
};

/// Size of the host pages of guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageSize {
    /// 4 KiB pages, which the kernel may combine to huge ones.
    #[default]
    Base,
    /// Reserved huge pages of 2 MiB.
    #[serde(rename = "2M")]
    Huge2M,
    /// Reserved huge pages of 1 GiB.
    #[serde(rename = "1G")]
    Huge1G,
}

impl PageSize {
    /// Bytes of a page.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Base => 4096,
            Self::Huge2M => 2 << 20,
            Self::Huge1G => 1 << 30,
        }
    }
}

/// NUMA policy of the host for a node's pages (mbind).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NumaMode {
    /// Only on these nodes.
    Bind,
    /// On these nodes while they have free memory.
    Preferred,
    /// Page by page in turn over these nodes.
    Interleave,
}

/// A NUMA policy for one guest node.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HostNuma {
    /// Mode of mbind(2).
    pub mode: NumaMode,
    /// Host nodes.
    pub nodes: Vec<u32>,
}

/// How to allocate guest RAM.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RamOptions {
    /// Name of the VM; the memfds are called `causeway:<name>:ram<node>`.
    pub name: String,
    /// Size of pages.
    pub pages: PageSize,
    /// Advise the kernel to use transparent huge pages (with [`PageSize::Base`] only).
    pub transparent_huge: bool,
    /// Policy per guest node; nodes beyond its end, and `None`, use the process's policy.
    pub numa: Vec<Option<HostNuma>>,
    /// Allocate all pages now rather than at the first access.
    pub prefault: bool,
    /// Processes that may read the RAM and must not write it.
    pub readers: Readers,
}

/// Processes that may get a descriptor that only reads ([`RamRegion::read_only`]) and can't use it to write the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Readers {
    /// No process: there is no such descriptor.
    #[default]
    Nobody,
    /// Processes of any user. F_SEAL_FUTURE_WRITE keeps the mappings made here the only writable ones, also against a reopened
    /// descriptor. A device in another process can't write such memory either.
    Anybody,
    /// Unprivileged processes of other users. The file has mode 0600, so that they can't reopen the descriptor for writing. A process
    /// with [`RamRegion::file`] (a device in another process) can map it for writing at any time.
    OtherUsers,
}

/// One piece of RAM, mapped in this process.
#[derive(Debug, Clone)]
pub struct RamRegion {
    /// Guest-physical addresses.
    pub range: RamRange,
    /// The node's memfd.
    pub file: Arc<File>,
    /// The memfd, opened read-only; `None` with [`Readers::Nobody`].
    pub read_only: Option<Arc<File>>,
    /// Offset of the piece in the memfd, in bytes.
    pub file_offset: u64,
    /// Address of the mapping in this process. Valid while [`GuestRam`] or its memory lives.
    pub host_address: usize,
    mapping: Arc<MmapRegion<AtomicBitmap>>,
}

impl RamRegion {
    pub(crate) fn mapping(&self) -> &Arc<MmapRegion<AtomicBitmap>> {
        &self.mapping
    }
}

/// The RAM of one guest.
#[derive(Debug)]
pub struct GuestRam {
    layout: RamLayout,
    space: GuestMemorySpace,
    regions: Vec<RamRegion>,
}

impl GuestRam {
    /// Allocates RAM: one memfd per node, sealed against resizing, mapped shared.
    pub fn allocate(layout: &RamLayout, options: &RamOptions) -> Result<Self, MemoryError> {
        check_host_size(layout, options)?;
        let mut regions = Vec::new();
        for (node, &size) in layout.nodes().iter().enumerate() {
            let file = Arc::new(node_memfd(node, size, options)?);
            let read_only = match options.readers {
                Readers::Nobody => None,
                Readers::Anybody | Readers::OtherUsers => Some(Arc::new(reader(node, &file)?)),
            };
            for range in layout.ranges().iter().filter(|range| range.node == node) {
                let mapping = map(range, &file, options)?;
                let policy = options.numa.get(node).and_then(Option::as_ref);
                apply_policies(range, &mapping, policy, options)?;
                regions.push(RamRegion {
                    range: *range,
                    file: Arc::clone(&file),
                    read_only: read_only.clone(),
                    file_offset: range.node_offset,
                    host_address: mapping.as_ptr().addr(),
                    mapping: Arc::new(mapping),
                });
            }
            if options.readers == Readers::Anybody {
                // After the last writable mapping is made.
                let seals = SealFlags::FUTURE_WRITE | SealFlags::SEAL;
                rustix::fs::fcntl_add_seals(&*file, seals)
                    .map_err(|error| host_error(node, "sealed against writing by others", error))?;
            }
        }
        let space = GuestMemorySpace::new(collect(&regions)?);
        Ok(Self { layout: layout.clone(), space, regions })
    }

    /// Guest-physical layout.
    pub fn layout(&self) -> &RamLayout {
        &self.layout
    }

    /// The memory, for devices.
    pub fn memory(&self) -> GuestMemorySpace {
        self.space.clone()
    }

    /// The regions with their descriptors, for other processes.
    pub fn regions(&self) -> &[RamRegion] {
        &self.regions
    }
}

fn host_error(node: usize, what: impl Into<String>, source: impl Into<io::Error>) -> MemoryError {
    MemoryError::Host { node, what: what.into(), source: source.into() }
}

fn collect(regions: &[RamRegion]) -> Result<GuestMemory, MemoryError> {
    let bad = |range: &RamRange, reason: String| MemoryError::BadSize {
        node: range.node,
        size: range.size,
        reason,
    };
    let mut all = Vec::new();
    for region in regions {
        let guest = GuestRegionMmap::with_arc(Arc::clone(&region.mapping), GuestAddress(region.range.start));
        all.push(Arc::new(
            guest.ok_or_else(|| bad(&region.range, "it ends beyond the address space".into()))?,
        ));
    }
    GuestRegionCollection::from_arc_regions(all).map_err(|error| match regions.first() {
        Some(region) => bad(&region.range, error.to_string()),
        None => MemoryError::NoNodes,
    })
}

/// A field of /proc/meminfo, in bytes. The file has KiB.
fn meminfo(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn check_host_size(layout: &RamLayout, options: &RamOptions) -> Result<(), MemoryError> {
    let page = options.pages.bytes();
    for (node, &size) in layout.nodes().iter().enumerate() {
        if !size.is_multiple_of(page) {
            let reason = format!("with huge pages, sizes are multiples of {page}");
            return Err(MemoryError::BadSize { node, size, reason });
        }
        if usize::try_from(size).ok().and_then(|size| isize::try_from(size).ok()).is_none() {
            let reason = "it doesn't fit this process's address space".into();
            return Err(MemoryError::BadSize { node, size, reason });
        }
    }
    if options.pages == PageSize::Base {
        let limit = if options.prefault {
            meminfo("MemAvailable")
        } else {
            meminfo("MemTotal").map(|total| total.saturating_add(meminfo("SwapTotal").unwrap_or(0)))
        };
        // Without /proc this check is skipped, and the kernel refuses the allocation itself.
        if let Some(available) = limit.filter(|limit| *limit < layout.total()) {
            return Err(MemoryError::TooLarge { wanted: layout.total(), available });
        }
    }
    Ok(())
}

fn node_memfd(node: usize, size: u64, options: &RamOptions) -> Result<File, MemoryError> {
    // memfd names hold at most 249 bytes and no NUL.
    let vm: String = options.name.chars().filter(|c| !c.is_control()).take(48).collect();
    let name = format!("causeway:{vm}:ram{node}");
    let huge = match options.pages {
        PageSize::Base => MemfdFlags::empty(),
        PageSize::Huge2M => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        PageSize::Huge1G => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge;
    let file = rustix::fs::memfd_create(name.as_str(), flags).map(File::from).map_err(|error| {
        if options.pages == PageSize::Base {
            host_error(node, format!("given a memfd called {name}"), error)
        } else {
            no_huge_pages(node, size, options.pages)
                .unwrap_or_else(|| host_error(node, format!("given a huge-page memfd called {name}"), error))
        }
    })?;
    file.set_len(size).map_err(|error| host_error(node, format!("sized to {size} bytes"), error))?;
    let last = if options.readers == Readers::Anybody { SealFlags::empty() } else { SealFlags::SEAL };
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | last)
        .map_err(|error| host_error(node, "sealed against resizing", error))?;
    Ok(file)
}

/// Opens a descriptor of `file` that can't write. The file gets mode 0600, so that other users can't open a writable one.
fn reader(node: usize, file: &File) -> Result<File, MemoryError> {
    let failed = |error: io::Error| host_error(node, "opened for readers", error);
    rustix::fs::fchmod(file, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
        .map_err(|error| failed(error.into()))?;
    File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file))).map_err(failed)
}

/// The error for too few reserved huge pages, if their number is the cause.
fn no_huge_pages(node: usize, size: u64, pages: PageSize) -> Option<MemoryError> {
    let page = pages.bytes();
    let page_kib = page / 1024;
    let read = |file: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-{page_kib}kB/{file}");
        std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()
    };
    let free = read("free_hugepages").unwrap_or(0).saturating_sub(read("resv_hugepages").unwrap_or(0));
    let wanted = size / page;
    let suggest = read("nr_hugepages").unwrap_or(0).saturating_add(wanted.saturating_sub(free));
    (free < wanted).then_some(MemoryError::NoHugePages { node, wanted, free, page_kib, suggest })
}

fn map(
    range: &RamRange,
    file: &Arc<File>,
    options: &RamOptions,
) -> Result<MmapRegion<AtomicBitmap>, MemoryError> {
    let size = usize::try_from(range.size).unwrap_or(usize::MAX);
    // The kernel reserves huge pages at mmap, so that a guest can't die of SIGBUS later. It doesn't reserve small ones.
    let reserve = if options.pages == PageSize::Base { libc::MAP_NORESERVE } else { 0 };
    MmapRegionBuilder::new_with_bitmap(size, vm_memory::mmap::NewBitmap::with_len(size))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_SHARED | reserve)
        .with_file_offset(FileOffset::from_arc(Arc::clone(file), range.node_offset))
        .with_hugetlbfs(options.pages != PageSize::Base)
        .build()
        .map_err(|error| {
            let lacking = (options.pages != PageSize::Base)
                .then(|| no_huge_pages(range.node, range.size, options.pages));
            lacking.flatten().unwrap_or_else(|| {
                let source = match error {
                    vm_memory::mmap::MmapRegionError::Mmap(source) => source,
                    other => io::Error::other(other),
                };
                host_error(range.node, format!("mapped with {size} bytes"), source)
            })
        })
}

fn apply_policies(
    range: &RamRange,
    mapping: &MmapRegion<AtomicBitmap>,
    policy: Option<&HostNuma>,
    options: &RamOptions,
) -> Result<(), MemoryError> {
    let address = mapping.as_ptr().cast::<std::ffi::c_void>();
    let size = mapping.size();
    if let Some(policy) = policy {
        mbind(address, size, policy).map_err(|error| {
            host_error(
                range.node,
                format!("placed by {:?} on host NUMA nodes {:?}", policy.mode, policy.nodes),
                error,
            )
        })?;
    }
    let advise = |advice| {
        // SAFETY: the range is the mapping just made; neither advice changes its contents.
        unsafe { rustix::mm::madvise(address, size, advice) }
    };
    if options.transparent_huge && options.pages == PageSize::Base {
        advise(rustix::mm::Advice::LinuxHugepage)
            .map_err(|error| host_error(range.node, "advised to use transparent huge pages", error))?;
    }
    if options.prefault {
        advise(rustix::mm::Advice::LinuxPopulateWrite)
            .map_err(|error| host_error(range.node, format!("prefaulted with {size} bytes"), error))?;
    }
    Ok(())
}

fn mbind(address: *mut std::ffi::c_void, size: usize, policy: &HostNuma) -> io::Result<()> {
    const MAX_NUMA_NODES: usize = 1024;
    /// Not in libc yet.
    const MPOL_PREFERRED_MANY: i32 = 5;
    let mode = match policy.mode {
        NumaMode::Bind => libc::MPOL_BIND,
        // Several preferred nodes have a mode of their own (Linux 5.15).
        NumaMode::Preferred if policy.nodes.len() > 1 => MPOL_PREFERRED_MANY,
        NumaMode::Preferred => libc::MPOL_PREFERRED,
        NumaMode::Interleave => libc::MPOL_INTERLEAVE,
    };
    let mut mask = [0u64; MAX_NUMA_NODES / 64];
    for &node in &policy.nodes {
        let word = mask.get_mut(node as usize / 64).ok_or(io::ErrorKind::InvalidInput)?;
        *word |= 1 << (node % 64);
    }
    if policy.nodes.is_empty() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the range is a mapping of this process, and the mask outlives the call. The kernel decrements the count, so it reads
    // MOST_NODES bits of the mask. Only page placement changes.
    let result = unsafe {
        libc::syscall(libc::SYS_mbind, address, size, mode, mask.as_ptr(), MAX_NUMA_NODES + 1, 0u32)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Bytes, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion, HIGH_RAM_START};

    fn options() -> RamOptions {
        RamOptions { name: "test".into(), ..RamOptions::default() }
    }

    #[test]
    fn ram_is_a_sealed_memfd_that_others_can_map() {
        let ram = GuestRam::allocate(&RamLayout::new(&[2 << 20]).unwrap(), &options()).unwrap();
        let memory = ram.memory().memory();
        memory.write_obj(0x1234_5678u32, GuestAddress(0x1000)).unwrap();
        let region = &ram.regions()[0];
        assert!(region.file.set_len(4096).is_err(), "shrinking must be refused");
        assert!(region.file.set_len(4 << 20).is_err(), "growing must be refused");
        let mut seen = [0; 4];
        std::os::unix::fs::FileExt::read_exact_at(&*region.file, &mut seen, 0x1000).unwrap();
        assert_eq!(seen, 0x1234_5678u32.to_le_bytes());
        let mapped = memory.find_region(GuestAddress(0)).unwrap();
        assert_eq!(mapped.file_offset().unwrap().start(), 0);
        let target =
            std::fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&*region.file)));
        assert!(target.unwrap().to_string_lossy().contains("causeway:test:ram0"));
    }

    /// A descriptor of such memory permits no write, no writable mapping, no reopening for writing and no hole punching, not even to this
    /// process. The guest's own mapping stays writable, also for pages that are accessed for the first time.
    #[test]
    fn memory_for_readers_can_be_written_through_the_guests_mapping_only() {
        use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
        use std::os::unix::fs::FileExt;

        use rustix::fs::{FallocateFlags, fallocate, fcntl_getfl};

        use crate::slots::HostMapping;

        let options = RamOptions { readers: Readers::Anybody, ..options() };
        let ram = GuestRam::allocate(&RamLayout::new(&[4 << 20]).unwrap(), &options).unwrap();
        let region = &ram.regions()[0];
        let given = region.read_only.as_ref().unwrap();
        assert_eq!(
            fcntl_getfl(given.as_fd()).unwrap() & rustix::fs::OFlags::RWMODE,
            rustix::fs::OFlags::RDONLY
        );
        let reopen = |fd: BorrowedFd<'_>| {
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            std::fs::File::options().read(true).write(true).open(path)
        };
        let map = |fd: BorrowedFd<'_>| HostMapping::new("peer", fd, 0, 4096, true).map(drop);
        assert!(map(given.as_fd()).is_err(), "the descriptor that peers get");
        assert!(given.write_at(&[1], 0).is_err());
        // The owner and root may reopen it; the seal still forbids writes.
        for fd in [given.as_fd(), region.file.as_fd()] {
            let Ok(reopened) = reopen(fd) else { continue };
            assert!(map(reopened.as_fd()).is_err(), "a descriptor that was reopened for writing");
            assert!(reopened.write_at(&[1], 0).is_err());
            assert!(
                fallocate(&reopened, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096)
                    .is_err()
            );
            assert!(reopened.set_len(0).is_err());
        }
        assert!(rustix::fs::fcntl_add_seals(given.as_fd(), SealFlags::WRITE).is_err(), "seals are final");
        let memory = ram.memory().memory();
        memory.write_obj(0x55u8, GuestAddress((4 << 20) - 1)).unwrap();
        let mut seen = [0];
        given.read_exact_at(&mut seen, (4 << 20) - 1).unwrap();
        assert_eq!(seen, [0x55]);
        assert!(HostMapping::new("peer", given.as_fd(), 0, 4096, false).is_ok());
    }

    /// Memory that devices of other processes write: they can map it repeatedly. The readers' descriptor can't write, and another user
    /// can't reopen it because the file has mode 0600. No seal that would stop the devices can be added. (`tests/isolation.rs` of crate
    /// `host` tests the refusal with a process of another user.)
    #[test]
    fn memory_for_other_users_is_its_owners_alone() {
        use std::os::fd::AsFd;
        use std::os::unix::fs::{FileExt, MetadataExt};

        use crate::slots::HostMapping;

        let options = RamOptions { readers: Readers::OtherUsers, ..options() };
        let ram = GuestRam::allocate(&RamLayout::new(&[4 << 20]).unwrap(), &options).unwrap();
        let region = &ram.regions()[0];
        let given = region.read_only.as_ref().unwrap();
        let there = given.metadata().unwrap();
        assert_eq!((there.mode() & 0o7777, there.uid()), (0o600, rustix::process::geteuid().as_raw()));
        assert!(HostMapping::new("peer", given.as_fd(), 0, 4096, true).is_err());
        assert!(given.write_at(&[1], 0).is_err());
        assert!(HostMapping::new("peer", given.as_fd(), 0, 4096, false).is_ok());
        for file in [given, &region.file] {
            assert!(rustix::fs::fcntl_add_seals(file.as_fd(), SealFlags::FUTURE_WRITE).is_err());
            assert!(file.set_len(0).is_err());
        }
        for _ in 0..2 {
            assert!(HostMapping::new("device", region.file.as_fd(), 0, 4096, true).is_ok());
        }
    }

    #[test]
    fn a_node_across_the_hole_is_one_memfd_in_two_regions() {
        let layout = RamLayout::new(&[(3 << 30) - (1 << 20), 2 << 20]).unwrap();
        let ram = GuestRam::allocate(&layout, &options()).unwrap();
        let [_, low, high] = ram.regions() else { panic!("three regions") };
        assert!(Arc::ptr_eq(&low.file, &high.file));
        assert_eq!((high.range.start, high.file_offset), (HIGH_RAM_START, 1 << 20));
        ram.memory().memory().write_obj(7u8, GuestAddress(HIGH_RAM_START + 5)).unwrap();
        let mut seen = [0];
        std::os::unix::fs::FileExt::read_exact_at(&*low.file, &mut seen, (1 << 20) + 5).unwrap();
        assert_eq!(seen, [7]);
    }

    #[test]
    fn more_memory_than_the_host_has_is_an_error() {
        let layout = RamLayout::new(&[1 << 50]).unwrap();
        let error = GuestRam::allocate(&layout, &options()).unwrap_err();
        assert!(matches!(error, MemoryError::TooLarge { .. }), "{error}");
    }

    #[test]
    fn missing_huge_pages_are_an_error_that_says_how_to_reserve_them() {
        let options = RamOptions { pages: PageSize::Huge2M, ..options() };
        let layout = RamLayout::new(&[1 << 40]).unwrap();
        let text = GuestRam::allocate(&layout, &options).unwrap_err().to_string();
        assert!(text.contains("nr_hugepages"), "{text}");
        let odd = RamLayout::new(&[(2 << 20) + 4096]).unwrap();
        assert!(matches!(GuestRam::allocate(&odd, &options), Err(MemoryError::BadSize { .. })));
    }

    #[test]
    fn numa_policy_transparent_huge_pages_and_prefault_work_together() {
        let layout = RamLayout::new(&[4 << 20]).unwrap();
        let numa = vec![Some(HostNuma { mode: NumaMode::Preferred, nodes: vec![0] })];
        let options = RamOptions { transparent_huge: true, prefault: true, numa, ..options() };
        match GuestRam::allocate(&layout, &options) {
            Ok(ram) => assert_eq!(ram.layout(), &layout),
            // Kernels without NUMA or huge pages refuse; the message must name the node.
            Err(error) => assert!(error.to_string().contains("node 0"), "{error}"),
        }
        let nowhere = vec![Some(HostNuma { mode: NumaMode::Bind, nodes: vec![5000] })];
        assert!(GuestRam::allocate(&layout, &RamOptions { numa: nowhere, ..options }).is_err());
    }
}
