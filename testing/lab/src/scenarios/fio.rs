//! Parses fio's JSON report of a job.

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A successful job.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Job {
    /// Bytes written.
    pub(super) written: u64,
    /// Bytes read, including verification.
    pub(super) read: u64,
    /// Number of reads and writes.
    pub(super) operations: u64,
    /// Seconds of writes, and of reads.
    pub(super) seconds: (f64, f64),
    /// Mean time of a write from submission to completion, in µs.
    pub(super) write_latency: f64,
}

/// Parses the report. A failed job is an error.
pub(super) fn job(text: &str) -> Result<Job> {
    let start = text.find('{').context("fio printed no JSON")?;
    let tree: Value = serde_json::from_str(&text[start..]).context("fio's JSON can't be read")?;
    let job = &tree["jobs"][0];
    if job["error"].as_u64() != Some(0) {
        bail!("fio ended with error {}", job["error"]);
    }
    let number = |what: &str, name: &str| {
        job[what][name].as_f64().with_context(|| format!("no {name} of {what} in fio's JSON"))
    };
    let bytes = |what: &str| {
        job[what]["io_bytes"].as_u64().with_context(|| format!("no bytes of {what} in fio's JSON"))
    };
    let operations = |what: &str| job[what]["total_ios"].as_u64().unwrap_or(0);
    Ok(Job {
        written: bytes("write")?,
        read: bytes("read")?,
        operations: operations("write") + operations("read"),
        seconds: (number("write", "runtime")? / 1000.0, number("read", "runtime")? / 1000.0),
        write_latency: job["write"]["lat_ns"]["mean"].as_f64().unwrap_or(0.0) / 1000.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_is_read() {
        let text = "x\n{\"jobs\":[{\"error\":0,\"write\":{\"io_bytes\":10,\"total_ios\":2,\"runtime\":500,\"lat_ns\":{\"mean\":3000.0}},\
            \"read\":{\"io_bytes\":20,\"total_ios\":1,\"runtime\":0}}]}";
        let got = job(text).unwrap();
        assert_eq!((got.written, got.read, got.operations), (10, 20, 3));
        assert_eq!((got.seconds, got.write_latency), ((0.5, 0.0), 3.0));
        assert!(job("{\"jobs\":[{\"error\":5}]}").is_err());
        assert!(job("nothing").is_err());
    }
}
