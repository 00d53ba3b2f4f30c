//! Guest RAM in sealed memfds.

use std::fs::File;
use std::sync::Arc;

use super::{GuestMemorySpace, MemoryError, RamLayout, RamRange};

/// Size of the pages behind guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageSize {
    /// 4 KiB pages, from which the kernel may make larger ones.
    #[default]
    Base,
    /// Reserved huge pages of 2 MiB.
    #[serde(rename = "2M")]
    Huge2M,
    /// Reserved huge pages of 1 GiB.
    #[serde(rename = "1G")]
    Huge1G,
}

/// How the host places a node's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NumaMode {
    /// Only on these nodes.
    Bind,
    /// On these nodes as long as they have room.
    Preferred,
    /// Page by page over these nodes.
    Interleave,
}

/// A NUMA policy for one guest node.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HostNuma {
    /// How.
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
    /// Allocate all pages now rather than at first touch.
    pub prefault: bool,
}

/// One piece of RAM as this process sees it.
#[derive(Debug, Clone)]
pub struct RamRegion {
    /// Guest addresses.
    pub range: RamRange,
    /// The node's memfd.
    pub file: Arc<File>,
    /// Where in the memfd the piece begins.
    pub file_offset: u64,
    /// Where it is mapped in this process, while [`GuestRam`] or its memory lives.
    pub host_address: usize,
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
    pub fn allocate(_layout: &RamLayout, _options: &RamOptions) -> Result<Self, MemoryError> {
        todo!()
    }

    /// Where it lies.
    pub fn layout(&self) -> &RamLayout {
        &self.layout
    }

    /// For devices.
    pub fn memory(&self) -> GuestMemorySpace {
        self.space.clone()
    }

    /// For handing memory on to other processes.
    pub fn regions(&self) -> &[RamRegion] {
        &self.regions
    }
}
