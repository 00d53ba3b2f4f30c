//! Runs other programs during image builds. Prints their output only on failure.

use anyhow::{Context, Result, bail};
use std::io::Write;
use std::process::{Command, Stdio};

/// Runs a program to its end and returns its output.
pub fn output(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let got = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("Can't run {name}; is it installed?"))?;
    if !got.status.success() {
        let err = String::from_utf8_lossy(&got.stderr);
        let tail: Vec<&str> = err.lines().rev().take(6).collect::<Vec<_>>().into_iter().rev().collect();
        bail!("{name} ended with {}: {}", got.status, tail.join(" / "));
    }
    Ok(got.stdout)
}

/// As [`output`], with `input` on standard input.
pub fn filter(command: &mut Command, input: Vec<u8>) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("Can't run {name}; is it installed?"))?;
    let mut pipe = child.stdin.take().context("No pipe to the program")?;
    let feeder = std::thread::spawn(move || pipe.write_all(&input));
    let got = child.wait_with_output().with_context(|| format!("Can't read from {name}"))?;
    // A decompressor may stop reading at the end of its stream: only its exit status counts.
    drop(feeder.join());
    if !got.status.success() {
        bail!("{name} ended with {}: {}", got.status, String::from_utf8_lossy(&got.stderr).trim());
    }
    Ok(got.stdout)
}
