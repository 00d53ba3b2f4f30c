//! The control API's view of the running VM.

use std::collections::BTreeMap;
use std::sync::Arc;

use ::machine::stats::KernelStats;
use control_api::migration::MigrationPhase;
use control_api::types::{ExitTable, NicBehind, VcpuExits, VmState, VmSummary};
use serde_json::{Map, Value, json};
use telemetry::metrics::Family;

use super::error::Error;
use super::event::Event;
use super::machine::Machine;
use super::{metrics, vcpus};
use crate::api::{ControlError, VmControl};
use crate::description::Guest;
use crate::migration::postcopy::fetching::Fetching;
use crate::migration::progress::ProgressReporter;
use crate::nic::{ChangeError, NicHandle};
use crate::sandbox::Report;

/// Implements the API over a [`Machine`].
pub struct Control {
    machine: Arc<Machine>,
    sandbox: Report,
    migration: Arc<ProgressReporter>,
    fetching: Option<Fetching>,
}

impl Control {
    /// `sandbox` is the device tree's report about confinement; `fetching` is the state of a post-copy.
    pub fn new(
        machine: Arc<Machine>,
        sandbox: Report,
        migration: Arc<ProgressReporter>,
        fetching: Option<Fetching>,
    ) -> Self {
        Self { machine, sandbox, migration, fetching }
    }

    /// Fails if the VM is in doubt, unless its user has forced the command.
    fn certain(&self, command: &str, forced: bool) -> Result<(), ControlError> {
        if *self.machine.state() != VmState::InDoubt {
            return Ok(());
        }
        if forced {
            tracing::warn!(
                "The user forced a VM in doubt to run here: if it runs at its destination as well, both write its disks"
            );
            return Ok(());
        }
        let why = self.migration.progress().and_then(|progress| progress.problem).unwrap_or_default();
        let asked = if self.machine.description.rdma.is_empty() {
            "There is no cluster service to ask: check the destination"
        } else {
            "The monitor keeps asking the cluster service, and resumes or ends the VM as soon as the decision is known"
        };
        Err(ControlError::NotNow {
            reason: format!(
                "The VM is in doubt: it may run at the destination of its migration. {asked}. If it certainly doesn't run there, `causeway {command} --force` runs it here; if it does, two copies write the same disks. {why}"
            ),
        })
    }

    fn require(&self, what: &'static str, allowed: &[VmState]) -> Result<(), ControlError> {
        let state = *self.machine.state();
        if allowed.contains(&state) { Ok(()) } else { Err(ControlError::WrongState { state, what }) }
    }
}

fn failed(what: &'static str) -> impl FnOnce(Error) -> ControlError {
    move |source| ControlError::Failed { what, source: Box::new(source) }
}

impl VmControl for Control {
    fn summary(&self) -> VmSummary {
        let description = &self.machine.description;
        VmSummary {
            name: description.name.clone(),
            pid: std::process::id(),
            state: *self.machine.state(),
            guest: match &description.guest {
                Guest::Linux(linux) => linux.kernel.display().to_string(),
                Guest::Payload(payload) => payload.program.display().to_string(),
            },
            vcpus: description.cpus.count().into(),
            memory_bytes: description.memory.size,
            uptime_seconds: self.machine.started.elapsed().as_secs_f64(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            rdma_nics: u32::try_from(description.rdma.len()).unwrap_or(u32::MAX),
            waits_for: self.migration.progress().and_then(|progress| progress.waits_for),
        }
    }

    fn inspect(&self) -> Value {
        let machine = &self.machine;
        let mut platform = Map::new();
        platform.insert("power".to_owned(), machine.devices.power.inspect());
        if let Some(serial) = &machine.devices.serial {
            platform.insert("com1".to_owned(), serial.inspect());
        }
        let ranges = |space: &::machine::bus::AddressSpace| -> Value {
            let entry = |range: ::machine::bus::RangeInfo| json!({ "name": range.name, "start": format!("{:#x}", range.start), "len": range.len });
            space.ranges().into_iter().map(entry).collect()
        };
        json!({
            "summary": self.summary(),
            "description": machine.description,
            "memory": {
                "slots": machine.vm.slots().list(),
                "ranges": machine.ram().layout().ranges(),
            },
            "buses": { "ports": ranges(&machine.ports), "memory": ranges(&machine.memory) },
            "platform": platform,
            "pci": machine.root.inspect(),
            "vcpus": vcpus::inspect(&machine.vcpus),
            "irqchip": vcpus::inspect_irqchip(machine),
            "exits": self.exits(),
            "sandbox": self.sandbox,
            "post_copy": self.fetching.as_ref().map_or(Value::Null, |fetching| metrics::post_copy_tree(&fetching.report())),
            "migration": self.migration.progress().map_or_else(|| json!({ "phase": "none" }), |progress| json!(progress)),
        })
    }

    fn pause(&self) -> Result<(), ControlError> {
        self.require("be paused", &[VmState::Running, VmState::Paused])?;
        self.machine.pause().map_err(failed("pause"))
    }

    fn resume(&self, forced: bool) -> Result<(), ControlError> {
        self.certain("resume", forced)?;
        self.require("be resumed", &[VmState::Running, VmState::Paused, VmState::InDoubt])?;
        self.machine.resume().map_err(failed("resume"))
    }

    fn change_nic(&self, nic: &str, behind: NicBehind) -> Result<(), ControlError> {
        self.require("change its NICs", &[VmState::Running])?;
        let Some(found) = self.machine.devices.nics.iter().find(|one| one.name() == nic) else {
            let names: Vec<&str> = self.machine.devices.nics.iter().map(NicHandle::name).collect();
            let has = if names.is_empty() {
                "it has none".to_owned()
            } else {
                format!("it has {}", names.join(", "))
            };
            return Err(ControlError::NotNow {
                reason: format!("This VM has no commodity NIC {nic}; {has}"),
            });
        };
        found.change(behind).map_err(|error| match error {
            ChangeError::Failed { .. } | ChangeError::Interrupt { .. } => {
                ControlError::Failed { what: "change its NIC", source: Box::new(error) }
            }
            ChangeError::One { .. } => {
                ControlError::Unsupported { what: "change its NIC", reason: error.to_string() }
            }
            _ => ControlError::NotNow { reason: error.to_string() },
        })
    }

    fn cancel_migration(&self) -> Result<(), ControlError> {
        self.migration.cancel().map_err(|error| ControlError::NotNow { reason: error.to_string() })
    }

    fn power_button(&self) -> Result<(), ControlError> {
        self.require("press its power button", &[VmState::Running])?;
        self.machine.devices.power.press_button().map_err(|source| ControlError::Failed {
            what: "press the power button",
            source: Box::new(source),
        })
    }

    fn reset(&self, forced: bool) -> Result<(), ControlError> {
        self.certain("reset", forced)?;
        self.require("be reset", &[VmState::Running, VmState::Paused, VmState::InDoubt])?;
        self.machine.events.send(Event::Reset { forced });
        Ok(())
    }

    fn stop(&self) -> Result<(), ControlError> {
        let progress = self.migration.progress();
        if let Some(progress) = progress.filter(|progress| progress.phase == MigrationPhase::PostCopy) {
            let reason = format!(
                "The VM runs at {}, and {} pages of its memory are still here: end it there, or wait",
                progress.destination, progress.pages_left
            );
            return Err(ControlError::NotNow { reason });
        }
        self.machine.events.send(Event::Stop);
        Ok(())
    }

    fn exits(&self) -> ExitTable {
        let snapshot = self.machine.vcpus.exits();
        let mut kernel: BTreeMap<String, u64> = BTreeMap::new();
        for (_, stats) in self.machine.vcpus.kernel_stats() {
            if let KernelStats::Counters(stats) = stats {
                for (name, value) in stats {
                    *kernel.entry(name).or_default() += value;
                }
            }
        }
        ExitTable {
            total: snapshot.total(),
            causes: snapshot.causes(),
            ranges: snapshot.ranges(),
            vcpus: snapshot
                .vcpus
                .into_iter()
                .map(|vcpu| VcpuExits {
                    vcpu: vcpu.vcpu,
                    total: vcpu.total,
                    causes: vcpu.causes,
                    ranges: vcpu.ranges,
                })
                .collect(),
            kernel,
        }
    }

    fn metrics(&self) -> Vec<Family> {
        let mut families = metrics::families(&self.machine, &self.exits());
        families.extend(
            self.fetching.iter().flat_map(|fetching| metrics::post_copy_families(&fetching.report())),
        );
        families
    }
}
