//! Code at the address of a PC's BIOS, for kernels that reboot by a jump to it.
//!
//! Linux does so on a hardware-reduced machine without EFI. It assumes that only EFI can reset such a machine
//! (`reboot_init` in arch/x86/kernel/reboot.c), finds no EFI, and jumps to F000:FFF0 in real mode. The code here resets
//! the machine by the ACPI reset register.

use machine::memory::{Bytes, GuestAddress, GuestMemory};

use crate::acpi::AcpiError;
use crate::layout;
use crate::map::PowerPorts;

/// Bytes from the reset vector to 1 MiB.
const BYTES: usize = 16;

/// 16-bit code: `mov dx, port; mov al, value; out dx, al`, then an endless halt.
fn code(power: &PowerPorts) -> [u8; BYTES] {
    const MOV_DX: u8 = 0xba;
    const MOV_AL: u8 = 0xb0;
    const OUT_DX_AL: u8 = 0xee;
    const CLI: u8 = 0xfa;
    const HLT: u8 = 0xf4;
    /// `jmp` back to the `hlt` before it.
    const JMP_BACK: [u8; 2] = [0xeb, 0xfd];
    let [low, high] = power.reset.to_le_bytes();
    let mut code = [HLT; BYTES];
    code[..10].copy_from_slice(&[
        CLI,
        MOV_DX,
        low,
        high,
        MOV_AL,
        power.reset_value,
        OUT_DX_AL,
        HLT,
        JMP_BACK[0],
        JMP_BACK[1],
    ]);
    code
}

/// Writes the code at [`layout::RESET_VECTOR`].
pub(crate) fn write(memory: &GuestMemory, power: &PowerPorts) -> Result<(), AcpiError> {
    let address = layout::RESET_VECTOR;
    memory
        .write_slice(&code(power), GuestAddress(address))
        .map_err(|source| AcpiError::Memory { address, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_writes_the_value_to_the_port_and_halts() {
        let power =
            PowerPorts { reset: 0x1234, reset_value: 0x56, sleep_control: 0, sleep_status: 0, events: 0 };
        // The assembler's output: cli; mov dx, 0x1234; mov al, 0x56; out dx, al; hlt; jmp $-1
        let expected = [0xfa, 0xba, 0x34, 0x12, 0xb0, 0x56, 0xee, 0xf4, 0xeb, 0xfd];
        assert_eq!(code(&power)[..10], expected);
    }
}
