//! A word per vCPU in one page: `payload_workloads::false_sharing`.

#![no_std]
#![no_main]

use payload_runtime::spmd::Program;
use payload_workloads::false_sharing::{NAMES, run};

payload_runtime::spmd_entry!(Program { name: "false-sharing", arguments: NAMES, run });
