//! Relaxation on a grid: `payload_workloads::jacobi`.

#![no_std]
#![no_main]

use payload_runtime::spmd::Program;
use payload_workloads::jacobi::{NAMES, run};

payload_runtime::spmd_entry!(Program { name: "jacobi", arguments: NAMES, run });
