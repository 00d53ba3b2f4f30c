//! Conjugate gradients: `payload_workloads::cg`.

#![no_std]
#![no_main]

use payload_runtime::spmd::Program;
use payload_workloads::cg::{NAMES, run};

payload_runtime::spmd_entry!(Program { name: "cg", arguments: NAMES, run });
