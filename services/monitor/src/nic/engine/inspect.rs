//! The engine in the live tree of the VM.

use device_models::describe::Device;
use serde_json::{Value, json};
use vpio::vfio::Vfio;

use super::{Engine, Mode};
use crate::nic::backend::Backend;
use crate::nic::guarded::Guarded;
use crate::nic::wire::counted;

impl Engine {
    pub(in crate::nic) fn inspect(&self) -> Value {
        let counters = &self.counters;
        let mut tree = json!({
            "device": self.device.name,
            "failed": self.failed,
            "accesses": counters.accesses,
            "access_nanoseconds": counters.nanoseconds,
            "wakeups": counters.interrupts,
            "wakeup_nanoseconds": counters.interrupt_nanoseconds,
        });
        let Some(object) = tree.as_object_mut() else { return tree };
        let more = match &self.mode {
            Mode::Virtual(card) => json!({
                "mode": "virtual",
                "tap": card.wire.name,
                "counters": counted(&card.frames),
            }),
            Mode::Guarded(guarded) => inspect_guarded(self.device, guarded),
        };
        if let Value::Object(more) = more {
            object.extend(more);
        }
        tree
    }
}

fn inspect_guarded(device: &'static Device, guarded: &Guarded<Vfio>) -> Value {
    let (monitor, guest) = (&guarded.monitor, guarded.guest);
    let model = monitor.model(guest);
    let name = |reg: &device_models::describe::Reg| device.register(*reg).name;
    let windows: Vec<Value> = device
        .windows
        .iter()
        .zip(model.windows())
        .filter_map(|(window, granted)| {
            let granted = granted.as_ref()?;
            Some(json!({
                "window": window.name,
                "address": format!("{:#x}", granted.base),
                "length": granted.length,
            }))
        })
        .collect();
    let violations: Vec<String> =
        monitor.violations(guest).iter().map(|violation| violation.refusal.to_string()).collect();
    let (mapped, peak) = monitor.mapped();
    let (backend, card, way, frames) = match monitor.physical_ref() {
        Backend::Card(card) => ("card", Some(card.address()), Some(card.way().name()), None),
        Backend::Emulation(emulation) => {
            ("emulation", None, None, Some((&emulation.wire.name, counted(&emulation.frames))))
        }
    };
    if monitor.is_open() {
        let changes = guarded.changes;
        return json!({ "mode": "passthrough", "card": card, "by": way, "changes": changes, "pinned_bytes": mapped });
    }
    json!({
        "mode": "vpio",
        "behind": backend,
        "changes": guarded.changes,
        "card": card,
        "by": way,
        "tap": frames.as_ref().map(|(tap, _)| tap),
        "counters": frames.as_ref().map(|(_, counters)| counters),
        "states": device_models::model::states_text(device, model.graph().states()),
        "hooks": model.hooks().iter().map(name).collect::<Vec<_>>(),
        "windows": windows,
        "register_page": guarded.page.is_some() && !guarded.supervision.withdrawn,
        "register_page_taken": guarded.supervision.times,
        "pinned_bytes": mapped,
        "pinned_bytes_peak": peak,
        "decisions": monitor.counters(guest),
        "violations": violations,
    })
}
