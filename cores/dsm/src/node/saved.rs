//! State of a node that outlives it, saved at a moment at which nothing was in flight.
//!
//! Copies, versions, updates and statistics aren't saved. After a restart only owners have content, all pages are write-invalidate, and
//! node 0 is the sequencer. So a saved node names only the owners of pages. The caller saves their contents.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Node;
use super::local::{Home, Local, Seen};
use crate::config::{Config, ConfigError, Order, Plant};
use crate::names::{Mode, NodeId, Page};

/// Version of [`SavedNode`] that this program writes.
pub const NODE_STATE_VERSION: u32 = 1;

/// Owners of pages, as one node knows them. All other pages are unused, and their home is the owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedNode {
    /// [`NODE_STATE_VERSION`] of the writer.
    pub version: u32,
    /// Pages that this node has used and owns, ascending. The caller saves their contents.
    pub owned: Vec<Page>,
    /// Pages of which this node is the home and another node is the owner, ascending, with the owner.
    pub elsewhere: Vec<(Page, u8)>,
}

/// Why a node can't be saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SaveError {
    /// Pages or messages are in flight, or `token` names the wrong node.
    #[error("The node waits for pages or messages; it can be saved when nothing is under way between nodes")]
    Busy,
    /// Under [`Order::PerWriter`] copies of a page may differ forever.
    #[error("Under the paper's order of stores copies of a page may differ, so there is no state to save")]
    Weak,
}

/// Why a saved node can't be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RestoreError {
    /// The state has another version.
    #[error("Saved state of a node has version {found}; this program restores version {NODE_STATE_VERSION}")]
    Version {
        /// The version that it has.
        found: u32,
    },
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A list isn't ascending, or names a page or node that the configuration doesn't have.
    #[error(
        "Saved state of node {node} is damaged: it lists page {page:#x} twice, of a node or machine that isn't this one, or out of order"
    )]
    Page {
        /// The node that is restored.
        node: u8,
        /// The first such page.
        page: Page,
    },
}

fn ascends(pages: impl Iterator<Item = Page> + Clone) -> Result<(), Page> {
    match pages.clone().zip(pages.skip(1)).find(|(one, next)| one >= next) {
        Some((_, page)) => Err(page),
        None => Ok(()),
    }
}

impl Node {
    /// Saves the node. No message may be in flight between any nodes, and all of them must be idle ([`Node::is_idle`]). `token` is the
    /// sequencer, which the other nodes may not know.
    ///
    /// # Errors
    /// Fails if this node isn't idle, if `token` is wrong about it, or if its policy has no consistent state.
    pub fn save(&self, token: NodeId) -> Result<SavedNode, SaveError> {
        if self.config.policy.order == Order::PerWriter {
            return Err(SaveError::Weak);
        }
        if !self.is_idle() || self.has_token() != (token == self.config.me) {
            return Err(SaveError::Busy);
        }
        let owned = self.state.pages.iter().filter(|(_, local)| local.owner).map(|(page, _)| *page);
        let owners = self.state.homes.iter().map(|(page, home)| {
            // The home learns the owner of a write-update page only when that mode ends. Until then the sequencer owns it.
            let owner = if home.mode.is_update() { token } else { home.owner };
            (*page, owner.0)
        });
        let others = owners.filter(|(_, owner)| *owner != self.config.me.0);
        let forget = self.config.plant == Plant::ForgetOwners;
        let elsewhere = if forget { Vec::new() } else { others.collect() };
        Ok(SavedNode { version: NODE_STATE_VERSION, owned: owned.collect(), elsewhere })
    }

    /// Creates a node from a saved one. All nodes of a VM must be restored from the same moment. The guest has no rights to any page.
    /// Memory must have the contents of [`SavedNode::owned`].
    ///
    /// # Errors
    /// Fails if the version or the configuration doesn't fit, or if the lists can't belong to this node.
    pub fn restore(config: Config, saved: &SavedNode) -> Result<Self, RestoreError> {
        if saved.version != NODE_STATE_VERSION {
            return Err(RestoreError::Version { found: saved.version });
        }
        let mut node = Self::new(config)?;
        node.state.restored = true;
        let me = config.me;
        let wrong = |page| RestoreError::Page { node: me.0, page };
        ascends(saved.owned.iter().copied()).map_err(wrong)?;
        ascends(saved.elsewhere.iter().map(|(page, _)| *page)).map_err(wrong)?;
        for &(page, owner) in &saved.elsewhere {
            let fits =
                page < config.pages && config.home(page) == me && owner < config.nodes && owner != me.0;
            if !fits {
                return Err(wrong(page));
            }
            let home = Home { owner: NodeId(owner), mode: Mode::Invalidate, seen: Seen::default() };
            node.state.homes.insert(page, home);
            node.state.pages.insert(page, Local::new(false));
        }
        for &page in &saved.owned {
            if page >= config.pages || node.state.pages.contains_key(&page) {
                return Err(wrong(page));
            }
            // A version above 0, which stands for the content before any access: grants from now on must carry data.
            let local = Local { version: 1, ..Local::new(true) };
            node.state.pages.insert(page, local);
        }
        Ok(node)
    }

    /// At the page's home: the owner that it knows. Other nodes return themselves.
    #[must_use]
    pub fn owner_of(&self, page: Page) -> NodeId {
        self.state.homes.get(&page).map_or(self.config.me, |home| home.owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Policy;

    fn saved(owned: &[Page], elsewhere: &[(Page, u8)]) -> SavedNode {
        SavedNode { version: NODE_STATE_VERSION, owned: owned.to_vec(), elsewhere: elsewhere.to_vec() }
    }

    /// Node 1 of 3: the home of pages 1, 4, 7 and so on.
    fn restore(saved: &SavedNode) -> Result<Node, RestoreError> {
        Node::restore(Config { pages: 100, ..Config::new(1, 3, Policy::OURS) }, saved)
    }

    #[test]
    fn a_restored_node_saves_as_it_was() {
        let state = saved(&[0, 4, 6], &[(1, 0), (7, 2)]);
        let node = restore(&state).unwrap();
        assert_eq!(node.save(NodeId(0)), Ok(state));
        assert!(node.is_owner(0) && node.is_owner(4) && !node.is_owner(1) && !node.is_owner(3));
        assert_eq!((node.owner_of(7), node.owner_of(10)), (NodeId(2), NodeId(1)));
    }

    #[test]
    fn what_can_not_be_is_refused() {
        for wrong in [
            saved(&[4, 4], &[]),
            saved(&[6, 4], &[]),
            saved(&[100], &[]),
            saved(&[4], &[(4, 0)]),
            saved(&[], &[(7, 0), (1, 0)]),
            saved(&[], &[(1, 1)]),
            saved(&[], &[(1, 3)]),
            saved(&[], &[(2, 0)]),
            saved(&[], &[(100, 0)]),
        ] {
            assert!(matches!(restore(&wrong), Err(RestoreError::Page { .. })), "{wrong:?}");
        }
        let newer = SavedNode { version: 2, ..saved(&[], &[]) };
        assert!(matches!(restore(&newer), Err(RestoreError::Version { found: 2 })));
    }

    #[test]
    fn whoever_is_wrong_about_the_token_can_not_save() {
        let node = restore(&saved(&[], &[])).unwrap();
        assert_eq!(node.save(NodeId(1)), Err(SaveError::Busy));
        let weak = Node::new(Config::new(0, 2, Policy::VNUMA_2009)).unwrap();
        assert_eq!(weak.save(NodeId(0)), Err(SaveError::Weak));
    }
}
