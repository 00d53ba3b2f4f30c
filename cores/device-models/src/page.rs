//! A reference page of a device from its description: registers, states (as mermaid diagrams), transitions, windows and
//! context.

use std::fmt::Write;

use crate::describe::{Check, Class, Cond, Device, Effect, Event, Named, Space, State, Step};

/// Returns the page in Markdown.
pub fn page(device: &Device) -> String {
    let mut out = String::new();
    // Writing to a string can't fail.
    let _ = write_page(device, &mut out);
    out
}

fn write_page(device: &Device, out: &mut String) -> std::fmt::Result {
    writeln!(out, "# {}\n\n{}.\n", device.title, device.source)?;
    let pci = &device.pci;
    writeln!(
        out,
        "PCI {:04X}:{:04X}, class {:06X}, revision {:02X}; bus mastering: {:?}.\n",
        pci.vendor, pci.device, pci.class, pci.revision, pci.bus_master
    )?;
    registers(device, out)?;
    writeln!(out, "\n## States\n")?;
    for (number, component) in (0u8..).zip(device.components) {
        writeln!(out, "### {}\n\n```mermaid", component.name)?;
        writeln!(out, "{}```\n", picture(device, number))?;
    }
    transitions(device, out)?;
    windows(device, out)?;
    context(device, out)
}

fn registers(device: &Device, out: &mut String) -> std::fmt::Result {
    writeln!(
        out,
        "## Registers\n\nClasses: F free, S shadowed, V virtual, C checked, D checked and can start DMA or the card's own engine, X denied.\n"
    )?;
    writeln!(
        out,
        "| register | offset | banks | bytes | read | write | after reset | |\n|---|---|---|---|---|---|---|---|"
    )?;
    for register in device.registers {
        let letter = |class: Option<Class>| class.map_or('-', Class::letter);
        let offset = register.offset.map_or("-".to_owned(), |offset| format!("{offset:X}"));
        let banks = match register.banks {
            0xFF => "all".to_owned(),
            banks => (0..8)
                .filter(|bank| banks >> bank & 1 == 1)
                .map(|bank| bank.to_string())
                .collect::<Vec<_>>()
                .join(" "),
        };
        writeln!(
            out,
            "| {} | {offset} | {banks} | {} | {} | {} | {:X} | {} |",
            register.name,
            register.width,
            letter(register.read),
            letter(register.write),
            register.reset,
            register.about
        )?;
    }
    Ok(())
}

fn windows(device: &Device, out: &mut String) -> std::fmt::Result {
    writeln!(out, "## Memory that the device touches by itself\n")?;
    writeln!(out, "| window | where | first byte | bytes at most | when |\n|---|---|---|---|---|")?;
    for window in device.windows {
        let space = match window.space {
            Space::Card { from, to } => format!("card, {from:X}h to {to:X}h"),
            Space::Guest => "all of the guest's memory".to_owned(),
            Space::Host { bits } => format!("host, {bits} bits"),
        };
        writeln!(
            out,
            "| {} ({:?}) | {space} | {} | {} | {} |",
            window.name,
            window.direction,
            Named(device, &window.base),
            Named(device, &window.length),
            Named(device, &window.active)
        )?;
    }
    Ok(())
}

fn context(device: &Device, out: &mut String) -> std::fmt::Result {
    let reusable: Vec<String> = device.reusable.iter().map(|&state| device.state_name(state)).collect();
    writeln!(out, "\n## Context\n\nReusable when {}.\n", reusable.join(", "))?;
    for (title, steps) in [
        ("Settle", device.context.settle),
        ("Freeze", device.context.freeze),
        ("Save", device.context.save),
        ("Restore", device.context.restore),
    ] {
        writeln!(out, "{title}:\n")?;
        for step in steps {
            steps_text(device, step, out, 0)?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn transitions(device: &Device, out: &mut String) -> std::fmt::Result {
    writeln!(
        out,
        "## Transitions\n\n| event | in | given | checks | effects | |\n|---|---|---|---|---|---|"
    )?;
    for transition in device.transitions {
        let states: Vec<String> = transition.states.iter().map(|&state| device.state_name(state)).collect();
        let given = match transition.given {
            Cond::Always => String::new(),
            ref condition => Named(device, condition).to_string(),
        };
        let checks: Vec<String> = transition.checks.iter().map(|check| check_text(device, check)).collect();
        let effects: Vec<String> =
            transition.effects.iter().map(|effect| effect_text(device, effect)).collect();
        writeln!(
            out,
            "| {} | {} | {given} | {} | {} | {} |",
            event_text(device, transition.event),
            states.join(", "),
            checks.join("; "),
            effects.join("; "),
            transition.about
        )?;
    }
    writeln!(out)
}

fn event_text(device: &Device, event: Event) -> String {
    match event {
        Event::Write(reg) => format!("write {}", device.register(reg).name),
        Event::Read(reg) => format!("read {}", device.register(reg).name),
        Event::Returned(reg) => format!("{} returned", device.register(reg).name),
        Event::Cause(bits) => format!("cause {bits:X}h"),
    }
}

fn check_text(device: &Device, check: &Check) -> String {
    match check {
        Check::Standing(window) => format!("window '{}' in advance", device.windows[window.index()].name),
        Check::Window(window) => format!("window '{}'", device.windows[window.index()].name),
        Check::Rule(text, _) => (*text).to_owned(),
        Check::Refuse(text) => format!("refused: {text}"),
        Check::Allowed(permission) => format!("permission {permission:?}"),
    }
}

fn effect_text(device: &Device, effect: &Effect) -> String {
    match effect {
        Effect::Enter(state) => device.state_name(*state),
        Effect::Raise(bits) => format!("raise {bits:X}h"),
        Effect::Lower(bits) => format!("lower {bits:X}h"),
        Effect::Store(reg, expr) => format!("{} := {}", device.register(*reg).name, Named(device, expr)),
        Effect::Device(reg, expr) => {
            format!("device's {} := {}", device.register(*reg).name, Named(device, expr))
        }
        Effect::Answer(expr) => format!("answer {}", Named(device, expr)),
        Effect::Forget(window) => format!("forget window '{}'", device.windows[window.index()].name),
        Effect::Look(reg) => format!("look at {}", device.register(*reg).name),
        Effect::Reset => "reset".to_owned(),
    }
}

fn steps_text(device: &Device, step: &Step, out: &mut String, depth: usize) -> std::fmt::Result {
    let name = |reg: &crate::describe::Reg| device.register(*reg).name;
    write!(out, "{}- ", "  ".repeat(depth))?;
    match step {
        Step::Reset => writeln!(out, "reset"),
        Step::Write(reg, expr) => writeln!(out, "{} := {}", name(reg), Named(device, expr)),
        Step::Read(reg) => writeln!(out, "remember {}", name(reg)),
        Step::Await(reg, mask, value, times) => {
            writeln!(out, "until {}.{mask:X}h = {value:X}h, at most {times} times", name(reg))
        }
        Step::Enter(state) => writeln!(out, "{}", device.state_name(*state)),
        Step::Table(reg) => writeln!(out, "write what the guest wrote into {}", name(reg)),
        Step::FastForward => writeln!(out, "move the ring pointers by frames to itself"),
        Step::Harvest => writeln!(out, "take causes into the virtual status"),
        Step::SaveMemory => writeln!(out, "save live memory of the card"),
        Step::RestoreMemory => writeln!(out, "restore memory of the card, scrub the rest"),
        Step::Recheck => writeln!(out, "validate all windows in use anew"),
        Step::Learn(reg) => writeln!(out, "take {} as if the guest had written it", name(reg)),
        Step::LearnTable(reg) => {
            writeln!(out, "take the words of {} as if the guest had written them", name(reg))
        }
        Step::All(steps) => {
            writeln!(out, "in order")?;
            steps.iter().try_for_each(|step| steps_text(device, step, out, depth + 1))
        }
        Step::If(condition, steps) => {
            writeln!(out, "if {}", Named(device, condition))?;
            steps.iter().try_for_each(|step| steps_text(device, step, out, depth + 1))
        }
    }
}

/// Returns the states of one component as a mermaid state diagram.
pub fn picture(device: &Device, component: u8) -> String {
    let of = &device.components[usize::from(component)];
    let mut edges: Vec<String> = vec![format!("    [*] --> {}", of.states[0])];
    for transition in device.transitions {
        for effect in transition.effects {
            let to = match effect {
                Effect::Enter(State { component: at, number }) if *at == component => {
                    of.states[usize::from(*number)]
                }
                Effect::Reset => of.states[0],
                _ => continue,
            };
            let from: Vec<&str> = transition
                .states
                .iter()
                .filter(|state| state.component == component)
                .map(|state| of.states[usize::from(state.number)])
                .collect();
            let from = if from.is_empty() { of.states.to_vec() } else { from };
            let label = if transition.checks.is_empty() { "" } else { " (checked)" };
            for from in from.into_iter().filter(|from| *from != to) {
                edges.push(format!("    {from} --> {to}: {}{label}", event_text(device, transition.event)));
            }
        }
    }
    edges.sort();
    edges.dedup();
    format!("stateDiagram-v2\n{}\n", edges.join("\n"))
}

#[cfg(test)]
mod tests {
    use crate::devices;

    /// The page names every register, state and window of the description.
    #[test]
    fn the_page_is_complete() {
        for device in devices::ALL {
            let page = super::page(device);
            for name in device
                .registers
                .iter()
                .map(|register| register.name)
                .chain(device.components.iter().flat_map(|component| component.states.iter().copied()))
                .chain(device.windows.iter().map(|window| window.name))
            {
                assert!(page.contains(name), "{}: {name}", device.name);
            }
            assert_eq!(page.matches("stateDiagram-v2").count(), device.components.len());
        }
    }

    #[test]
    fn descriptions_have_no_problems() {
        for device in devices::ALL {
            assert_eq!(device.problems(), Vec::<String>::new(), "{}", device.name);
        }
    }
}
