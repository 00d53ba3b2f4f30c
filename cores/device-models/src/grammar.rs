//! A grammar of requests for fuzzers and races, from a description. It covers every register at every offset and alias,
//! in its banks. Values are the representatives, their neighbours, and random ones.

use crate::describe::{Bar, Device, Reg};
use crate::graph::Access;

/// The requests to one register.
#[derive(Debug, Clone, Copy)]
struct Production {
    reg: Reg,
    offset: u32,
    bank: u8,
    width: u8,
    writable: bool,
}

/// The requests to one device.
#[derive(Debug, Clone)]
pub struct Grammar {
    device: &'static Device,
    productions: Vec<Production>,
    bars: Vec<(u8, u32)>,
}

/// Source of choices: a fuzzer's input, or a generator.
pub trait Choices {
    /// Returns a number below `limit`, which isn't 0.
    fn below(&mut self, limit: usize) -> usize;
    /// Returns any number.
    fn any(&mut self) -> u32;
}

impl Grammar {
    /// Builds the grammar of `device`.
    pub fn new(device: &'static Device) -> Self {
        let banks: Vec<u8> =
            device.bank.as_ref().map_or(vec![0], |bank| (0..=u8::try_from(bank.mask).unwrap_or(0)).collect());
        let mut productions = Vec::new();
        for (reg, register) in device.numbered() {
            for offset in register.offset.iter().chain(register.aliases) {
                for &bank in banks.iter().filter(|&&bank| register.banks >> bank & 1 == 1) {
                    let writable = register.write.is_some();
                    productions.push(Production {
                        reg,
                        offset: *offset,
                        bank,
                        width: register.width,
                        writable,
                    });
                }
            }
        }
        let bars = (0u8..)
            .zip(device.bars)
            .filter_map(|(number, bar)| match bar {
                Bar::Ports(size) | Bar::Memory(size) => Some((number, *size)),
                Bar::Hidden => None,
            })
            .collect();
        Self { device, productions, bars }
    }

    /// Returns the next request: one access, or two if a bank must be selected first.
    pub fn request(&self, choices: &mut dyn Choices) -> Vec<Access> {
        let (bar, size) = self.bars[choices.below(self.bars.len())];
        if choices.below(16) == 0 {
            // Any access: wrong sizes, holes, across registers.
            let size_log = choices.below(3);
            let offset = u32::try_from(choices.below(usize::try_from(size).unwrap_or(1))).unwrap_or(0);
            let write = (choices.below(2) == 1).then(|| choices.any());
            return vec![Access { bar, offset, size: 1 << size_log, write }];
        }
        let production = self.productions[choices.below(self.productions.len())];
        let mut accesses = Vec::new();
        if let Some(bank) = &self.device.bank
            && production.reg != bank.register
        {
            let register = self.device.register(bank.register);
            let value = bank.keep & 2 | bank.set | u32::from(production.bank) << bank.shift;
            accesses.push(Access {
                bar,
                offset: register.offset.unwrap_or(0),
                size: register.width,
                write: Some(value),
            });
        }
        let write =
            (production.writable && choices.below(8) != 0).then(|| self.value(production.reg, choices));
        let size = if production.width == 4 && choices.below(16) == 0 { 1 } else { production.width };
        accesses.push(Access { bar, offset: production.offset, size, write });
        accesses
    }

    fn value(&self, reg: Reg, choices: &mut dyn Choices) -> u32 {
        let register = self.device.register(reg);
        let known = register.values;
        let value = match choices.below(8) {
            0 => choices.any(),
            1 => 0,
            2 => u32::MAX,
            3 if !known.is_empty() => known[choices.below(known.len())].wrapping_add(1),
            4 if !known.is_empty() => known[choices.below(known.len())].wrapping_sub(1),
            _ if !known.is_empty() => known[choices.below(known.len())],
            _ => choices.any(),
        };
        value & register.mask()
    }
}

#[cfg(test)]
mod tests {
    use super::{Choices, Grammar};
    use crate::devices;

    struct Counting(u32);
    impl Choices for Counting {
        fn below(&mut self, limit: usize) -> usize {
            usize::try_from(self.any()).unwrap() % limit
        }
        fn any(&mut self) -> u32 {
            self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            self.0.rotate_left(11)
        }
    }

    /// The grammar writes every writable register in some bank.
    #[test]
    fn every_writable_register_is_reached() {
        for device in devices::ALL {
            let grammar = Grammar::new(device);
            let mut choices = Counting(1);
            let mut graph = crate::graph::Graph::new(device);
            let mut reached = vec![false; device.registers.len()];
            for _ in 0..200_000 {
                for access in grammar.request(&mut choices) {
                    let piece = graph.piece(device, access.offset, access.size, access.write.is_some());
                    let (Some(reg), Some(value)) = (piece.reg, access.write) else { continue };
                    reached[reg.index()] = true;
                    if device.bank.as_ref().is_some_and(|bank| bank.register == reg) {
                        graph.set(reg, value & 0xFF);
                    }
                }
            }
            for ((_, register), reached) in device.numbered().zip(reached) {
                assert!(
                    reached || register.write.is_none() || register.offset.is_none(),
                    "{}",
                    register.name
                );
            }
        }
    }
}
