//! Parts of a card's BARs that its guest accesses without this process.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use device_models::describe::{Bar, Device};
use pci::function::BarMapping;
use vpio::plan::{PAGE, PagePlan, plan};
use vpio::vfio::Vfio;

use super::NicError;

/// A part of a card's BAR that is mapped into the guest.
pub(super) struct Mapped {
    bar: u8,
    fd: Arc<OwnedFd>,
    /// In the card's file, and in the BAR.
    offset: u64,
    begin: u64,
    length: u64,
}

impl Mapped {
    pub fn mapping(&self, read_only: bool) -> BarMapping {
        BarMapping {
            bar: self.bar,
            offset: self.begin,
            len: self.length,
            fd: Arc::clone(&self.fd),
            fd_offset: self.offset,
            read_only,
        }
    }
}

/// Memory BARs that VFIO lets be mapped.
pub(super) fn mapped(card: &Vfio) -> Result<Vec<Mapped>, NicError> {
    let mut found = Vec::new();
    for (bar, what) in (0u8..).zip(card.description().bars) {
        if matches!(what, Bar::Memory(_))
            && let Some((offset, length)) = card.mappable(bar)
        {
            let fd = card.as_fd().try_clone_to_owned();
            let fd = Arc::new(fd.map_err(|error| NicError::machine("descriptor", error))?);
            found.push(Mapped { bar, fd, offset, begin: 0, length });
        }
    }
    Ok(found)
}

/// Pages of memory BARs that VFIO lets be mapped, and of which the description says that a guest may have them as they are.
pub(super) fn free_pages(device: &'static Device, card: &Vfio) -> Result<Vec<Mapped>, NicError> {
    let mut found = Vec::new();
    for whole in mapped(card)? {
        let ours = plan(device).pages.into_iter().filter(|(bar, ..)| *bar == whole.bar);
        for (bar, page, _) in ours.filter(|(.., plan)| *plan == PagePlan::Map) {
            let begin = u64::from(page);
            let fd = Arc::clone(&whole.fd);
            found.push(Mapped { bar, fd, offset: whole.offset + begin, begin, length: u64::from(PAGE) });
        }
    }
    Ok(found)
}
