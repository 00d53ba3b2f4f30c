//! A thread as machine code: `payload_litmus::runner::Code`.
//!
//! ```text
//! rdi: addresses of the locations     -> r8, r9, r10, r11
//! rsi: where registers go at the end  -> r12
//! ```

use crate::test::{Instruction, Operand, Operation, Register, Test, Width};
use iced_x86::{Code, Encoder, IcedError, Instruction as Machine, MemoryOperand, Register as Name};

const LOCATIONS: [Name; 4] = [Name::R8, Name::R9, Name::R10, Name::R11];
const SAVED: [Name; 2] = [Name::RBX, Name::R12];

fn register(width: Width, register: Register) -> Name {
    let (narrow, wide) = match register.0 {
        0 => (Name::EAX, Name::RAX),
        1 => (Name::ECX, Name::RCX),
        2 => (Name::EDX, Name::RDX),
        3 => (Name::EBX, Name::RBX),
        6 => (Name::ESI, Name::RSI),
        _ => (Name::EDI, Name::RDI),
    };
    match width {
        Width::Double => narrow,
        Width::Quad => wide,
    }
}

fn location(index: usize) -> MemoryOperand {
    MemoryOperand::with_base(LOCATIONS.get(index).copied().unwrap_or(Name::R11))
}

/// Selects one of two codes by width.
fn by(width: Width, double: Code, quad: Code) -> Code {
    match width {
        Width::Double => double,
        Width::Quad => quad,
    }
}

/// Returns the codes of an operation with a constant, and with a register.
fn codes(operation: Operation, width: Width) -> (Code, Code) {
    match operation {
        Operation::Add => (
            by(width, Code::Add_rm32_imm32, Code::Add_rm64_imm32),
            by(width, Code::Add_rm32_r32, Code::Add_rm64_r64),
        ),
        Operation::Sub => (
            by(width, Code::Sub_rm32_imm32, Code::Sub_rm64_imm32),
            by(width, Code::Sub_rm32_r32, Code::Sub_rm64_r64),
        ),
        Operation::And => (
            by(width, Code::And_rm32_imm32, Code::And_rm64_imm32),
            by(width, Code::And_rm32_r32, Code::And_rm64_r64),
        ),
        Operation::Or => (
            by(width, Code::Or_rm32_imm32, Code::Or_rm64_imm32),
            by(width, Code::Or_rm32_r32, Code::Or_rm64_r64),
        ),
        Operation::Xor => (
            by(width, Code::Xor_rm32_imm32, Code::Xor_rm64_imm32),
            by(width, Code::Xor_rm32_r32, Code::Xor_rm64_r64),
        ),
    }
}

/// Converts a constant to the encoder's form: sign-extended.
fn constant(value: u32) -> i32 {
    value.cast_signed()
}

/// Translates an instruction of a test.
fn translate(instruction: &Instruction) -> Result<Machine, IcedError> {
    let with_memory = |width, codes: (Code, Code), at, operand| match operand {
        Operand::Constant(value) => Machine::with2(codes.0, location(at), constant(value)),
        Operand::Register(source) => Machine::with2(codes.1, location(at), register(width, source)),
    };
    let with_register = |width, codes: (Code, Code), target, operand| match operand {
        Operand::Constant(value) => Machine::with2(codes.0, register(width, target), constant(value)),
        Operand::Register(source) => {
            Machine::with2(codes.1, register(width, target), register(width, source))
        }
    };
    let moves = |width| {
        (
            by(width, Code::Mov_rm32_imm32, Code::Mov_rm64_imm32),
            by(width, Code::Mov_rm32_r32, Code::Mov_rm64_r64),
        )
    };
    let locked = |mut machine: Machine| {
        machine.set_has_lock_prefix(true);
        machine
    };
    match *instruction {
        Instruction::Load(width, target, at) => {
            let code = by(width, Code::Mov_r32_rm32, Code::Mov_r64_rm64);
            Machine::with2(code, register(width, target), location(at))
        }
        Instruction::Store(width, at, operand) => with_memory(width, moves(width), at, operand),
        Instruction::Move(width, target, operand) => with_register(width, moves(width), target, operand),
        Instruction::Compute(width, operation, target, operand) => {
            with_register(width, codes(operation, width), target, operand)
        }
        Instruction::Modify { locked: lock, width, operation, location: at, operand } => {
            let machine = with_memory(width, codes(operation, width), at, operand)?;
            Ok(if lock { locked(machine) } else { machine })
        }
        Instruction::Exchange(width, at, target) => {
            let code = by(width, Code::Xchg_rm32_r32, Code::Xchg_rm64_r64);
            Machine::with2(code, location(at), register(width, target))
        }
        Instruction::ExchangeAdd(width, at, target) => {
            let code = by(width, Code::Xadd_rm32_r32, Code::Xadd_rm64_r64);
            Machine::with2(code, location(at), register(width, target)).map(locked)
        }
        Instruction::CompareExchange(width, at, source) => {
            let code = by(width, Code::Cmpxchg_rm32_r32, Code::Cmpxchg_rm64_r64);
            Machine::with2(code, location(at), register(width, source)).map(locked)
        }
        Instruction::Fence => Ok(Machine::with(Code::Mfence)),
    }
}

/// Assembles a test's thread as a position-independent function.
///
/// # Errors
/// The encoder refuses an instruction, which doesn't happen for the parser's output.
pub fn machine_code(test: &Test, thread: usize) -> Result<Vec<u8>, IcedError> {
    let instructions = test.threads.get(thread).map_or(&[][..], Vec::as_slice);
    let mut all = Vec::new();
    for saved in SAVED {
        all.push(Machine::with1(Code::Push_r64, saved)?);
    }
    all.push(Machine::with2(Code::Mov_rm64_r64, Name::R12, Name::RSI)?);
    for (index, name) in (0_i64..).zip(LOCATIONS).take(test.locations.len()) {
        let place = MemoryOperand::with_base_displ(Name::RDI, index * 8);
        all.push(Machine::with2(Code::Mov_r64_rm64, name, place)?);
    }
    for (_, _, used) in Register::NAMES {
        let given = test.registers.iter().find(|(which, register, _)| *which == thread && *register == used);
        let value = given.map_or(0, |(_, _, value)| *value);
        all.push(Machine::with2(Code::Mov_r64_imm64, register(Width::Quad, used), value)?);
    }
    for instruction in instructions {
        all.push(translate(instruction)?);
    }
    for (index, loaded) in (0_i64..).zip(Test::loaded(instructions)) {
        let place = MemoryOperand::with_base_displ(Name::R12, index * 8);
        all.push(Machine::with2(Code::Mov_rm64_r64, place, register(Width::Quad, loaded))?);
    }
    for saved in SAVED.into_iter().rev() {
        all.push(Machine::with1(Code::Pop_r64, saved)?);
    }
    all.push(Machine::with(Code::Retnq));
    let mut encoder = Encoder::new(64);
    for machine in &all {
        // No instruction depends on its address.
        encoder.encode(machine, 0)?;
    }
    Ok(encoder.take_buffer())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus;
    use iced_x86::{Decoder, DecoderOptions, Mnemonic};

    /// All code of the corpus decodes, ends with a return, addresses memory by the permitted registers only, and has the test's
    /// accesses with their widths and locks.
    #[test]
    fn code_does_what_the_test_says() {
        for test in corpus::all().unwrap() {
            for (index, thread) in test.threads.iter().enumerate() {
                let code = machine_code(&test, index).unwrap();
                let all: Vec<Machine> = Decoder::new(64, &code, DecoderOptions::NONE).into_iter().collect();
                assert!(all.iter().all(|machine| !machine.is_invalid()), "{}", test.name);
                assert_eq!(all.last().unwrap().mnemonic(), Mnemonic::Ret);
                let reaches = |machine: &&Machine| LOCATIONS.contains(&machine.memory_base());
                let accesses: Vec<(usize, usize)> = all
                    .iter()
                    .filter(reaches)
                    .map(|machine| {
                        let location =
                            LOCATIONS.iter().position(|name| *name == machine.memory_base()).unwrap();
                        (location, machine.memory_size().size())
                    })
                    .collect();
                let expected: Vec<(usize, usize)> = thread
                    .iter()
                    .filter_map(Instruction::access)
                    .map(|(location, width)| (location, width.bytes()))
                    .collect();
                assert_eq!(accesses, expected, "{}", test.name);
                let locks = all.iter().filter(|machine| machine.has_lock_prefix()).count();
                let locked = |instruction: &&Instruction| {
                    matches!(
                        instruction,
                        Instruction::Modify { locked: true, .. }
                            | Instruction::ExchangeAdd(..)
                            | Instruction::CompareExchange(..)
                    )
                };
                assert_eq!(locks, thread.iter().filter(locked).count(), "{}", test.name);
                let fences = all.iter().filter(|machine| machine.mnemonic() == Mnemonic::Mfence).count();
                assert_eq!(fences, thread.iter().filter(|one| **one == Instruction::Fence).count());
                let others = all.iter().map(Machine::memory_base).filter(|base| *base != Name::None);
                assert!(
                    others
                        .clone()
                        .all(|base| LOCATIONS.contains(&base) || [Name::RDI, Name::R12].contains(&base))
                );
            }
        }
    }
}
