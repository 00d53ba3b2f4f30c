//! Random pairs, no communication: `payload_workloads::ep`.

#![no_std]
#![no_main]

use payload_runtime::spmd::Program;
use payload_workloads::ep::{NAMES, run};

payload_runtime::spmd_entry!(Program { name: "ep", arguments: NAMES, run });
