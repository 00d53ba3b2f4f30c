//! Consistency rules that every description must satisfy.

use super::{Check, Class, Device, Effect, Event, Reg, Transition};

pub(super) fn problems(device: &Device) -> Vec<String> {
    let mut found = Vec::new();
    overlaps(device, &mut found);
    for transition in device.transitions {
        classes(device, transition, &mut found);
    }
    polled(device, &mut found);
    for (reg, register) in device.numbered() {
        let hooked = device
            .transitions
            .iter()
            .any(|transition| transition.event == Event::Write(reg) && !transition.checks.is_empty());
        if matches!(register.write, Some(Class::Check | Class::Dma)) && !hooked {
            found.push(format!("{}: class C or D, but no transition checks its writes", register.name));
        }
        if register.offset.is_some() && register.read.is_none() && register.write.is_none() {
            found.push(format!("{}: can be neither read nor written", register.name));
        }
    }
    found
}

/// The monitor doesn't see the reads of a page, so no read of its registers may have an effect.
fn polled(device: &Device, found: &mut Vec<String>) {
    if !device.polled.any() {
        return;
    }
    let changes = device.transitions.iter().filter(|transition| {
        matches!(transition.event, Event::Read(_))
            && transition.effects.iter().any(|effect| !matches!(effect, Effect::Answer(_)))
            // Drivers' later write clears it.
            && !(transition.event == Event::Read(device.interrupts.status)
                && device.polled.read_clears.is_some())
    });
    for transition in changes {
        found.push(format!(
            "drivers look at it without being seen, but a read changes it: {:?}",
            transition.event
        ));
    }
    if device.bank.is_some() {
        found.push("drivers look at it without being seen, but it has banks".to_owned());
    }
}

/// Two registers must not claim the same byte in the same bank for the same direction.
fn overlaps(device: &Device, found: &mut Vec<String>) {
    for (one, first) in device.numbered() {
        for (_, second) in device.numbered().filter(|(other, _)| *other > one) {
            let directions = first.read.is_some() && second.read.is_some()
                || first.write.is_some() && second.write.is_some();
            let Some(start) = first.offset else { continue };
            let meets = (start..start + first.span)
                .any(|at| (0..8).any(|bank| first.is_at(at, bank) && second.is_at(at, bank)));
            if directions && meets {
                found.push(format!("{} and {} share an offset", first.name, second.name));
            }
        }
    }
}

fn classes(device: &Device, transition: &Transition, found: &mut Vec<String>) {
    let name = |reg: Reg| device.register(reg).name;
    match transition.event {
        Event::Write(reg) => {
            let class = device.register(reg).write;
            let refuses_only = transition.checks.iter().all(|check| matches!(check, Check::Refuse(_)));
            if !transition.checks.is_empty()
                && !refuses_only
                && !matches!(class, Some(Class::Check | Class::Dma | Class::Virtual))
            {
                found.push(format!("{}: writes are checked, but its class says {class:?}", name(reg)));
            }
            if transition.checks.iter().any(|check| matches!(check, Check::Window(_) | Check::Standing(_)))
                && class == Some(Class::Free)
            {
                found.push(format!("{}: starts DMA, but its class is F", name(reg)));
            }
        }
        Event::Read(_) | Event::Returned(_) | Event::Cause(_) => {
            if !transition.checks.is_empty() {
                found.push("only a guest's write can be refused: a check stands at another event".to_owned());
            }
        }
    }
    let answers = transition.effects.iter().any(|effect| matches!(effect, Effect::Answer(_)));
    if answers && !matches!(transition.event, Event::Read(_)) {
        found.push("only a read can be answered".to_owned());
    }
}
