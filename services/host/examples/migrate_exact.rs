//! VMs migrate among hosts of this process every few milliseconds while their programs use RDMA; one line of JSON reports operations that
//! were lost, repeated, reordered or corrupted.
//!
//! `cargo run --release -p host --example migrate_exact -- --operations 10000000 --hosts 3 --vms 3 --every-us 3000 --seed 1 --verbs 0`;
//! with `--verbs 1` connections use the hosts' RDMA devices, which are in memory.

use std::time::Instant;

use host_testbed::moving::Cluster;
use telemetry::logging::LogOptions;

fn main() -> Result<(), String> {
    let options = LogOptions { filter: Some("warn".to_owned()), json: false };
    telemetry::logging::init(&options).map_err(|error| error.to_string())?;
    let mut arguments = std::env::args().skip(1);
    let (mut operations, mut hosts, mut vms, mut every_us, mut seed, mut verbs) =
        (1_000_000u64, 3u64, 3u64, 3000u64, 1u64, 0u64);
    while let Some(name) = arguments.next() {
        let text = arguments.next().ok_or(format!("{name} needs a number"))?;
        let value: u64 = text.parse().map_err(|_| format!("{name} can't be {text}; give a number"))?;
        match name.as_str() {
            "--operations" => operations = value,
            "--hosts" => hosts = value.clamp(1, 8),
            "--vms" => vms = value.clamp(2, 8),
            "--every-us" => every_us = value,
            "--seed" => seed = value,
            "--verbs" => verbs = value,
            _ => return Err(format!("There is no option {name}")),
        }
    }
    let directions = vms * (vms - 1);
    let each = operations.div_ceil(directions);
    let hosts = usize::try_from(hosts).map_err(|error| error.to_string())?;
    let vms = u32::try_from(vms).map_err(|error| error.to_string())?;
    let mut cluster =
        if verbs == 0 { Cluster::new(hosts, vms, seed) } else { Cluster::by_verbs(hosts, vms, seed) };
    let began = Instant::now();
    let mut told = Instant::now();
    let verdict = cluster.run_until(each, every_us * 1000, |done, moves| {
        if told.elapsed().as_secs() >= 10 {
            told = Instant::now();
            let seconds = began.elapsed().as_secs_f64();
            eprintln!("{done} operations, {} migrations in {seconds:.0} s", moves.committed);
        }
    })?;
    let report = serde_json::json!({
        "scenario": "migrate-exact",
        "seconds": began.elapsed().as_secs_f64(),
        "result": verdict,
        "moves": cluster.moves,
    });
    println!("{report}");
    Ok(())
}
