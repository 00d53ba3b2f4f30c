//! Breadth-first search in a random graph: `payload_workloads::search`.

#![no_std]
#![no_main]

use payload_runtime::spmd::Program;
use payload_workloads::search::{NAMES, run};

payload_runtime::spmd_entry!(Program { name: "search", arguments: NAMES, run });
