//! One vCPU writes, the others read: `payload_workloads::producer_consumer`.

#![no_std]
#![no_main]

use payload_runtime::spmd::Program;
use payload_workloads::producer_consumer::{NAMES, run};

payload_runtime::spmd_entry!(Program { name: "producer-consumer", arguments: NAMES, run });
