//! Reports of a payload program's exceptions: a sentence and the registers.

use super::layout::Layout;
use machine::memory::{Bytes, GuestAddress, GuestMemory};
use machine::x86::{kvm_regs, kvm_sregs};
use std::fmt;

/// An exception that ended a payload program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExceptionReport {
    /// Id of the vCPU.
    pub vcpu: u32,
    /// Exception vector; `None` if KVM only reported a shutdown.
    pub vector: Option<u8>,
    /// Error code; 0 for vectors without one.
    pub error_code: u64,
    /// Address of the instruction.
    pub rip: u64,
    /// Stack pointer at the instruction.
    pub rsp: u64,
    /// Flags at the instruction.
    pub rflags: u64,
    /// CR2: the accessed address of a page fault.
    pub fault_address: u64,
    /// The other general registers, by name.
    pub registers: [(&'static str, u64); 15],
}

impl ExceptionReport {
    /// Reads the stub's frame from a vCPU that wrote to the exception port. If the vCPU isn't in a stub, returns what KVM knows of a
    /// shutdown.
    pub(super) fn collect(index: u32, regs: &kvm_regs, sregs: &kvm_sregs, memory: &GuestMemory) -> Self {
        let registers = [
            ("rax", regs.rax),
            ("rbx", regs.rbx),
            ("rcx", regs.rcx),
            ("rdx", regs.rdx),
            ("rsi", regs.rsi),
            ("rdi", regs.rdi),
            ("rbp", regs.rbp),
            ("r8", regs.r8),
            ("r9", regs.r9),
            ("r10", regs.r10),
            ("r11", regs.r11),
            ("r12", regs.r12),
            ("r13", regs.r13),
            ("r14", regs.r14),
            ("r15", regs.r15),
        ];
        // Vector, error code, rip, cs, rflags, rsp, pushed by CPU and stub. The program may have jumped to a stub itself, with any stack
        // pointer: then these are values of its own, and an invalid address counts as no frame.
        let mut frame = [0_u8; 48];
        let in_stub = Layout::is_stub(regs.rip);
        if in_stub && memory.read_slice(&mut frame, GuestAddress(regs.rsp)).is_ok() {
            let word = |index: usize| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&frame[index * 8..index * 8 + 8]);
                u64::from_le_bytes(bytes)
            };
            return Self {
                vcpu: index,
                vector: Some(frame[0]),
                error_code: word(1),
                rip: word(2),
                rsp: word(5),
                rflags: word(4),
                fault_address: sregs.cr2,
                registers,
            };
        }
        Self {
            vcpu: index,
            vector: None,
            error_code: 0,
            rip: regs.rip,
            rsp: regs.rsp,
            rflags: regs.rflags,
            fault_address: sregs.cr2,
            registers,
        }
    }
}

/// Names of the CPU's exception vectors (AMD APM volume 2, table 8-1).
fn name(vector: u8) -> &'static str {
    match vector {
        0 => "division by zero or overflow",
        1 => "debug exception",
        2 => "non-maskable interrupt",
        3 => "breakpoint",
        4 => "overflow",
        5 => "bound range exceeded",
        6 => "invalid opcode",
        7 => "device not available",
        8 => "double fault",
        10 => "invalid TSS",
        11 => "segment not present",
        12 => "stack fault",
        13 => "general protection fault",
        14 => "page fault",
        16 => "x87 exception",
        17 => "alignment check",
        18 => "machine check",
        19 => "SIMD exception",
        21 => "control protection exception",
        _ => "interrupt",
    }
}

impl fmt::Display for ExceptionReport {
    /// One sentence, then the registers, four per line.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.vector {
            None => write!(
                formatter,
                "The program's vCPU {} shut down near rip {:#x}: an exception could not be delivered, or the program itself wrote to the exception port",
                self.vcpu, self.rip
            )?,
            Some(vector) => {
                write!(
                    formatter,
                    "The program raised exception {vector} ({}) on vCPU {} at rip {:#x}",
                    name(vector),
                    self.vcpu,
                    self.rip
                )?;
                if vector == 14 {
                    let access = match (self.error_code & 16 != 0, self.error_code & 2 != 0) {
                        (true, _) => "fetching an instruction",
                        (_, true) => "writing",
                        _ => "reading",
                    };
                    let reason = if self.error_code & 1 == 0 { "not mapped" } else { "protected" };
                    write!(formatter, ", {access} at {:#x}, which is {reason}", self.fault_address)?;
                } else if self.error_code != 0 {
                    write!(formatter, ", error code {:#x}", self.error_code)?;
                }
            }
        }
        let more = [("rsp", self.rsp), ("flg", self.rflags)];
        for (position, (name, value)) in self.registers.iter().chain(&more).enumerate() {
            let separator = if position % 4 == 0 { "\n  " } else { "  " };
            write!(formatter, "{separator}{name:>3} {value:016x}")?;
        }
        Ok(())
    }
}
