//! Hostile peers: arbitrary bytes, and messages that no correct node sends.

mod node;
mod strategies;
mod wire;
