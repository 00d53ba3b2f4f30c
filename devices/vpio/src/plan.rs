//! Says, as data, which accesses KVM may handle without an exit to user space. The code that connects a monitor to KVM
//! owns the memory slots and zones, and applies the plan.
//!
//! KVM decides by page. A page of a memory BAR is mapped, or is mapped read-only over a shadow page that the monitor
//! updates, or traps. Port reads always exit. Deferred writes stay in a coalescing ring, which the monitor drains
//! before it does anything else for the device. `docs/design/specs/guarded-passthrough.md` lists what KVM offers.

use device_models::describe::{Bar, Class, Device, Effect, Event, Register};

/// Size in bytes of a page.
pub const PAGE: u32 = 4096;

/// How KVM treats a page of a memory BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagePlan {
    /// The guest accesses the device's own page without exits.
    Map,
    /// The guest reads a shadow page; writes trap or are deferred. The monitor updates the page after each interrupt
    /// and each write that it handles.
    ReadOnlyShadow,
    /// Every access traps.
    Trap,
}

/// A range of a BAR whose writes KVM may defer, in order, in a coalescing ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zone {
    /// BAR number.
    pub bar: u8,
    /// Offset of the first byte.
    pub offset: u32,
    /// Length in bytes.
    pub length: u32,
}

/// What KVM may handle by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Pages of memory BARs: BAR number, offset of the page, treatment.
    pub pages: Vec<(u8, u32, PagePlan)>,
    /// Zones of deferred writes, for a monitor that drains the ring soon after any access ([`late`]).
    pub late: Vec<Zone>,
    /// Writes of these values to memory BARs signal an eventfd.
    pub told: Vec<Told>,
}

/// A write that the monitor must only notice before it does anything else for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// BAR number.
    pub bar: u8,
    /// Offset of the first byte.
    pub offset: u32,
    /// Length in bytes.
    pub bytes: u8,
    /// The written value.
    pub value: u32,
}

/// Returns the plan for a device. It is the same in all device states.
pub fn plan(device: &'static Device) -> Plan {
    let mut pages = Vec::new();
    for (number, bar) in (0u8..).zip(device.bars) {
        let Bar::Memory(size) = *bar else { continue };
        for page in (0..size.div_ceil(PAGE)).map(|page| page * PAGE) {
            pages.push((number, page, page_plan(device, page)));
        }
    }
    let told = crate::shown::bars(device).flat_map(|bar| {
        let mask = device.register(device.interrupts.mask);
        let of = move |value: &u32| {
            mask.offset.map(|offset| Told { bar, offset, bytes: mask.width, value: *value })
        };
        device.polled.masks.iter().filter_map(of)
    });
    Plan { pages, late: late(device, true), told: told.collect() }
}

/// Returns the zones of deferred writes. `watched` means that the owner drains the ring soon after any access. Then
/// zones may contain registers whose writes start an action (`Register::starts`).
pub fn late(device: &Device, watched: bool) -> Vec<Zone> {
    let mut late: Vec<Zone> = Vec::new();
    for (number, bar) in (0u8..).zip(device.bars) {
        let (Bar::Memory(size) | Bar::Ports(size)) = *bar else { continue };
        for offset in (0..size).filter(|offset| may_wait(device, *offset, watched)) {
            match late.last_mut() {
                Some(Zone { bar, offset: start, length }) if *bar == number && *start + *length == offset => {
                    *length += 1
                }
                _ => late.push(Zone { bar: number, offset, length: 1 }),
            }
        }
    }
    late
}

/// Returns whether writes to a byte may be deferred in any bank. The monitor drains the ring in order, so earlier
/// writes, which may have changed the bank, come first. A register that a check guards may be deferred: the check
/// precedes the device's write in any case.
fn may_wait(device: &Device, offset: u32, watched: bool) -> bool {
    let written = device.numbered().filter(|(_, register)| register.write.is_some());
    let mut any = false;
    let mut here = written.filter(|(_, register)| (0..8).any(|bank| register.is_at(offset, bank)));
    let all = here.all(|(_, register)| {
        let late = register.late && (watched || !register.starts);
        any |= late;
        late || register.write == Some(Class::Deny)
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
    let read_has_effect = |reg| {
        let reads = device.transitions.iter().filter(|transition| transition.event == Event::Read(reg));
        let mut effects = reads.flat_map(|transition| transition.effects);
        // A shadowed status that a read clears is cleared later (`crate::shown`), so its read effect doesn't count.
        (reg != device.interrupts.status || device.polled.read_clears.is_none())
            && effects.any(|effect| !matches!(effect, Effect::Answer(_)))
    };
    let wide = || {
        let mut ports = inside().filter(|(_, register)| !register.table);
        ports.any(|(reg, register)| read_has_effect(reg) || register.span > u32::from(register.width))
    };
    // Registers that drivers poll are in the first page.
    if page > 0 || !device.polled.any() || wide() { PagePlan::Trap } else { PagePlan::ReadOnlyShadow }
}

#[cfg(test)]
mod tests {
    use device_models::devices::{e1000::E1000, ne2000::NE2000, rtl8139::RTL8139};

    use super::*;

    fn covers(device: &'static Device, bar: u8, offset: u32) -> bool {
        is_in(&plan(device).late, bar, offset)
    }

    fn is_in(zones: &[Zone], bar: u8, offset: u32) -> bool {
        zones.iter().any(|zone| zone.bar == bar && (zone.offset..zone.offset + zone.length).contains(&offset))
    }

    #[test]
    fn what_fills_a_frame_s_buffer_may_wait_and_what_sends_it_may_not() {
        // The NE2000: the data port, the remote transfer's address, and the frame's length. Not the reset. CR and the
        // interrupt mask only if the owner watches.
        let unwatched = super::late(&NE2000, false);
        for late in [0x01, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x0B, 0x10, 0x11, 0x13] {
            assert!(covers(&NE2000, 0, late) && is_in(&unwatched, 0, late), "{late:#x}");
        }
        for watched in [0x00, 0x0F] {
            assert!(covers(&NE2000, 0, watched) && !is_in(&unwatched, 0, watched), "{watched:#x}");
        }
        assert!(!covers(&NE2000, 0, 0x1F));
        for device in [&RTL8139, &E1000] {
            assert_eq!(super::late(device, false), plan(device).late, "{}", device.name);
        }
    }

    /// Registers that drivers poll are on a shadow page. An eventfd reports the mask that 8139too writes during its
    /// poll. Other pages trap.
    #[test]
    fn what_drivers_look_at_all_the_time_is_a_page() {
        let pages = |device| plan(device).pages.into_iter().map(|(_, _, plan)| plan).collect::<Vec<_>>();
        assert_eq!(pages(&RTL8139), [PagePlan::ReadOnlyShadow]);
        assert_eq!(plan(&RTL8139).told, [Told { bar: 1, offset: 0x3C, bytes: 2, value: 0xC02E }]);
        // The e1000: the first page is a shadow page, the statistics' page is mapped, and pages with ring registers
        // trap.
        let of_e1000 = pages(&E1000);
        assert_eq!((of_e1000[0], of_e1000[4]), (PagePlan::ReadOnlyShadow, PagePlan::Map));
        assert!((1..32).filter(|page| *page != 4).all(|page| of_e1000[page] == PagePlan::Trap));
        assert_eq!(plan(&E1000).told, [Told { bar: 0, offset: 0xD0, bytes: 4, value: 0x9D }]);
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
        // The e1000: IMC and the receive tail; IMS and the transmit tail.
        assert!(covers(&E1000, 0, 0xD8) && covers(&E1000, 0, 0x2818));
        for prompt in [0xD0, 0x3818] {
            assert!(!covers(&E1000, 0, prompt), "{prompt:#x}");
        }
    }
}
