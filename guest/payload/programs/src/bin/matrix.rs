//! Matrix multiplication: `payload_workloads::matrix`.

#![no_std]
#![no_main]

use payload_runtime::spmd::Program;
use payload_workloads::matrix::{NAMES, run};

payload_runtime::spmd_entry!(Program { name: "matrix", arguments: NAMES, run });
