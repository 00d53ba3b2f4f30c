//! All vCPUs access the same words: `payload_workloads::storm`.

#![no_std]
#![no_main]

use payload_runtime::spmd::Program;
use payload_workloads::storm::{NAMES, run};

payload_runtime::spmd_entry!(Program { name: "storm", arguments: NAMES, run });
