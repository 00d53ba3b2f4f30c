//! The measured loops. A payload in a VM and the benchmark's peer in a host process execute the same instructions: the loops are
//! assembly, independent of compiler settings.

#![no_std]
#![allow(unsafe_code)] // The loops are assembly over raw addresses; that is what they measure.

pub mod access;
pub mod copy;
pub mod job;
pub mod line;
pub mod rings;
pub mod script;
pub mod tsc;
pub mod verbs;
