//! Traces of refused requests, and their replay.
//!
//! A recorder keeps the inputs of a guest's model since a known state: accesses, values from the device, causes, and
//! decisions on grants. A model depends on nothing else. So a trace can be replayed without device, guest or memory.
//!
//! In a file, each violation is a line of JSON ([`Violation::line`], [`read`]), which a monitor appends.
//! [`decides_as_before`] checks whether this program still decides the same.

use device_models::Access;
use device_models::describe::{Device, Direction, Permission};
use device_models::graph::truncated;
use device_models::model::{Denied, Granted, Grants, Model, Reads, Refusal};
use device_models::saved::{RestoreError, SavedModel};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Limit of events in a recorder. Beyond it the recorder restarts from the model's current state.
pub const KEPT: usize = 1024;

/// An input of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Told {
    /// An access of the guest.
    Access(Access),
    /// The value that the device returned to a read during the previous access.
    Returned(u32),
    /// A window was granted, at this device address.
    Granted(u64),
    /// A window wasn't granted, for this reason.
    Withheld(String),
    /// Causes from the device.
    Cause(u32),
    /// Causes that the guest has read from its shadow page.
    WasRead(u32),
}

/// A refused request with its history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// The guest's name.
    pub guest: String,
    /// The refused request.
    pub refusal: Refusal,
    /// The guest's permissions.
    pub permissions: Vec<Permission>,
    /// The model's state before the events.
    pub start: SavedModel,
    /// The model's inputs. The last one is the refused access.
    pub told: Vec<Told>,
    /// Number of earlier refused accesses in the trace.
    pub earlier: usize,
}

/// A file of violations, or one of them, is invalid.
#[derive(Debug, Error)]
pub enum TraceError {
    /// A line isn't a violation.
    #[error("Line {number} is no violation")]
    Line {
        /// Line number, from 1.
        number: usize,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// This program has no description of the device.
    #[error("There is no description of the device '{0}'")]
    Device(String),
    /// The description has changed.
    #[error(transparent)]
    State(#[from] RestoreError),
    /// This program decides differently.
    #[error("After {earlier} other refusals it was decided: {recorded} Now, after {others}: {now}")]
    Otherwise {
        /// Number of recorded refusals before the last one.
        earlier: usize,
        /// The recorded refusal.
        recorded: Refusal,
        /// Number of refusals before the last access in the replay.
        others: usize,
        /// The replay's refusal of the last access, or that it refused none.
        now: String,
    },
}

impl Violation {
    /// Returns the violation as a line of a file.
    ///
    /// # Errors
    /// None in practice: all parts have a JSON form.
    pub fn line(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(self).map(|text| text + "\n")
    }
}

/// Reads the violations of a file, one per line.
///
/// # Errors
/// Names the first invalid line. This may be an incomplete last line.
pub fn read(text: &str) -> Result<Vec<Violation>, TraceError> {
    let parse =
        |(at, line)| serde_json::from_str(line).map_err(|source| TraceError::Line { number: at + 1, source });
    text.lines().enumerate().map(parse).collect()
}

/// Checks that this program refuses the same request for the same reason, after the same number of earlier refusals.
///
/// # Errors
/// The decisions differ, or the trace doesn't fit this program.
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

/// Records the inputs of a model.
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

    /// Between two accesses: drops the history if it is long.
    pub fn trim(&mut self, model: &Model) {
        if self.told.len() >= KEPT {
            self.restart(model);
        }
    }

    /// Drops the history and restarts from the model's current state.
    pub fn restart(&mut self, model: &Model) {
        self.start = model.save();
        self.told.clear();
        self.refused = 0;
    }

    pub fn access(&mut self, access: Access) {
        self.told.push(Told::Access(access));
    }

    /// Records a register read that the monitor made for the model.
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

    /// Records that the last access was refused.
    pub fn refused(&mut self) {
        self.refused += 1;
    }

    /// Returns the trace of the last access, which was refused.
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

/// Grants as recorded.
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

/// Feeds the trace to a new model. Returns the refusals in order. The last one is the violation's own if the program
/// still decides the same.
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
            // The registers that the monitor read after the causes follow in the trace.
            Told::Cause(causes) => drop(model.cause(*causes)),
            Told::WasRead(causes) => model.was_read(*causes),
            // Belongs to an access that no longer needs it.
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
