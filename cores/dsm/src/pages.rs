//! What the core asks of the owner of guest memory.

use crate::names::{Access, Page};

/// Guest memory of one node.
///
/// In a monitor: a memfd mapped twice. `protect` changes the guest's mapping (userfaultfd), all else goes through the other mapping,
/// which never faults. Calls take effect before they return: after `protect` no virtual CPU of the node sees the page with more
/// rights, and stores made before are in memory (spec dsm, section 4).
pub trait Pages {
    /// Bytes of a page.
    fn size(&self) -> usize;
    /// Copies a page. A page that nobody has written is zero.
    fn read(&self, page: Page, into: &mut Vec<u8>);
    /// Writes bytes within a page. Aligned groups of 1, 2, 4 and 8 bytes must become visible to the guest at once: the guest may be
    /// reading the page.
    fn write(&mut self, page: Page, offset: usize, bytes: &[u8]);
    /// Sets what the guest may do with a page.
    fn protect(&mut self, page: Page, access: Access);
}
