//! A counter under a ticket or a queue lock: `payload_workloads::locks`.

#![no_std]
#![no_main]

use payload_runtime::spmd::Program;
use payload_workloads::locks::{NAMES, run};

payload_runtime::spmd_entry!(Program { name: "locks", arguments: NAMES, run });
