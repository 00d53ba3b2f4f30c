//! Traces of refused requests, and their replay.
//!
//! A recorder keeps what a guest's model was told since a known state: accesses, the values that the device returned, causes, and how
//! grants were decided. That is all that a model depends on, so a trace is replayed without device, guest or memory.
//!
//! In a file each is a line of JSON ([`Violation::line`], [`read`]): monitors append them, and [`decides_as_before`] says of each whether this program
//! still decides so.

use device_models::Access;
use device_models::describe::{Device, Direction, Permission};
use device_models::graph::truncated;
use device_models::model::{Denied, Granted, Grants, Model, Reads, Refusal};
use device_models::saved::{RestoreError, SavedModel};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Events that a recorder keeps; then it starts again from the state of that moment.
pub const KEPT: usize = 1024;

/// What a model was told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Told {
    /// The guest's access.
    Access(Access),
    /// What the device returned to a read within the access before.
    Returned(u32),
    /// A window was granted: the device's address.
    Granted(u64),
    /// A window wasn't granted: why.
    Withheld(String),
    /// Causes of the device.
    Cause(u32),
    /// Causes that the guest has read where nobody saw it.
    WasRead(u32),
}

/// A request that was refused, with all that led to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// Name of the guest.
    pub guest: String,
    /// The refused request.
    pub refusal: Refusal,
    /// What the guest may do.
    pub permissions: Vec<Permission>,
    /// The model before the events.
    pub start: SavedModel,
    /// What it was told; the refused access is the last one.
    pub told: Vec<Told>,
    /// How many of these accesses were refused before it.
    pub earlier: usize,
}

/// A file of violations, or one of them, is of no use.
#[derive(Debug, Error)]
pub enum TraceError {
    /// A line isn't a violation.
    #[error("Line {number} is no violation")]
    Line {
        /// Which, from 1.
        number: usize,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A device that this program has no description of.
    #[error("There is no description of the device '{0}'")]
    Device(String),
    /// A description that has changed.
    #[error(transparent)]
    State(#[from] RestoreError),
    /// It is decided in another way.
    #[error("After {earlier} other refusals it was decided: {recorded} Now, after {others}: {now}")]
    Otherwise {
        /// How many requests were refused then, before it.
        earlier: usize,
        /// What was refused then.
        recorded: Refusal,
        /// How many are refused now, before the last one.
        others: usize,
        /// What is refused now, or that nothing is.
        now: String,
    },
}

impl Violation {
    /// It as a line of a file.
    ///
    /// # Errors
    /// None that can be brought about: all of it has a form in JSON.
    pub fn line(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(self).map(|text| text + "\n")
    }
}

/// The violations of a file, one a line.
///
/// # Errors
/// Names the first line that is none. A last line that its writer didn't come to the end of is one.
pub fn read(text: &str) -> Result<Vec<Violation>, TraceError> {
    let parse =
        |(at, line)| serde_json::from_str(line).map_err(|source| TraceError::Line { number: at + 1, source });
    text.lines().enumerate().map(parse).collect()
}

/// Whether this program refuses what was refused, for the same reason, and as many requests before it.
///
/// # Errors
/// It doesn't, or the trace isn't for this program.
pub fn decides_as_before(violation: &Violation) -> Result<(), TraceError> {
    let name = &violation.start.device;
    let device = device_models::devices::named(name).ok_or_else(|| TraceError::Device(name.clone()))?;
    let refusals = replay(device, violation)?;
    let others = refusals.len().saturating_sub(1);
    if refusals.last() == Some(&violation.refusal) && others == violation.earlier {
        return Ok(());
    }
    let now = refusals.last().map_or_else(|| "nothing is refused".to_owned(), ToString::to_string);
    let Violation { earlier, refusal: recorded, .. } = violation.clone();
    Err(TraceError::Otherwise { earlier, recorded, others, now })
}

/// Keeps what a model is told.
#[derive(Debug)]
pub(crate) struct Recorder {
    start: SavedModel,
    told: Vec<Told>,
    refused: usize,
}

impl Recorder {
    pub fn new(model: &Model) -> Self {
        Self { start: model.save(), told: Vec::new(), refused: 0 }
    }

    /// Between two accesses: forgets the past when there is much of it.
    pub fn trim(&mut self, model: &Model) {
        if self.told.len() >= KEPT {
            self.restart(model);
        }
    }

    /// Forgets the past: it starts in the model's present state.
    pub fn restart(&mut self, model: &Model) {
        self.start = model.save();
        self.told.clear();
        self.refused = 0;
    }

    pub fn access(&mut self, access: Access) {
        self.told.push(Told::Access(access));
    }

    /// The monitor itself reads a register, for the model.
    pub fn read(&mut self, offset: u32, size: u8, raw: u32) {
        self.told.push(Told::Access(Access { bar: 0, offset, size, write: None }));
        self.told.push(Told::Returned(raw));
    }

    pub fn returned(&mut self, raw: u32) {
        self.told.push(Told::Returned(raw));
    }

    pub fn granted(&mut self, verdict: &Result<u64, Denied>) {
        self.told.push(match verdict {
            Ok(address) => Told::Granted(*address),
            Err(why) => Told::Withheld(why.0.clone()),
        });
    }

    pub fn cause(&mut self, causes: u32) {
        self.told.push(Told::Cause(causes));
    }

    pub fn was_read(&mut self, causes: u32) {
        self.told.push(Told::WasRead(causes));
    }

    /// The last access was refused.
    pub fn refused(&mut self) {
        self.refused += 1;
    }

    /// The trace of the last access, which was refused.
    pub fn violation(&self, guest: &str, permissions: &[Permission], refusal: Refusal) -> Violation {
        Violation {
            guest: guest.to_owned(),
            refusal,
            permissions: permissions.to_vec(),
            start: self.start.clone(),
            told: self.told.clone(),
            earlier: self.refused.saturating_sub(1),
        }
    }
}

/// Decides as it was decided.
struct AsRecorded<'a> {
    told: &'a [Told],
    at: usize,
    permissions: &'a [Permission],
}

impl Grants for AsRecorded<'_> {
    fn grant(&mut self, _: u64, _: u64, _: Direction) -> Result<u64, Denied> {
        let verdict = self.told.get(self.at).cloned();
        self.at += 1;
        match verdict {
            Some(Told::Granted(address)) => Ok(address),
            Some(Told::Withheld(why)) => Err(Denied(why)),
            _ => Err(Denied("wasn't asked for when the trace was recorded".to_owned())),
        }
    }
    fn grant_all(&mut self, direction: Direction) -> Result<(), Denied> {
        self.grant(0, 0, direction).map(drop)
    }
    fn release_all(&mut self) {}
    fn release(&mut self, _: Granted, _: Direction) {}
    fn allows(&self, permission: Permission) -> bool {
        self.permissions.contains(&permission)
    }
}

/// Tells a fresh model what is in the trace: the refusals that follow, in order. The last one is the violation's own when the program
/// still decides as it did.
///
/// # Errors
/// The trace starts in a state that this program's description doesn't have.
pub fn replay(device: &'static Device, violation: &Violation) -> Result<Vec<Refusal>, RestoreError> {
    let mut model = Model::restore(device, &violation.start)?;
    let mut refusals = Vec::new();
    let mut grants = AsRecorded { told: &violation.told, at: 0, permissions: &violation.permissions };
    while let Some(told) = violation.told.get(grants.at) {
        grants.at += 1;
        match told {
            Told::Access(access) => replay_access(&mut model, *access, &mut grants, &mut refusals),
            // The registers that the monitor looked at then follow in the trace.
            Told::Cause(causes) => drop(model.cause(*causes)),
            Told::WasRead(causes) => model.was_read(*causes),
            // Belongs to an access that needed it less than when it was recorded.
            Told::Returned(_) | Told::Granted(_) | Told::Withheld(_) => {}
        }
    }
    Ok(refusals)
}

fn replay_access(
    model: &mut Model,
    access: Access,
    grants: &mut AsRecorded<'_>,
    refusals: &mut Vec<Refusal>,
) {
    let device = model.device();
    let mut done = 0;
    while done < access.size {
        let piece = model.graph().piece(
            device,
            access.offset.saturating_add(u32::from(done)),
            access.size - done,
            access.write.is_some(),
        );
        match access.write {
            Some(value) => match model.write(piece, truncated(value >> (8 * done), piece.bytes), grants) {
                Ok(writes) => model.give_back(&writes.released, grants),
                Err(refusal) => {
                    refusals.push(refusal);
                    return;
                }
            },
            None => {
                if model.read(piece) == Reads::Ask
                    && let Some(Told::Returned(raw)) = grants.told.get(grants.at)
                {
                    grants.at += 1;
                    model.returned(piece, *raw);
                }
            }
        }
        done += piece.bytes;
    }
}
