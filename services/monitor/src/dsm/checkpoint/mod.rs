//! Checkpoints: all nodes quiesce at a consistent cut, write their state to files, and resume.
//!
//! ```text
//! node 0                                  every node (node 0 too)
//!   Hold ──────────────────────────────▶  holds end, vCPUs leave the guest; requested pages still arrive
//!   ◀────────────────────────────── Still
//!   Count ─────────────────────────────▶  idle? messages sent and received so far
//!   ◀──────────────────────────── Counted  … until two rounds are the same: all idle, as many received as sent
//!   Save ──────────────────────────────▶  node-N-NUMBER.ckpt: vCPUs, owned pages, owners of pages; synced
//!   ◀────────────────────────────── Saved
//!   node 0 replaces checkpoint.json, which commits the checkpoint
//!   Go ────────────────────────────────▶  older files are removed, vCPUs run
//! ```
//!
//! The cut is consistent because nothing is in flight, which two equal rounds of counts prove (F. Mattern, *Algorithms for distributed
//! termination detection*, 1987: four counters). Copies, modes and versions aren't saved, since nodes rebuild them ([`dsm::node::saved`]).
//!
//! | module | contents |
//! |---|---|
//! | `file` | node files and the list, each written atomically |
//! | `member` | a node's part in a checkpoint |
//! | `coordinator` | node 0's part: when, and in which order |

mod coordinator;
mod file;
mod member;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub(super) use coordinator::{Plan, serve};
pub(super) use file::{List, Listed, make_folder};
pub(super) use member::{Counted, Member, Restored, another_program, restore};

/// Folder and interval of checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoints {
    /// The folder on each node's host. Nodes of one host may share it.
    pub folder: PathBuf,
    /// Pause from the end of one checkpoint to the start of the next.
    pub every: Duration,
}

impl Checkpoints {
    /// Creates the folder and its parents, unless they exist.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn make_folder(&self) -> Result<(), CheckpointError> {
        make_folder(&self.folder)
    }
}

/// Messages about checkpoints. Except `Look`, the number is that of the checkpoint or, in `Count` and `Counted`, of the round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Step {
    /// From node 0: quiesce for this checkpoint.
    Hold(u64),
    /// To node 0: this node is quiescent, or why it can't be.
    Still(u64, Result<(), String>),
    /// From node 0: report counts.
    Count(u64),
    /// To node 0: the counts.
    Counted(u64, Counted),
    /// From node 0: write the file. `token` is the sequencer.
    Save { number: u64, token: u8 },
    /// To node 0: the file is written, or why it isn't.
    Saved(u64, Result<Listed, Refused>),
    /// From node 0: resume. The number is that of a checkpoint that is complete now, if any.
    Go(Option<u64>),
    /// From node 0, before anything runs: restore this file.
    Restore(Listed),
    /// From this node's own threads, never sent: check whether the VM has ended.
    #[serde(skip)]
    Look,
}

/// Why a node can't be saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Refused {
    /// The VM is about to end.
    Ending,
    /// Another reason, as text for the log.
    Because(String),
}

/// Why a checkpoint can't be written, read or restored.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// An operation of the file system failed.
    #[error("The checkpoint file {path} could not be {what}")]
    File {
        /// The file.
        path: PathBuf,
        /// The operation, as a past participle.
        what: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The folder has no checkpoint.
    #[error(
        "There is no checkpoint in {0}: it has no file checkpoint.json; give the folder that --checkpoint was given on node 0's host"
    )]
    None(PathBuf),
    /// The file's content is inconsistent.
    #[error(
        "The checkpoint file {path} is damaged: {reason}; go on from another checkpoint, or run the VM from its start"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The inconsistency.
        reason: String,
    },
    /// The file has another version.
    #[error(
        "The checkpoint file {path} has version {found}; this program reads version {known}: go on with the program that wrote it, or run the VM from its start"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The version that it has.
        found: u32,
        /// The version that this program reads.
        known: u32,
    },
    /// The checkpoint is of another VM.
    #[error("The checkpoint in {path} is of another VM: {reason}")]
    Other {
        /// The file.
        path: PathBuf,
        /// The difference, and what to do.
        reason: String,
    },
    /// KVM or the protocol refused the state.
    #[error("The checkpoint file {path} can't be restored")]
    State {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
