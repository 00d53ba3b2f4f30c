//! Runs two programs that communicate, at two places.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::Result;

use super::{Runs, quoted};
use crate::channel::Output;
use crate::progress;

/// perftest's client prints this if no server listens for its request.
const UNHEARD: &str = "RDMA_CM_EVENT_REJECTED; error: 8";
/// Limit of attempts of a rejected client.
const TRIES: u32 = 3;

/// Number of repeated pairs in this process.
static AGAIN: AtomicU32 = AtomicU32::new(0);

/// Returns the number of repeated pairs so far, for reports.
pub fn ran_again() -> u32 {
    AGAIN.load(Ordering::Relaxed)
}

/// Runs a server at the first of two places. After `listening` succeeds there, runs a client at the other. A server
/// that doesn't end by itself is killed after the client.
///
/// With `-R`, perftest's client requests a second connection immediately after the first. On an overloaded machine its
/// server may not listen again yet. The kernel then rejects the request as "invalid service ID". In that case both
/// programs are run again, and a message reports it.
pub fn both<S: Runs + ?Sized, C: Runs + ?Sized>(
    at: (&S, &C),
    server: &str,
    server_ends: bool,
    listening: &str,
    client: &str,
    timeout: Duration,
) -> Result<(Output, Output)> {
    let mut tries = 1;
    loop {
        let (said, answered) = once(at, (server, server_ends), listening, client, timeout)?;
        let unheard = answered.stdout.contains(UNHEARD) || answered.stderr.contains(UNHEARD);
        if !unheard || tries == TRIES {
            return Ok((said, answered));
        }
        tries += 1;
        AGAIN.fetch_add(1, Ordering::Relaxed);
        progress!("again: the client's second request came before perftest's server listened anew");
    }
}

fn once<S: Runs + ?Sized, C: Runs + ?Sized>(
    (server_in, client_in): (&S, &C),
    (server, server_ends): (&str, bool),
    listening: &str,
    client: &str,
    timeout: Duration,
) -> Result<(Output, Output)> {
    let seconds = timeout.as_secs();
    let bound = |script: &str| format!("exec timeout -k 5 {seconds} sh -c {}", quoted(script));
    let server = format!(
        "{{ {server}\n}} & s=$!; i=0; until {listening}; do i=$((i+1)); [ $i -gt 100 ] && break; kill -0 $s 2>/dev/null || break; sleep 0.1; done\n\
         echo SERVER-LISTENS; wait $s"
    );
    let session = server_in.start(&bound(&server))?;
    // A server that ended at once has printed the cause. The client then reports its own.
    session.wait_for("SERVER-LISTENS", 0, Duration::from_secs(60));
    let client = client_in.run(&bound(client), timeout + Duration::from_secs(60))?;
    // A server that outlives its client waits for an event that won't come.
    let patience = Duration::from_secs(if client.code == 0 && server_ends { 30 } else { 2 });
    let server = session.output(patience);
    let server =
        server.unwrap_or_else(|e| Output { code: 124, stdout: String::new(), stderr: format!("{e:#}") });
    Ok((server, client))
}
