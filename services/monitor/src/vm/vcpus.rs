//! vCPUs in the device tree, for a diagnosis of hung guests: registers and pending interrupts.

use ::machine::state::SavedVcpu;
use ::machine::vcpu::{VcpuError, VcpuManager};
use serde_json::{Value, json};

use super::machine::Machine;

/// Registers and pending interrupts of all vCPUs while paused; otherwise a hint to pause the VM.
pub(super) fn inspect(vcpus: &VcpuManager) -> Value {
    match vcpus.save() {
        Ok(saved) => saved.iter().map(one).collect(),
        Err(VcpuError::NotPaused(_)) => json!("running; pause the VM to see registers"),
        Err(error) => json!(error.to_string()),
    }
}

/// Where the interrupt controllers are. For those in the monitor also their registers, while the vCPUs are paused.
pub(super) fn inspect_irqchip(machine: &Machine) -> Value {
    let registers = machine.irqchip.monitor().map(|irqchip| {
        if machine.vcpus.is_paused() {
            irqchip.inspect()
        } else {
            json!("running; pause the VM to see registers")
        }
    });
    json!({ "place": machine.description.interrupts, "registers": registers })
}

fn hex(value: u64) -> Value {
    json!(format!("{value:#x}"))
}

fn one(vcpu: &SavedVcpu) -> Value {
    let msrs: serde_json::Map<String, Value> = vcpu
        .msrs
        .iter()
        .filter(|msr| msr.value != 0)
        .map(|msr| (format!("{:#x}", msr.index), hex(msr.value)))
        .collect();
    let events = &vcpu.events;
    json!({
        "id": vcpu.id,
        "state": run_state(vcpu.mp_state.mp_state),
        "rip": hex(vcpu.regs.rip),
        "rsp": hex(vcpu.regs.rsp),
        "rbp": hex(vcpu.regs.rbp),
        "rflags": hex(vcpu.regs.rflags),
        "cs": hex(vcpu.sregs.cs.selector.into()),
        "gs_base": hex(vcpu.sregs.gs.base),
        "cr0": hex(vcpu.sregs.cr0),
        "cr2": hex(vcpu.sregs.cr2),
        "cr3": hex(vcpu.sregs.cr3),
        "cr4": hex(vcpu.sregs.cr4),
        "efer": hex(vcpu.sregs.efer),
        "pending": {
            "exception": (events.exception.injected != 0).then_some(events.exception.nr),
            "interrupt": (events.interrupt.injected != 0).then_some(events.interrupt.nr),
            "interrupt_shadow": events.interrupt.shadow,
            "nmi": events.nmi.pending,
        },
        "apic": vcpu.lapic.as_ref().map(|lapic| apic(&lapic.regs.map(i8::cast_unsigned))),
        "msrs": msrs,
    })
}

/// `KVM_MP_STATE_*` of linux/kvm.h.
fn run_state(mp_state: u32) -> &'static str {
    match mp_state {
        0 => "runnable",
        1 => "waits for INIT",
        2 => "has had INIT",
        3 => "halted",
        4 => "has had SIPI",
        _ => "other",
    }
}

/// The page of a local APIC (Intel SDM volume 3, 12.4.1).
fn apic(page: &[u8; 1024]) -> Value {
    let word = |at: usize| {
        page.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
    };
    // 256 bits in eight registers, 16 bytes apart.
    let vectors = |first: usize| -> Vec<usize> {
        (0..256).filter(|vector| word(first + vector / 32 * 16) >> (vector % 32) & 1 != 0).collect()
    };
    json!({
        "task_priority": hex(word(0x80).into()),
        "processor_priority": hex(word(0xa0).into()),
        "spurious": hex(word(0xf0).into()),
        "in_service": vectors(0x100),
        "requested": vectors(0x200),
        "timer": hex(word(0x320).into()),
        "timer_initial": word(0x380),
        "timer_current": word(0x390),
        "command": hex(u64::from(word(0x310)) << 32 | u64::from(word(0x300))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_of_an_apic_page_are_named() {
        let mut page = [0u8; 1024];
        // Vectors 0x31 (second register, bit 17) and 0xec (eighth register, bit 12) are requested.
        page[0x210 + 2] = 1 << 1;
        page[0x270 + 1] = 1 << 4;
        page[0x100] = 1 << 3;
        page[0x380..0x384].copy_from_slice(&500u32.to_le_bytes());
        let tree = apic(&page);
        assert_eq!(tree["requested"], json!([0x31, 0xec]));
        assert_eq!(tree["in_service"], json!([3]));
        assert_eq!(tree["timer_initial"], 500);
        assert_eq!(run_state(3), "halted");
    }
}
