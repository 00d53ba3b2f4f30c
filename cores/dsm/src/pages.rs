//! The interface of the protocol to guest memory.

use crate::names::{Access, Page};

/// Guest memory of one node.
///
/// In a monitor, a memfd that is mapped twice. `protect` changes the guest's mapping (userfaultfd). All other methods use the other
/// mapping, which never faults. A call takes effect before it returns: after `protect`, no vCPU of the node has more rights to the page,
/// and stores made before are in memory.
pub trait Pages {
    /// Bytes per page.
    fn size(&self) -> usize;
    /// Reads a page into the empty buffer `into`. A page that was never written is zero.
    fn read(&self, page: Page, into: &mut Vec<u8>);
    /// Writes bytes within a page. The guest may be reading the page: aligned groups of 1, 2, 4 and 8 bytes must become visible as a whole.
    fn write(&mut self, page: Page, offset: usize, bytes: &[u8]);
    /// Sets the rights of the guest's mapping of a page.
    fn protect(&mut self, page: Page, access: Access);
}
