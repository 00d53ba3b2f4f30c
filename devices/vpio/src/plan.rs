//! What KVM may handle without an exit to user space, as data: whoever wires a monitor to KVM owns the memory slots and zones and applies
//! the plan; it changes only with the hook list, so at coarse transitions.
//!
//! KVM decides by page: a page of a memory BAR is mapped, mapped read-only over a shadow page that the monitor keeps fresh, or traps.
//! Port reads always leave the guest. Writes that may be late wait in a coalescing ring, which is drained before anything else is done
//! for the device (spec vpio, 3.1).

use device_models::describe::{Bar, Class, Device, Event, Register};
use device_models::model::hooks;

/// Bytes of a page.
const PAGE: u32 = 4096;

/// How a page of a memory BAR is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagePlan {
    /// The guest gets the device's own page: no exits.
    Map,
    /// The guest reads a page of the monitor's; writes trap, or are coalesced. The monitor writes the page anew after each interrupt
    /// and each write that it handles.
    ReadOnlyShadow,
    /// Every access traps.
    Trap,
}

/// Bytes of a BAR whose writes may wait in a coalescing ring, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zone {
    /// Number of the BAR.
    pub bar: u8,
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub length: u32,
}

/// What KVM may do in a set of states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Pages of memory BARs: BAR, offset of the page, treatment.
    pub pages: Vec<(u8, u32, PagePlan)>,
    /// Zones of late writes.
    pub late: Vec<Zone>,
}

/// The plan for a device in `states` (a state number per component).
pub fn plan(device: &'static Device, states: &[u8]) -> Plan {
    let hooked = hooks(device, states);
    let (mut pages, mut late) = (Vec::new(), Vec::new());
    for (number, bar) in (0u8..).zip(device.bars) {
        let (Bar::Memory(size) | Bar::Ports(size)) = *bar else { continue };
        if matches!(bar, Bar::Memory(_)) {
            for page in (0..size.div_ceil(PAGE)).map(|page| page * PAGE) {
                pages.push((number, page, page_plan(device, page)));
            }
        }
        let may_wait = |offset: u32| {
            // Whatever bank is selected when the ring is drained: the writes before it are drained first, so each of them must be late.
            let mut any = false;
            let all =
                device.numbered().filter(|(_, register)| register.write.is_some()).all(|(reg, register)| {
                    if !(0..8).any(|bank| register.is_at(offset, bank)) {
                        return true;
                    }
                    any = true;
                    register.write == Some(Class::Deny) || register.late && !hooked.contains(&reg)
                });
            any && all
        };
        for offset in 0..size {
            if !may_wait(offset) {
                continue;
            }
            match late.last_mut() {
                Some(Zone { bar, offset: start, length }) if *bar == number && *start + *length == offset => {
                    *length += 1
                }
                _ => late.push(Zone { bar: number, offset, length: 1 }),
            }
        }
    }
    Plan { pages, late }
}

fn page_plan(device: &'static Device, page: u32) -> PagePlan {
    let here = |register: &Register| {
        register
            .offset
            .iter()
            .chain(register.aliases)
            .any(|&at| at < page + PAGE && at + register.span > page)
    };
    let inside = || device.numbered().filter(|(_, register)| here(register));
    if inside().next().is_none() {
        return PagePlan::Trap;
    }
    let free = |class: Option<Class>| matches!(class, None | Some(Class::Free));
    if inside().all(|(_, register)| free(register.read) && free(register.write)) {
        return PagePlan::Map;
    }
    let read_has_effect = |reg| {
        device
            .transitions
            .iter()
            .any(|transition| matches!(transition.event, Event::Read(read) if read == reg))
    };
    if inside().any(|(reg, register)| read_has_effect(reg) || register.span > u32::from(register.width)) {
        PagePlan::Trap
    } else {
        PagePlan::ReadOnlyShadow
    }
}

#[cfg(test)]
mod tests {
    use device_models::devices::ne2000::{NE2000, RUNNING, STOPPED};

    use super::{Zone, plan};

    /// The NE2000's data port is coalesced, its command register never; what a running receiver makes checked isn't either.
    #[test]
    fn late_writes_of_the_ne2000() {
        let mut states = vec![0; NE2000.components.len()];
        states[usize::from(STOPPED.component)] = STOPPED.number;
        let stopped = plan(&NE2000, &states);
        assert!(stopped.pages.is_empty(), "ports have no pages");
        let covers = |zones: &[Zone], offset: u32| {
            zones.iter().any(|zone| (zone.offset..zone.offset + zone.length).contains(&offset))
        };
        assert!(covers(&stopped.late, 0x0D), "TCR");
        assert!(!covers(&stopped.late, 0x00), "CR");
        states[usize::from(RUNNING.component)] = RUNNING.number;
        let running = plan(&NE2000, &states);
        assert!(!covers(&running.late, 0x02), "PSTOP is checked while the receiver runs");
    }
}
