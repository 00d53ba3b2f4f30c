//! Tests of rdma-core that no device can pass with the unmodified driver `vmw_pvrdma` and its provider. Each is run once more with
//! probes: at the entry of libibverbs, and where the driver passes a command to its device. Only the probes' evidence counts.

use super::rdma_pyverbs::{LIMIT, Outcome, TESTS};
use crate::progress;
use crate::rdma::{Member, quoted};
use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Command codes: `enum pvrdma_cmd` in the driver's `pvrdma_dev_api.h`.
const CREATE_QP: u32 = 9;
const QUERY_QP: u32 = 11;

/// The value that tests with `illegal_caps` in their names request.
const ILLEGAL: u32 = u32::MAX;

/// Required evidence of the probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sign {
    /// A queue pair is created, and the device never gets a query of it.
    NoQuery,
    /// The test requests 0xffffffff work requests in the send queue, and the driver requests 1 from the device.
    SendWrBecomes1,
    /// The same for the receive queue.
    RecvWrBecomes1,
}

/// Such tests: suffix of the name, a word of the failure, required evidence, and explanation.
const KNOWN: &[(&str, &str, Sign, &str)] = &[
    ("test_create_raw_qp_ex_with_illegal_caps_max_send_wr", "not raised", Sign::SendWrBecomes1, ROUNDED),
    ("test_create_raw_qp_ex_with_illegal_caps_max_recv_wr", "not raised", Sign::RecvWrBecomes1, ROUNDED),
    ("test_query_rc_qp", "not less than or equal to 0", Sign::NoQuery, UNASKED),
    ("test_query_ud_qp", "not less than or equal to 0", Sign::NoQuery, UNASKED),
];

const ROUNDED: &str = "the provider's align_next_power2 (pvrdma.h, called by pvrdma_create_qp in qp.c) takes a signed int: 0xffffffff is -1, and the next power of two is 1";
const UNASKED: &str = "the driver's pvrdma_query_qp (pvrdma_qp.c) answers for a queue pair in RESET by itself, without its sizes";

/// A queue pair's sizes at a probe, and the code of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
struct Seen {
    #[serde(default)]
    code: u32,
    send: u32,
    recv: u32,
}

/// A test's trace by the probes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Trace {
    test: String,
    verdicts: Vec<Outcome>,
    asked: Vec<Seen>,
    commands: Vec<Seen>,
}

impl Trace {
    fn shows(&self, sign: Sign) -> bool {
        let mut made = self.commands.iter().filter(|c| c.code == CREATE_QP).peekable();
        if self.asked.is_empty() || made.peek().is_none() {
            return false;
        }
        match sign {
            Sign::NoQuery => !self.commands.iter().any(|c| c.code == QUERY_QP),
            Sign::SendWrBecomes1 => self.asked.iter().all(|a| a.send == ILLEGAL) && made.all(|c| c.send == 1),
            Sign::RecvWrBecomes1 => self.asked.iter().all(|a| a.recv == ILLEGAL) && made.all(|c| c.recv == 1),
        }
    }
}

/// An explained failure, and whether the probes confirmed it.
#[derive(Debug, Clone)]
pub(super) struct Fault {
    /// The test's name.
    pub(super) test: String,
    /// Whether the probes confirmed the explanation.
    pub(super) shown: bool,
    how: String,
    why: &'static str,
    trace: Option<Trace>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |seen: &[Seen]| {
            seen.iter().map(|s| format!("{}/{}", s.send, s.recv)).collect::<Vec<_>>().join(", ")
        };
        let (asked, codes, sizes) = self.trace.as_ref().map_or_else(Default::default, |t| {
            let codes: Vec<String> = t.commands.iter().map(|c| c.code.to_string()).collect();
            let made: Vec<Seen> = t.commands.iter().filter(|c| c.code == CREATE_QP).copied().collect();
            (list(&t.asked), codes.join(" "), list(&made))
        });
        write!(
            f,
            "{}: {} (queue pairs asked for, send/receive requests: {asked}; asked of the device: {sizes}; commands to the device: {codes})",
            if self.shown { "fails before the device" } else { "NOT SHOWN to fail before the device" },
            self.why
        )
    }
}

impl Fault {
    /// Returns the fault for the last line.
    pub(super) fn json(&self) -> Value {
        json!({"test": self.test, "how": self.how, "why": self.why, "shown": self.shown, "evidence": self.to_string()})
    }
}

fn known(o: &Outcome) -> Option<(Sign, &'static str)> {
    let fits = |(test, how, ..): &&(&str, &str, Sign, &str)| {
        o.verdict == "failed" && o.test.ends_with(test) && o.why.contains(how)
    };
    KNOWN.iter().find(fits).map(|(_, _, sign, why)| (*sign, *why))
}

fn parse(text: &str) -> Result<BTreeMap<String, Trace>> {
    let lines = text.lines().filter_map(|l| l.strip_prefix("TRACED "));
    let all =
        lines.map(|l| serde_json::from_str::<Trace>(l).with_context(|| format!("The tracer printed {l:?}")));
    all.map(|t| t.map(|t| (t.test.clone(), t))).collect()
}

/// Runs the explained failures again, with the probes.
pub(super) fn shown(member: &Member<'_>, outcomes: &BTreeMap<String, Outcome>) -> Result<Vec<Fault>> {
    let found: Vec<(&Outcome, Sign, &'static str)> =
        outcomes.values().filter_map(|o| known(o).map(|(sign, why)| (o, sign, why))).collect();
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let names: Vec<String> = found.iter().map(|(o, ..)| quoted(&o.test)).collect();
    let script = format!(
        "exec python3 -W ignore /lab/pyverbs-trace.py {TESTS} {} {} {LIMIT} {}",
        member.port.device,
        member.port.gid,
        names.join(" ")
    );
    let output = member.run(&script, Duration::from_secs(600))?;
    // Without the probes nothing is confirmed, and the rest of the run still counts.
    if output.code != 0 || !output.stdout.contains("TRACED-END") {
        progress!("The probes ended with status {}: {}", output.code, output.stderr.trim());
    }
    let traces = parse(&output.stdout)?;
    let fault = |(o, sign, why): &(&Outcome, Sign, &'static str)| {
        let trace = traces.get(&o.test).cloned();
        // The same failure again, and confirmed by the probes.
        let shown = trace.as_ref().is_some_and(|t| {
            t.verdicts.len() == 1 && t.verdicts.iter().all(|v| known(v).is_some()) && t.shows(*sign)
        });
        Fault { test: o.test.clone(), shown, how: o.why.clone(), why, trace }
    };
    Ok(found.iter().map(fault).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(test: &str, verdict: &str, why: &str) -> Outcome {
        Outcome { test: test.into(), verdict: verdict.into(), why: why.into() }
    }

    #[test]
    fn only_failures_of_the_known_kind_are_explained() {
        let test = "test_qp.QPTest.test_query_rc_qp";
        assert!(known(&outcome(test, "failed", "924 not less than or equal to 0")).is_some());
        assert!(known(&outcome(test, "failed", "924 not less than or equal to 256")).is_none());
        assert!(known(&outcome(test, "passed", "")).is_none());
        assert!(known(&outcome("test_qp.QPTest.test_x", "failed", "not raised")).is_none());
    }

    #[test]
    fn what_the_probes_saw_decides() {
        let line = |asked: &str, commands: &str| {
            let text = format!(
                "TRACED {{\"test\": \"t\", \"verdicts\": [{{\"test\": \"t\", \"verdict\": \"failed\", \"why\": \"x\", \"seconds\": 0.1}}], \"asked\": [{asked}], \"commands\": [{commands}]}}\n"
            );
            parse(&text).unwrap().remove("t").unwrap()
        };
        let asked = r#"{"send": 4294967295, "recv": 7}"#;
        let one = line(asked, r#"{"code": 2, "send": 9, "recv": 9}, {"code": 9, "send": 1, "recv": 8}"#);
        assert!(one.shows(Sign::SendWrBecomes1) && one.shows(Sign::NoQuery));
        assert!(!one.shows(Sign::RecvWrBecomes1));
        let refused = line(asked, r#"{"code": 9, "send": 4294967295, "recv": 8}"#);
        assert!(!refused.shows(Sign::SendWrBecomes1));
        let queried = line(asked, r#"{"code": 9, "send": 1, "recv": 8}, {"code": 11, "send": 0, "recv": 0}"#);
        assert!(!queried.shows(Sign::NoQuery));
        // Without events of the probes nothing is confirmed.
        assert!(!line("", "").shows(Sign::NoQuery));
        assert!(!line(asked, "").shows(Sign::NoQuery));
    }
}
