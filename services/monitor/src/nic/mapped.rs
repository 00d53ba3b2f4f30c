//! Parts of a card's BARs that its guest accesses without an exit.

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
    /// Offset in the card's file; then in the BAR.
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

/// Memory BARs that VFIO can map.
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

/// Pages of memory BARs that VFIO can map, and that the description lets a guest access directly.
pub(super) fn free_pages(device: &'static Device, card: &Vfio) -> Result<Vec<Mapped>, NicError> {
    let mut found = Vec::new();
    for whole in mapped(card)? {
        for begin in free(device, whole.bar, whole.length) {
            let (bar, fd) = (whole.bar, Arc::clone(&whole.fd));
            found.push(Mapped { bar, fd, offset: whole.offset + begin, begin, length: u64::from(PAGE) });
        }
    }
    Ok(found)
}

/// Offsets of those pages in a BAR of which `length` bytes can be mapped: a card may have less than its description.
fn free(device: &'static Device, bar: u8, length: u64) -> impl Iterator<Item = u64> {
    let pages = plan(device).pages.into_iter();
    let free = pages.filter(move |(of, _, plan)| *of == bar && *plan == PagePlan::Map);
    free.map(|(_, page, _)| u64::from(page)).filter(move |begin| begin + u64::from(PAGE) <= length)
}

#[cfg(test)]
mod tests {
    use device_models::devices::e1000::E1000;

    use super::free;

    /// An e1000's statistics are mapped directly. Pages that the card doesn't have aren't.
    #[test]
    fn free_pages_lie_in_what_can_be_mapped() {
        let of = |bar, length| free(&E1000, bar, length).collect::<Vec<_>>();
        assert_eq!((of(0, 0x2_0000), of(0, 0x5000)), (vec![0x4000], vec![0x4000]));
        assert!(of(0, 0x4FFF).is_empty() && of(0, 0).is_empty() && of(1, 0x2_0000).is_empty());
    }
}
