//! Counting sort: `payload_workloads::integer_sort`.

#![no_std]
#![no_main]

use payload_runtime::spmd::Program;
use payload_workloads::integer_sort::{NAMES, run};

payload_runtime::spmd_entry!(Program { name: "integer-sort", arguments: NAMES, run });
