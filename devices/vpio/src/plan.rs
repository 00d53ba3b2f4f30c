//! What KVM may handle without an exit to user space, as data: whoever wires a monitor to KVM owns the memory slots and zones and applies
//! the plan.
//!
//! KVM decides by page: a page of a memory BAR is mapped, mapped read-only over a shadow page that the monitor keeps fresh, or traps.
//! Port reads always leave the guest. Writes that may be late wait in a coalescing ring, which is drained before anything else is done
//! for the device (spec vpio, 3.1).

use device_models::describe::{Bar, Class, Device, Effect, Event, Register};

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

/// What KVM may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Pages of memory BARs: BAR, offset of the page, treatment.
    pub pages: Vec<(u8, u32, PagePlan)>,
    /// Zones of late writes.
    pub late: Vec<Zone>,
    /// Writes of these values to memory BARs are told by an eventfd.
    pub told: Vec<Told>,
}

/// A write that only has to be known of before anything else is done for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// Number of the BAR.
    pub bar: u8,
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub bytes: u8,
    /// What is written.
    pub value: u32,
}

/// The plan for a device, the same in all of its states.
pub fn plan(device: &'static Device) -> Plan {
    let (mut pages, mut late) = (Vec::new(), Vec::new());
    for (number, bar) in (0u8..).zip(device.bars) {
        let (Bar::Memory(size) | Bar::Ports(size)) = *bar else { continue };
        if matches!(bar, Bar::Memory(_)) {
            for page in (0..size.div_ceil(PAGE)).map(|page| page * PAGE) {
                pages.push((number, page, page_plan(device, page)));
            }
        }
        for offset in (0..size).filter(|offset| may_wait(device, *offset)) {
            match late.last_mut() {
                Some(Zone { bar, offset: start, length }) if *bar == number && *start + *length == offset => {
                    *length += 1
                }
                _ => late.push(Zone { bar: number, offset, length: 1 }),
            }
        }
    }
    let told = crate::shown::bars(device).flat_map(|bar| {
        let mask = device.register(device.interrupts.mask);
        let of = move |value: &u32| {
            mask.offset.map(|offset| Told { bar, offset, bytes: mask.width, value: *value })
        };
        device.polled.masks.iter().filter_map(of)
    });
    Plan { pages, late, told: told.collect() }
}

/// Whether writes to a byte may wait, in whatever bank it is when they are taken: the writes before them, one of which may have changed it,
/// are taken first. A register that a check guards may be among them: the check comes before the device has the write, however late.
fn may_wait(device: &Device, offset: u32) -> bool {
    let written = device.numbered().filter(|(_, register)| register.write.is_some());
    let mut any = false;
    let mut here = written.filter(|(_, register)| (0..8).any(|bank| register.is_at(offset, bank)));
    let all = here.all(|(_, register)| {
        any |= register.late;
        register.late || register.write == Some(Class::Deny)
    });
    any && all
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
    let read_has_effect =
        |reg| {
            device.transitions.iter().filter(|transition| transition.event == Event::Read(reg)).any(
                |transition| transition.effects.iter().any(|effect| !matches!(effect, Effect::Answer(_))),
            )
        };
    let wide =
        || inside().any(|(reg, register)| read_has_effect(reg) || register.span > u32::from(register.width));
    if !device.polled.any() || wide() { PagePlan::Trap } else { PagePlan::ReadOnlyShadow }
}

#[cfg(test)]
mod tests {
    use device_models::devices::{e1000::E1000, ne2000::NE2000, rtl8139::RTL8139};

    use super::*;

    fn covers(device: &'static Device, bar: u8, offset: u32) -> bool {
        let zones = plan(device).late;
        zones.iter().any(|zone| zone.bar == bar && (zone.offset..zone.offset + zone.length).contains(&offset))
    }

    #[test]
    fn what_fills_a_frame_s_buffer_may_wait_and_what_sends_it_may_not() {
        // The NE2000: the data port, where the remote transfer goes, and what the frame is; not CR, nor the mask of interrupts.
        for late in [0x01, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x0B, 0x10, 0x11, 0x13] {
            assert!(covers(&NE2000, 0, late), "{late:#x}");
        }
        for prompt in [0x00, 0x0F, 0x1F] {
            assert!(!covers(&NE2000, 0, prompt), "{prompt:#x}");
        }
    }

    /// The RTL8139's page can be read, and 8139too's mask while it polls is known without an exit; the others' reads have to be seen.
    #[test]
    fn what_drivers_look_at_all_the_time_is_a_page() {
        let pages = |device| plan(device).pages.into_iter().map(|(_, _, plan)| plan).collect::<Vec<_>>();
        assert_eq!(pages(&RTL8139), [PagePlan::ReadOnlyShadow]);
        assert_eq!(plan(&RTL8139).told, [Told { bar: 1, offset: 0x3C, bytes: 2, value: 0xC02E }]);
        assert!(!pages(&E1000).contains(&PagePlan::ReadOnlyShadow) && plan(&E1000).told.is_empty());
        assert!(plan(&NE2000).told.is_empty());
    }

    #[test]
    fn acknowledged_causes_may_wait_and_requests_to_send_may_not() {
        // The RTL8139 by ports and by memory: ISR; TSD0, CR, CAPR, IMR.
        for bar in [0, 1] {
            assert!(covers(&RTL8139, bar, 0x3E) && covers(&RTL8139, bar, 0x3F));
            for prompt in [0x10, 0x37, 0x38, 0x3C] {
                assert!(!covers(&RTL8139, bar, prompt), "{prompt:#x}");
            }
        }
        // The e1000: IMC; IMS and both tails.
        assert!(covers(&E1000, 0, 0xD8));
        for prompt in [0xD0, 0x2818, 0x3818] {
            assert!(!covers(&E1000, 0, prompt), "{prompt:#x}");
        }
    }
}
