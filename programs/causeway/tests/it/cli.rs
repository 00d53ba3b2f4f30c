//! Black-box tests of the program: output and exit status. They need no KVM, as no test starts a VM.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use proptest::prelude::*;

/// Runs the program with a separate runtime directory.
fn causeway(runtime: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_causeway"))
        .args(arguments)
        .env("XDG_RUNTIME_DIR", runtime)
        .env_remove("RUST_LOG")
        .env_remove("RUST_BACKTRACE")
        .current_dir(runtime)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Checks a failure: status 1, no standard output, and one sentence on standard error, followed by causes.
fn failure(output: &Output, context: &str) -> String {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{context}: {error}");
    assert!(output.stdout.is_empty(), "{context}: {}", text(&output.stdout));
    let mut lines = error.lines();
    let first = lines.next().unwrap_or_default();
    let sentence = first.strip_prefix("causeway: ").unwrap_or_default();
    // A sentence begins with a capital letter, or with its file or flag.
    let begins = sentence.starts_with(|c: char| c.is_uppercase() || c == '"' || c == '-' || c == '\'');
    assert!(begins || sentence.starts_with("vm.toml, "), "{context}: {error}");
    assert!(lines.all(|line| line.starts_with("  because: ")), "{context}: {error}");
    error
}

/// Arguments, and a part of the expected error.
const WRONG: &[(&[&str], &str)] = &[
    (&[], "No command was given"),
    (&["rum"], "Unrecognized subcommand 'rum'; some similar subcommands exist: 'run'"),
    (
        &["run", "--cpu", "2", "--kernel", "k"],
        "Unexpected argument '--cpu' found; a similar argument exists: '--cpus'",
    ),
    (&["run", "--payload", "p", "--nodes", "2", "--gather", "never"], "Unexpected argument '--gather' found"),
    (&["run"], "--kernel: there is nothing to run"),
    (&["run", "missing.toml"], "VM description missing.toml can't be read\n  because: No such file"),
    (&["run", "a.toml", "b.toml"], "\"b.toml\" is too many"),
    (&["run", "--kernel"], "A value is required for '--kernel <FILE>'"),
    (&["run", "--kernel", ""], "--kernel"),
    (&["run", "--kernel", "k", "--cpus", "0"], "--cpus: 0 vCPUs are not possible; allowed are 1 to 254"),
    (&["run", "--kernel", "k", "--cpus", "255"], "--cpus: 255 vCPUs are not possible"),
    (
        &["run", "--kernel", "k", "--cpus", "sockets=2,cores=127"],
        "--cpus: 2 sockets of 127 cores are not possible: each socket takes 128 APIC ids",
    ),
    (
        &["run", "--kernel", "k", "--cpus", "two"],
        "Invalid value 'two' for '--cpus <CPUS>': write a number of vCPUs",
    ),
    (&["run", "--kernel", "k", "--cpus", "99999999999999999999"], "Invalid value"),
    (&["run", "--kernel", "k", "--memory", "1"], "\"1\" is not a size: the unit is missing"),
    (&["run", "--kernel", "k", "--memory", "1GB"], "\"1GB\" is not a size: units are"),
    (&["run", "--kernel", "k", "--memory", "1M"], "--memory: 1M is not possible; allowed are 16M to 16T"),
    (&["run", "--kernel", "k", "--memory", "99999999999T"], "it doesn't fit into 64 bits"),
    (&["run", "--kernel", "k", "--hugepages", "4M"], "--hugepages: x86-64 has no huge pages of 4M"),
    (&["run", "--kernel", "k", "--disk", ""], "for '--disk <DISK>'"),
    (&["run", "--kernel", "k", "--disk", "d,bogus"], "\"bogus\" is not an option; known: path"),
    (&["run", "--kernel", "k", "--disk", "d,queues=0"], "--disk, disks[0].queues: 0 queues are not possible"),
    (
        &["run", "--kernel", "k", "--disk", "d", "--disk", "d"],
        "--disk, disks[1].path: disk 0 has the same file",
    ),
    (&["run", "--kernel", "k", "--net", "tap"], "\"tap\" is not known; begin with tap:NAME"),
    (&["run", "--kernel", "k", "--net", "tap:"], "--net, net[0].tap: \"\" is not an interface name"),
    (&["run", "--kernel", "k", "--net", "fd:2"], "--net, net[0].fd: 2 is not an inherited"),
    (&["run", "--kernel", "k", "--net", "user,mtu=1"], "--net, net[0].mtu: 1 is not an MTU"),
    (
        &["run", "--kernel", "k", "--vsock", "cid=1,socket=s"],
        "--vsock, vsock.cid: 1 is not a guest's context id",
    ),
    (&["run", "--kernel", "k", "--console", "tty"], "--console: \"tty\" is not known; allowed are stdio"),
    (
        &["run", "--kernel", "k", "--sandbox", "maybe"],
        "Invalid value 'maybe' for '--sandbox <SANDBOX>': allowed: on, log, off",
    ),
    (&["run", "--kernel", "k", "--rng=sometimes"], "allowed: on, off"),
    (&["run", "--kernel", "k", "--protocol", "efi"], "allowed: auto, pvh, linux64"),
    (&["run", "--kernel", "k", "--name", "a/b"], "--name: \"a/b\" is not a name"),
    (&["run", "--kernel", "k", "--pin", "0,1"], "--pin: 2 entries don't fit 1 vCPUs"),
    (&["run", "--kernel", "k", "--payload", "p"], "cannot be used with"),
    (&["run", "--payload", "missing.elf"], "missing.elf can't be read\n  because: No such file"),
    (&["--log-level", "loud", "list"], "\"loud\" of --log-level is not a log filter"),
    (&["pause"], "No VM runs here"),
    (&["resume", "nobody"], "No VM called \"nobody\" runs here; running: none"),
    (&["stop", "--force", "--power-button"], "cannot be used with"),
    (
        &["stop", "--socket", "/nonexistent/vm.sock"],
        "No VM answers at /nonexistent/vm.sock\n  because: No such file",
    ),
    (&["inspect", "--socket", "/nonexistent/vm.sock"], "No VM answers at"),
    (&["cluster", "serve", "--listen", "here", "--state", "s"], "Invalid value 'here' for '--listen"),
    (&["cluster", "serve", "--listen", "127.0.0.1:0"], "--state <FILE>"),
    (
        &["cluster", "serve", "--listen", "127.0.0.1:0", "--state", "/nonexistent/c.redb"],
        "/nonexistent/c.redb can't be opened",
    ),
    (
        &["cluster", "serve", "--listen", "127.0.0.1:0", "--state", "s.redb", "--mtu", "1501"],
        "An mtu of 1501 isn't possible",
    ),
    (
        &["cluster", "serve", "--listen", "192.0.2.1:1", "--state", "t.redb"],
        "can't listen at 192.0.2.1:1; choose another --listen",
    ),
    (&["cluster", "serve", "--listen", "127.0.0.1:0", "--state", "s", "--ca", "ca"], "--cert <FILE>"),
    (
        &[
            "cluster",
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--state",
            "u.redb",
            "--ca",
            "a",
            "--cert",
            "b",
            "--key",
            "c",
        ],
        "The certificate a can't be read",
    ),
    (&["cluster", "vms"], "--cluster <HOST:PORT>"),
    (&["cluster", "vms", "--cluster", "nowhere"], "\"nowhere\" is no address of a cluster service"),
    (&["cluster", "status", "--cluster", "127.0.0.1:1"], "No cluster service answers at 127.0.0.1:1"),
    (&["host", "--cluster", "127.0.0.1:1"], "--fabric-address"),
    (&["host", "--cluster", "127.0.0.1:1", "--fabric-address", "127.0.0.1:4792"], "--name <HOST>"),
    (
        &[
            "host",
            "--directory",
            "d",
            "--cluster",
            "127.0.0.1:1",
            "--fabric-address",
            "127.0.0.1:4792",
            "--name",
            "h",
        ],
        "cannot be used with",
    ),
    (&["host", "--fabric-address", "127.0.0.1:4792"], "--directory <PATH>|--cluster <HOST:PORT>"),
    // A socket that other hosts reach has a key, or the user accepts that it hasn't.
    (&["run", "--kernel", "k", "--incoming", "192.0.2.7:7000"], "give --incoming-key FILE"),
    (&["run", "--kernel", "k", "--incoming", "0.0.0.0:7000"], "accept that with --insecure"),
    (
        &["run", "--payload", "p", "--node", "0", "--peers", "tcp:127.0.0.1:1,tcp:192.0.2.7:2"],
        "tcp:192.0.2.7:2 is reached from other hosts",
    ),
    (&["run", "--kernel", "k", "--cluster-key", "f"], "--peers"),
    (
        &["run", "--payload", "p", "--node", "0", "--peers", "unix:a,unix:b", "--cluster-key", "nowhere"],
        "The cluster key nowhere can't be read",
    ),
    (
        &["host", "--socket", "h/h.sock", "--directory", "d", "--fabric-address", "192.0.2.7:4792"],
        "give --cluster-key FILE",
    ),
    (
        &[
            "host",
            "--socket",
            "h/h.sock",
            "--cluster",
            "127.0.0.1:1",
            "--fabric-address",
            "127.0.0.1:4792",
            "--name",
            "h",
        ],
        "because: No cluster service answers at 127.0.0.1:1",
    ),
];

#[test]
fn every_wrong_command_line_ends_in_one_sentence() {
    let runtime = tempfile::tempdir().unwrap();
    for (arguments, expected) in WRONG {
        let context = arguments.join(" ");
        let error = failure(&causeway(runtime.path(), arguments), &context);
        assert!(error.contains(expected), "{context}: {error:?} has no {expected:?}");
    }
}

#[test]
fn errors_in_a_file_name_its_line_and_errors_in_flags_the_flag() {
    let runtime = tempfile::tempdir().unwrap();
    std::fs::write(
        runtime.path().join("vm.toml"),
        "kernel = \"k\"\ncpus = 300\n[[disks]]\npath = \"d\"\nqueues = 99\n",
    )
    .unwrap();
    let error = failure(&causeway(runtime.path(), &["run", "vm.toml"]), "file");
    assert!(error.contains("vm.toml, line 2, cpus: 300 vCPUs"), "{error}");
    let error = failure(&causeway(runtime.path(), &["run", "vm.toml", "--cpus", "2"]), "flag wins");
    assert!(error.contains("vm.toml, line 5, disks[0].queues: 99 queues"), "{error}");
    let error = failure(&causeway(runtime.path(), &["run", "vm.toml", "--cpus", "400"]), "flag is wrong");
    assert!(error.contains("--cpus: 400 vCPUs"), "{error}");
}

#[test]
fn errors_as_json_have_the_causes_as_a_list() {
    let runtime = tempfile::tempdir().unwrap();
    let output = causeway(runtime.path(), &["--json", "run", "missing.toml"]);
    assert_eq!(output.status.code(), Some(1));
    let error: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(error["error"], "VM description missing.toml can't be read");
    assert!(error["causes"][0].as_str().unwrap().contains("No such file"));
}

#[test]
fn no_vms_are_an_empty_list_and_dead_ones_are_passed_over() {
    let runtime = tempfile::tempdir().unwrap();
    let output = causeway(runtime.path(), &["list", "--json"]);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), "[]\n"));
    let directory = runtime.path().join("causeway");
    std::fs::create_dir(&directory).unwrap();
    drop(UnixListener::bind(directory.join("dead.sock")).unwrap());
    let output = causeway(runtime.path(), &["list"]);
    assert!(text(&output.stdout).starts_with("No VM runs here (in "), "{output:?}");
}

/// Answers each request with the same JSON; returns the first line of the first request.
fn server(socket: &Path, body: &str) -> std::thread::JoinHandle<String> {
    let listener = UnixListener::bind(socket).unwrap();
    let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    std::thread::spawn(move || {
        loop {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut buffer = [0; 1024];
            while let Ok(read @ 1..) = stream.read(&mut buffer) {
                request.extend_from_slice(&buffer[..read]);
                if request.ends_with(b"\r\n\r\n") {
                    stream.write_all(answer.as_bytes()).unwrap();
                    return text(&request).lines().next().unwrap_or_default().to_owned();
                }
            }
        }
    })
}

#[test]
fn commands_reach_the_only_vm_and_print_its_answer() {
    let runtime = tempfile::tempdir().unwrap();
    let directory = runtime.path().join("causeway");
    std::fs::create_dir(&directory).unwrap();
    let socket = directory.join("web.sock");
    let exchange = |body: &str, arguments: &[&str]| {
        let _ = std::fs::remove_file(&socket);
        let server = server(&socket, body);
        let output = causeway(runtime.path(), arguments);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        (server.join().unwrap(), text(&output.stdout))
    };
    let (request, output) = exchange("{\"state\":\"paused\"}", &["pause"]);
    assert_eq!((request.as_str(), output.as_str()), ("PUT /v1/pause HTTP/1.1", "web is paused\n"));
    let (request, output) = exchange("{\"state\":\"running\"}", &["resume", "web", "--json"]);
    assert_eq!(
        (request.as_str(), output.as_str()),
        ("PUT /v1/resume HTTP/1.1", "{\n  \"state\": \"running\"\n}\n")
    );
    let (request, output) = exchange("{\"reads\":7}", &["inspect", "web", "disks/disk0"]);
    assert_eq!(
        (request.as_str(), output.as_str()),
        ("GET /v1/inspect?path=disks/disk0 HTTP/1.1", "reads: 7\n")
    );
    let summary = "{\"name\":\"web\",\"pid\":7,\"state\":\"running\",\"guest\":\"k\",\"vcpus\":2,\
                   \"memory_bytes\":1073741824,\"uptime_seconds\":61.5,\"version\":\"0\"}";
    let (_, output) = exchange(summary, &["list"]);
    assert_eq!(output.lines().nth(1), Some("web   running  7    2      1G      1m 1s   k"), "{output}");
    let socket_path = socket.to_str().unwrap();
    let (request, _) = exchange("{\"state\":\"stopping\"}", &["stop", "--force", "--socket", socket_path]);
    assert_eq!(request, "DELETE /v1/vm HTTP/1.1");
}

#[test]
fn the_doctor_reports_every_part_of_the_host() {
    let runtime = tempfile::tempdir().unwrap();
    let output = causeway(runtime.path(), &["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.success(), report["payloads"].as_bool().unwrap());
    let names: Vec<_> =
        report["groups"].as_array().unwrap().iter().map(|group| group["name"].clone()).collect();
    assert_eq!(names, ["KVM", "Memory", "VMs of several nodes", "Devices", "Kernel features"]);
    for finding in
        report["groups"].as_array().unwrap().iter().flat_map(|group| group["findings"].as_array().unwrap())
    {
        let ok = finding["status"] == "ok";
        assert!(ok || finding["remedy"].is_string(), "{finding}");
    }
    let output = causeway(runtime.path(), &["doctor"]);
    assert!(text(&output.stdout).contains("This host "), "{output:?}");
}

#[test]
fn help_and_version_are_no_failure() {
    let runtime = tempfile::tempdir().unwrap();
    for arguments in [&["--help"][..], &["run", "--help"], &["--version"], &["help", "stop"]] {
        let output = causeway(runtime.path(), arguments);
        assert_eq!(output.status.code(), Some(0));
        assert!(!output.stdout.is_empty() && output.stderr.is_empty());
    }
}

fn flag() -> impl Strategy<Value = Vec<String>> {
    let name = prop_oneof![
        Just("--cpus"),
        Just("--memory"),
        Just("--hugepages"),
        Just("--disk"),
        Just("--net"),
        Just("--vsock"),
        Just("--console"),
        Just("--pin"),
        Just("--name"),
        Just("--sandbox"),
        Just("--protocol"),
        Just("--on-reboot"),
        Just("--interrupts"),
        Just("--cmdline"),
        Just("--api-socket"),
        Just("--rng"),
        Just("--log-level"),
        Just("--bogus"),
    ];
    let value = prop_oneof![
        "[0-9]{1,21}",
        "[0-9]{1,4}[KMGT]",
        "(tap|fd|user):?[a-z0-9]{0,20}(,(mac|mtu|queues)=[0-9:]{0,8}){0,2}",
        "[a-z.]{1,8}(,(readonly|serial|queues|direct|format)(=[a-z0-9]{0,24})?){0,3}",
        "cid=[0-9]{0,11},socket=[a-z/]{0,4}",
        "[^\0]{0,12}",
    ];
    (name, value).prop_map(|(name, value)| vec![name.to_owned(), value])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// The description file doesn't exist, so no VM starts. For any other error, the output is one sentence.
    #[test]
    fn any_flags_end_in_one_sentence(flags in proptest::collection::vec(flag(), 0..5)) {
        let runtime = tempfile::tempdir().unwrap();
        let mut arguments = vec!["run", "missing.toml"];
        arguments.extend(flags.iter().flatten().map(String::as_str));
        let output = causeway(runtime.path(), &arguments);
        // `--cmdline --help` and similar: help in the place of a value prints help.
        prop_assume!(!flags.iter().flatten().any(|word| matches!(word.as_str(), "-h" | "-V")));
        failure(&output, &format!("{arguments:?}"));
    }
}

/// Log lines that can't be written, on a full disk or into a closed pipe, don't end the program.
#[test]
fn a_log_that_cannot_be_written_ends_nothing() {
    use std::io::{BufRead as _, BufReader};
    let (reader, closed) = std::io::pipe().unwrap();
    drop(reader);
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    for (standard_error, format) in [(Stdio::from(full), "text"), (Stdio::from(closed), "json")] {
        let runtime = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_causeway"));
        if format == "json" {
            command.arg("--log-json");
        }
        let mut service = command
            .args(["--json", "--log-level", "trace"])
            .args(["cluster", "serve", "--listen", "127.0.0.1:0", "--state", "c.redb"])
            .current_dir(runtime.path())
            .env_remove("RUST_LOG")
            .stdout(Stdio::piped())
            .stderr(standard_error)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(service.stdout.take().unwrap()).lines().map_while(Result::ok);
        let line = lines.find(|line| line.contains("listen")).unwrap();
        let address = line.split('"').nth(3).unwrap().to_owned();
        let output = causeway(runtime.path(), &["--json", "cluster", "status", "--cluster", &address]);
        assert!(output.status.success(), "{format}: {}", text(&output.stderr));
        assert_eq!(service.try_wait().unwrap(), None, "{format}: it ended");
        rustix::process::kill_process(
            rustix::process::Pid::from_child(&service),
            rustix::process::Signal::TERM,
        )
        .unwrap();
        let status = service.wait().unwrap();
        assert!(status.success(), "{format}: {status}");
    }
}

/// Runs the service as a separate process, and queries it with the program. After SIGKILL it continues with its file.
#[test]
fn the_cluster_service_serves_and_is_asked() {
    use std::io::{BufRead as _, BufReader};
    let runtime = tempfile::tempdir().unwrap();
    let serve = || {
        let mut service = Command::new(env!("CARGO_BIN_EXE_causeway"))
            .args([
                "--json",
                "cluster",
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--state",
                "c.redb",
                "--mtu",
                "4096",
            ])
            .current_dir(runtime.path())
            .env_remove("RUST_LOG")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(service.stdout.take().unwrap()).lines().map_while(Result::ok);
        let line = lines.find(|line| line.contains("listen")).unwrap();
        let address = line.split('"').nth(3).unwrap().to_owned();
        (service, address)
    };
    let (mut service, address) = serve();
    let ask = |what: &str, address: &str| {
        let output = causeway(runtime.path(), &["--json", "cluster", what, "--cluster", address]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let status = ask("status", &address);
    assert_eq!(
        (&status["mtu"], &status["authenticated"], &status["hosts"]),
        (&4096.into(), &false.into(), &0.into())
    );
    // A single instance with a file leads, without terms.
    let role = &status["instances"][0];
    assert_eq!((&role["store"], &role["leads"], &role["term"]), (&"redb".into(), &true.into(), &0.into()));
    assert_eq!((&status["store"], &status["leader"]), (&"redb".into(), &address.as_str().into()));
    let client = control_api::cluster::Service::new(&address, None).unwrap();
    let register = control_api::cluster::proto::RegisterHostRequest {
        name: "h1".to_owned(),
        fabric_address: "10.77.0.1:4792".to_owned(),
        incarnation: 0,
    };
    client.ask("RegisterHost", async |client| client.register_host(register).await).unwrap();
    assert_eq!(ask("hosts", &address)[0]["name"], "h1");
    assert_eq!(ask("vms", &address), serde_json::json!([]));
    let output = causeway(runtime.path(), &["cluster", "hosts", "--cluster", &address]);
    assert!(
        text(&output.stdout).contains("h1    10.77.0.1:4792  heard  1       0"),
        "{}",
        text(&output.stdout)
    );
    // One service per file.
    let second =
        causeway(runtime.path(), &["cluster", "serve", "--listen", "127.0.0.1:0", "--state", "c.redb"]);
    assert!(
        text(&second.stderr).contains("Is another `causeway cluster` running"),
        "{}",
        text(&second.stderr)
    );
    service.kill().unwrap();
    let mut said = String::new();
    service.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    service.wait().unwrap();
    assert!(said.contains("nothing is authenticated"), "{said}");
    let (mut service, address) = serve();
    assert_eq!(ask("hosts", &address)[0]["name"], "h1");
    service.kill().unwrap();
    service.wait().unwrap();
}

/// Options of several instances are checked first. A program without etcd reports that.
#[test]
fn several_instances_need_etcd_and_addresses() {
    let runtime = tempfile::tempdir().unwrap();
    let serve = |arguments: &[&str]| {
        let mut all = vec!["cluster", "serve"];
        all.extend(arguments);
        failure(&causeway(runtime.path(), &all), &format!("{arguments:?}"))
    };
    let listen = ["--listen", "127.0.0.1:0"];
    let with = |more: &[&'static str]| [&listen[..], more].concat();
    assert!(serve(&listen).contains("--state"));
    assert!(
        serve(&with(&["--state", "c.redb", "--etcd", "http://127.0.0.1:1"])).contains("cannot be used with")
    );
    assert!(serve(&with(&["--etcd", "ftp://127.0.0.1:1"])).contains("is no address of an etcd member"));
    assert!(
        serve(&with(&["--etcd", "http://127.0.0.1:1", "--etcd-prefix", "a/"]))
            .contains("without a slash at the end")
    );
    assert!(serve(&with(&["--etcd", "http://127.0.0.1:1", "--advertise", "x"])).contains("write HOST:PORT"));
    let all = serve(&["--listen", "0.0.0.0:0", "--etcd", "http://127.0.0.1:1"]);
    assert!(all.contains("give it with --advertise"), "{all}");
    if cfg!(not(feature = "etcd")) {
        let built = serve(&with(&["--etcd", "http://127.0.0.1:1"]));
        assert!(built.contains("built without etcd") && built.contains("--features etcd"), "{built}");
    }
    // Several addresses without an answer: one sentence.
    let output = causeway(runtime.path(), &["cluster", "status", "--cluster", "127.0.0.1:1,127.0.0.1:2"]);
    let said = failure(&output, "status");
    assert!(
        said.contains(
            "None of the cluster service's instances leads: 127.0.0.1:1: No cluster service answers"
        ),
        "{said}"
    );
}
