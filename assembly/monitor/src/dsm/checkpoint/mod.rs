//! Checkpoints: all nodes stand still at a consistent cut, write what they have to files, and go on.
//!
//! ```text
//! node 0                                  every node (node 0 too)
//!   Hold ──────────────────────────────▶  holds are given up, vCPUs leave the guest; pages that are waited for still come
//!   ◀────────────────────────────── Still
//!   Count ─────────────────────────────▶  idle? messages sent and received so far
//!   ◀──────────────────────────── Counted  … until two rounds are the same: all idle, as many received as sent
//!   Save ──────────────────────────────▶  NODE.ckpt: vCPUs, pages that it owns, who owns what; synced
//!   ◀────────────────────────────── Saved
//!   checkpoint.json is replaced: from here on the new checkpoint is the last one
//!   Go ────────────────────────────────▶  files of older ones are removed, vCPUs run
//! ```
//!
//! The cut is consistent as nothing is under way: two equal rounds of counts show that (F. Mattern, *Algorithms for distributed termination
//! detection*, 1987: four counters). What isn't saved is what a restart finds again: copies, modes, versions ([`dsm::node::saved`]).
//!
//! | module | holds |
//! |---|---|
//! | `file` | a node's file and the list of all, whole or not there at all |
//! | `member` | what a node does when it is told to |
//! | `coordinator` | node 0: when, and in which order |

mod coordinator;
mod file;
mod member;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub(super) use coordinator::{Plan, serve};
pub(super) use file::{List, Listed, make_folder};
pub(super) use member::{Counted, Member, Restored, another_program, restore};

/// Where checkpoints are written to, and how often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoints {
    /// The folder, on each node's host; the nodes of one host may share it.
    pub folder: PathBuf,
    /// Pause between two checkpoints, from the end of one to the begin of the next.
    pub every: Duration,
}

impl Checkpoints {
    /// Makes the folder, where it isn't there.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn make_folder(&self) -> Result<(), CheckpointError> {
        make_folder(&self.folder)
    }
}

/// What nodes tell each other about checkpoints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Step {
    /// From node 0: stand still, for the checkpoint of this number.
    Hold(u64),
    /// To node 0: it does, or why it can't.
    Still(u64, Result<(), String>),
    /// From node 0: what has been sent and received?
    Count(u64),
    /// To node 0, with the round.
    Counted(u64, Counted),
    /// From node 0: write the file of this number; the node with the token.
    Save { number: u64, token: u8 },
    /// To node 0: it is written, or why it isn't.
    Saved(u64, Result<Listed, Refused>),
    /// From node 0: go on. The number of the checkpoint that is complete now, if one is.
    Go(Option<u64>),
    /// From node 0, before anything runs: go on from this file.
    Restore(Listed),
    /// From this node's own threads, and never sent: look around, the VM has ended.
    #[serde(skip)]
    Look,
}

/// Why a node isn't saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Refused {
    /// The VM is about to end.
    Ending,
    /// Another reason, for people.
    Because(String),
}

/// A checkpoint could not be read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system refused.
    #[error("The checkpoint file {path} could not be {what}")]
    File {
        /// Which.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// There is none.
    #[error(
        "There is no checkpoint in {0}: it has no file checkpoint.json; give the folder that --checkpoint was given on node 0's host"
    )]
    None(PathBuf),
    /// The bytes aren't those that were written.
    #[error(
        "The checkpoint file {path} is damaged: {reason}; go on from another checkpoint, or run the VM from its start"
    )]
    Damaged {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Another program's.
    #[error(
        "The checkpoint file {path} has version {found}; this program reads version {known}: go on with the program that wrote it, or run the VM from its start"
    )]
    Version {
        /// Which.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// It is of another VM.
    #[error("The checkpoint in {path} is of another VM: {reason}")]
    Other {
        /// Where.
        path: PathBuf,
        /// In what they differ, and what to do.
        reason: String,
    },
    /// KVM or the protocol refuses the state.
    #[error("The checkpoint file {path} can't be restored")]
    State {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
