//! Payload programs in real VMs. Needs /dev/kvm; without it each test prints that it is skipped.

use crate::programs::{Output, programs};
use monitor::payload::{PayloadBuilder, PayloadError, PayloadVm};
use std::time::Duration;

const HANG_LIMIT: Duration = Duration::from_secs(60);

fn run(builder: PayloadBuilder) -> (Result<u32, PayloadError>, String) {
    let output = Output::default();
    let result = builder.console(output.clone()).build().and_then(|mut vm| {
        vm.start()?;
        Ok(vm.wait_for(HANG_LIMIT)?.unwrap_or_else(|| {
            let (exits, stats) = (vm.exits(), vm.kernel_stats());
            panic!("it still runs after {HANG_LIMIT:?}: printed {:?}, {exits:?}, {stats:?}", output.text())
        }))
    });
    (result, output.text())
}

/// The program gets its arguments, every vCPU runs, the console is complete, and the exit code is the program's.
#[test]
fn hello_says_what_it_was_given() {
    let Some(programs) = programs("hello_says_what_it_was_given") else { return };
    for vcpus in [1, 2, 4] {
        let builder = PayloadVm::from_file(&programs.path("hello")).unwrap();
        let (result, text) = run(builder.vcpus(vcpus).arguments(["one", "two words", "", "exit=42"]));
        assert_eq!(result.unwrap(), 42, "{text}");
        for vcpu in 0..vcpus {
            assert!(text.contains(&format!("Hello from vCPU {vcpu} of {vcpus}\n")), "{text}");
        }
        for line in
            ["Argument 1: one\n", "Argument 2: two words\n", "Argument 3: \n", "Argument 4: exit=42\n"]
        {
            assert!(text.contains(line), "{text}");
        }
    }
}

/// An exception ends the VM with a report of vector, address and registers; a panic with its message and exit code 101.
#[test]
fn faults_are_told_clearly() {
    let Some(programs) = programs("faults_are_told_clearly") else { return };
    let fault = |what: &str| {
        let builder = PayloadVm::from_file(&programs.path("fault")).unwrap();
        run(builder.vcpus(2).arguments([what]))
    };
    for (what, vector, words) in [
        ("undefined", 6, "raised exception 6 (invalid opcode) on vCPU 0 at rip 0x2"),
        ("divide", 0, "raised exception 0 (division by zero or overflow)"),
        ("unmapped", 14, "reading at 0x400000000000, which is not mapped"),
        ("null", 14, "reading at 0x8, which is not mapped"),
        ("privileged", 13, "raised exception 13 (general protection fault)"),
        ("stack", 14, "writing at 0x0, which is not mapped"),
    ] {
        let (result, text) = fault(what);
        let error = result.unwrap_err();
        assert!(error.to_string().contains(words), "{what}: {error:?}");
        assert!(error.to_string().contains("rax "), "{what}: {error}");
        let PayloadError::Exception(report) = error else { panic!("{what}: {error:?}") };
        assert_eq!(report.vector, Some(vector), "{what}");
        assert!(report.rip >= payload_abi::LOWEST_LOAD_ADDRESS, "{what}: {report}");
        assert_eq!(text, "", "{what}");
    }
    let (result, text) = fault("panic");
    assert_eq!(result.unwrap(), 101);
    assert!(text.contains("asked for"), "{text}");
}

/// The measuring programs end and print figures.
#[test]
fn programs_that_measure_run() {
    let Some(programs) = programs("programs_that_measure_run") else { return };
    let builder = |name: &str| PayloadVm::from_file(&programs.path(name)).unwrap();
    let (result, text) = run(builder("memcpy").arguments(["64K", "4M"]));
    assert_eq!(result.unwrap(), 0, "{text}");
    assert!(text.contains("rep_movsb") && text.contains("GB/s"), "{text}");
    let (result, text) = run(builder("memcpy").arguments(["1G"]));
    assert_eq!(result.unwrap(), 2, "{text}");
    assert!(text.contains("give the VM more"), "{text}");
    let (result, text) = run(builder("pingpong").arguments(["50"]).vcpus(2));
    assert_eq!(result.unwrap(), 0, "{text}");
    assert!(text.contains("ns one way"), "{text}");
    let (result, text) = run(builder("doorbell").arguments(["20"]));
    assert_eq!(result.unwrap(), 0, "{text}");
    assert!(text.contains("doorbell, in the kernel"), "{text}");
}

/// Doorbells signal their eventfd without an exit to the monitor. Other stores to the page exit and are counted.
#[test]
fn doorbells_stay_in_the_kernel_and_other_exits_are_counted() {
    let Some(programs) = programs("doorbells_stay_in_the_kernel_and_other_exits_are_counted") else { return };
    let builder = PayloadVm::from_file(&programs.path("doorbell")).unwrap();
    let mut vm = builder.arguments(["50"]).console(Output::default()).build().unwrap();
    vm.start().unwrap();
    assert_eq!(vm.wait_for(HANG_LIMIT).unwrap(), Some(0));
    let mut count = [0; 8];
    rustix::io::read(vm.doorbell(0).unwrap(), &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 50);
    let exits = vm.exits();
    assert_eq!(exits.ranges().get("memory:doorbell page"), Some(&50), "{exits:?}");
    assert!(exits.ranges().contains_key("port:console"), "{exits:?}");
}

/// A window shows the host's memory live, and a store to it is a page fault.
#[test]
fn a_window_can_be_read_and_not_written() {
    use machine::slots::HostMapping;
    use std::os::fd::AsFd;
    let Some(programs) = programs("a_window_can_be_read_and_not_written") else { return };
    let memfd = rustix::fs::memfd_create("window", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memfd, 4096).unwrap();
    let window = HostMapping::new("window", memfd.as_fd(), 0, 4096, false).unwrap();
    let builder = PayloadVm::from_file(&programs.path("fault")).unwrap();
    let (result, _) = run(builder.window(window.clone()).arguments(["write-window"]));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("writing at 0x100000000, which is protected"), "{error}");

    rustix::io::pwrite(&memfd, b"read me", 0).unwrap();
    let builder = PayloadVm::from_file(&programs.path("hello")).unwrap();
    let (result, text) = run(builder.window(window));
    assert_eq!(result.unwrap(), 0);
    assert!(text.contains("Window begins with: read me"), "{text}");
}

/// The largest VM starts, and a spinning one can be stopped from outside.
#[test]
fn many_vcpus_and_stopping() {
    let Some(programs) = programs("many_vcpus_and_stopping") else { return };
    let builder = PayloadVm::from_file(&programs.path("hello")).unwrap();
    let (result, text) = run(builder.vcpus(16));
    assert_eq!(result.unwrap(), 0, "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("Hello from vCPU")).count(), 16, "{text}");

    let builder = PayloadVm::from_file(&programs.path("pingpong")).unwrap();
    let mut vm = builder.arguments(["100G"]).vcpus(2).console(Output::default()).build().unwrap();
    vm.start().unwrap();
    assert_eq!(vm.wait_for(Duration::from_millis(100)).unwrap(), None);
    vm.stop().unwrap();
    assert!(vm.wait_for(HANG_LIMIT).is_err());
}

/// Each error in settings and files yields one sentence, with or without KVM.
#[test]
fn wrong_settings_are_refused_in_one_sentence() {
    let program = b"not a program".to_vec();
    let builder = || PayloadVm::builder("x", program.clone());
    for (builder, words) in [
        (builder(), "x is not a payload program"),
        (builder().vcpus(0), "choose 1 to 254"),
        (builder().memory(5 << 20), "multiple of 2 MiB"),
        (builder().memory(1 << 50), "choose less"),
        (builder().stack_size(100), "multiple of 4 KiB"),
        (builder().vcpus(254).memory(4 << 20), "too small for 254 stacks"),
        (builder().doorbells(1000), "choose 0 to 256"),
        (builder().arguments(["a\0b"]), "null character"),
    ] {
        let error = builder.build().err().expect(words).to_string();
        assert!(error.contains(words) && !error.contains('\n'), "{error}");
    }
    let error = PayloadVm::from_file("/nonexistent/program".as_ref()).err().unwrap();
    assert!(error.to_string().contains("/nonexistent/program"), "{error}");
}
