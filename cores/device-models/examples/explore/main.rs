//! Explores the state space of every description and prints its size: `cargo run --release -p device-models --example
//! explore [device...]`. With `--page DIRECTORY` it writes the descriptions' reference pages instead.

mod space;

use std::process::ExitCode;
use std::time::Instant;

use device_models::devices;
use space::{Order, explore};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == "--page") {
        let Some(directory) = words.get(1) else {
            eprintln!("Name the directory that the pages go to: --page DIRECTORY");
            return ExitCode::FAILURE;
        };
        for device in devices::ALL {
            let path = format!("{directory}/{}.md", device.name);
            if let Err(error) = std::fs::write(&path, device_models::page::page(device)) {
                eprintln!("Cannot write the page '{path}': {error}");
                return ExitCode::FAILURE;
            }
        }
        return ExitCode::SUCCESS;
    }
    if let Some(unknown) = words.iter().find(|word| devices::ALL.iter().all(|device| device.name != **word)) {
        let known: Vec<&str> = devices::ALL.iter().map(|device| device.name).collect();
        eprintln!("There is no description of '{unknown}': give some of {}", known.join(", "));
        return ExitCode::FAILURE;
    }
    let mut passed = true;
    for device in
        devices::ALL.iter().filter(|device| words.is_empty() || words.iter().any(|word| word == device.name))
    {
        let began = Instant::now();
        let report = explore(device, Order::DeviceFirst);
        println!(
            "{}: {} states, {} steps of {} kinds, depth {}, {:.1} s",
            device.name,
            report.states,
            report.steps,
            report.requests,
            report.depth,
            began.elapsed().as_secs_f64()
        );
        for window in &report.unused {
            println!("{}: no state uses the window '{window}'", device.name);
        }
        for finding in &report.findings {
            println!("{}: {finding}", device.name);
        }
        passed &= report.findings.is_empty() && report.unused.is_empty();
    }
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
