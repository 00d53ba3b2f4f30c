//! One kind of access to many pages: `payload_workloads::pages`.

#![no_std]
#![no_main]

use payload_runtime::spmd::Program;
use payload_workloads::pages::{NAMES, run};

payload_runtime::spmd_entry!(Program { name: "pages", arguments: NAMES, run });
