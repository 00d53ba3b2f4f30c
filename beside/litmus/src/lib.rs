//! Litmus tests for x86: small programs for several processors, and which of their outcomes the architecture allows.
//!
//! ```text
//! .litmus text --parse--> Test --model--> all outcomes that x86-TSO allows, and those of sequential consistency
//!                           '---code----> machine code --file--> the payload program `litmus`, which prints what it saw
//! ```
//!
//! Nothing here says by hand what is allowed: [`model`] enumerates it.

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
