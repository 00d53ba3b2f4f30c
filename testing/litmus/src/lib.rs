//! Litmus tests for x86: small parallel programs, and the outcomes that the architecture allows.
//!
//! ```text
//! .litmus text --parse--> Test --model--> all outcomes that x86-TSO allows, and those of sequential consistency
//!                           '---code----> machine code --file--> the payload program `litmus`, which prints observed outcomes
//! ```
//!
//! The allowed outcomes aren't written by hand: [`model`] enumerates them.

mod code;
pub mod corpus;
mod file;
pub mod model;
mod parse;
mod test;

pub use code::machine_code;
pub use file::{FileError, Variant, fill};
pub use parse::ParseError;
pub use test::{Condition, Instruction, Observed, Operand, Operation, Register, Test, Width};
