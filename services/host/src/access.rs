//! Authorization: which callers may request what from the daemon. Callers are identified by SO_PEERCRED.

use vfio_user_protocol::device::Peer;

/// Callers that may have NICs, besides root and the daemon's own user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// User identifiers.
    pub uids: Vec<u32>,
    /// Group identifiers, compared with a process's primary group: SO_PEERCRED reports no other.
    pub gids: Vec<u32>,
}

/// Why a request is denied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The caller may not use the daemon at all.
    #[error(
        "User {uid} (group {gid}) may not use this host daemon; root, the daemon's own user, and who it was started \
         with --allow-uid or --allow-gid for may"
    )]
    Stranger {
        /// The caller's user identifier.
        uid: u32,
        /// The caller's group identifier.
        gid: u32,
    },
    /// The NIC is another user's.
    #[error("NIC {name} of VM {vm} belongs to user {owner}, and user {uid} asked for it")]
    NotYours {
        /// Name of the VM.
        vm: String,
        /// Name of the NIC.
        name: String,
        /// User that attached it.
        owner: u32,
        /// The caller's user identifier.
        uid: u32,
    },
    /// The VM's other NICs are another user's.
    #[error(
        "VM {vm} has NICs of user {owner} already, and user {uid} asked for one; choose another name for the VM"
    )]
    OtherVm {
        /// Name of the VM.
        vm: String,
        /// User that attached the others.
        owner: u32,
        /// The caller's user identifier.
        uid: u32,
    },
    /// The request is for administrators only.
    #[error("User {uid} may not {what}; root and the daemon's own user may")]
    Administrators {
        /// The caller's user identifier.
        uid: u32,
        /// Name of the request.
        what: &'static str,
    },
}

impl Access {
    /// Checks that a peer may use the daemon.
    ///
    /// # Errors
    /// [`Denied`] when it may not.
    pub fn check(&self, peer: &Peer) -> Result<(), Denied> {
        let known =
            is_administrator(peer.uid) || self.uids.contains(&peer.uid) || self.gids.contains(&peer.gid);
        if known { Ok(()) } else { Err(Denied::Stranger { uid: peer.uid, gid: peer.gid }) }
    }
}

/// Whether a user is an administrator: root or the daemon's own user, who may do everything.
#[must_use]
pub fn is_administrator(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Whether `uid` may use objects of `owner`.
#[must_use]
pub fn may_use(uid: u32, owner: u32) -> bool {
    uid == owner || is_administrator(uid)
}

#[cfg(test)]
mod tests {
    use super::{Access, may_use};
    use vfio_user_protocol::device::Peer;

    #[test]
    fn strangers_are_refused_and_those_named_are_not() {
        let own = rustix::process::geteuid().as_raw();
        let (stranger, group) = (own + 1000, 7777);
        let access = Access { uids: vec![own + 1], gids: vec![group] };
        let peer = |uid, gid| Peer { uid, gid, pid: 1 };
        assert!(access.check(&peer(0, 0)).is_ok());
        assert!(access.check(&peer(own, 1)).is_ok());
        assert!(access.check(&peer(own + 1, 1)).is_ok());
        assert!(access.check(&peer(stranger, group)).is_ok());
        assert!(access.check(&peer(stranger, 1)).unwrap_err().to_string().contains(&stranger.to_string()));
        assert!(may_use(own + 5, own + 5) && !may_use(own + 5, own + 6) && may_use(0, own + 6));
    }
}
