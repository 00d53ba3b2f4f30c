//! Runs a payload guest: a ring-3 program that is the whole guest.

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use machine::memory::PageSize;
use monitor::description::{Console, HugePages, Payload, VmDescription};
use monitor::payload::{PayloadBuilder, PayloadVm, process_status};
use monitor::sandbox::{Sandbox, ThreadKind};

use crate::output;

/// Returns the settings of a payload VM.
pub fn builder(description: &VmDescription, payload: &Payload) -> anyhow::Result<PayloadBuilder> {
    let builder = PayloadVm::from_file(&payload.program)?
        .arguments(payload.arguments.iter().cloned())
        .vcpus(description.cpus.count().into())
        .memory(description.memory.size)
        .pages(match description.memory.hugepages {
            HugePages::None => PageSize::Base,
            HugePages::Size2M => PageSize::Huge2M,
            HugePages::Size1G => PageSize::Huge1G,
        })
        .pin(description.pinning.iter().map(|cpus| cpus.iter().map(usize::from).collect()).collect());
    Ok(match &description.console {
        Console::Stdio => builder.console(std::io::stdout()),
        Console::Null => builder.console(std::io::sink()),
        Console::File(path) => {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
            builder.console(
                file.with_context(|| format!("The console file {} can't be opened", path.display()))?,
            )
        }
        Console::Pty | Console::Socket(_) => {
            bail!("--console: a payload only writes to its console; use stdio, file:PATH or null")
        }
    })
}

/// Runs the program. Its exit code becomes this process'.
pub fn run(description: &VmDescription, payload: &Payload, json: bool) -> anyhow::Result<ExitCode> {
    let builder = builder(description, payload)?;
    let sandbox = Sandbox::prepare(description)?;
    sandbox.enter_process()?;
    let vcpu = sandbox.thread_filter(ThreadKind::Vcpu);
    let mut vm = builder.on_thread_start(move || vcpu.apply_or_end()).build()?;
    sandbox.thread_filter(ThreadKind::Main).apply()?;
    vm.start()?;
    let code = vm.wait()?;
    if json {
        output::print_json(&serde_json::json!({ "outcome": "exit", "code": code, "exits": vm.exits() }))?;
    }
    Ok(ExitCode::from(process_status(code)))
}
