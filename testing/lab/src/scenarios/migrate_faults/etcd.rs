//! The service's state in etcd: three members on the service's host, with their data in its memory. Election time-outs fit starved
//! hosts.

use crate::channel::Session;
use crate::host::Host;
use crate::lab::Lab;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::time::Duration;

/// Number of members.
pub(super) const MEMBERS: usize = 3;
/// The host of the members and the service.
const HOST: usize = 2;
/// This machine's etcd, which is copied to the host.
const PROGRAM: &str = "/usr/bin/etcd";
/// Time-out until a member listens.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(300);

/// A cluster of etcd.
pub(super) struct Etcd {
    members: Vec<Session>,
}

fn client(number: usize) -> String {
    format!("http://127.0.0.1:{}", 2379 + 10 * number)
}

fn peer(number: usize) -> String {
    format!("http://127.0.0.1:{}", 2380 + 10 * number)
}

/// Returns the command that starts a new member or restarts a killed one.
fn command(number: usize) -> String {
    let all: Vec<String> = (0..MEMBERS).map(|number| format!("e{number}={}", peer(number))).collect();
    let (client, peer) = (client(number), peer(number));
    format!(
        "exec etcd --name e{number} --data-dir /run/etcd/{number} --listen-client-urls {client} --advertise-client-urls {client} \
         --listen-peer-urls {peer} --initial-advertise-peer-urls {peer} --initial-cluster {} --initial-cluster-state new \
         --heartbeat-interval 1000 --election-timeout 10000 --log-level warn",
        all.join(",")
    )
}

fn start(host: &Host, number: usize) -> Result<Session> {
    host.spawn(&format!("etcd {number}"), &command(number))
}

fn await_member(host: &Host, number: usize, member: &Session) -> Result<()> {
    let port = 2379 + 10 * number;
    let listens = format!(
        "for i in $(seq 400); do ss -Hltn 'sport = :{port}' | grep -q . && exit 0; sleep 0.2; done; exit 1"
    );
    if host.run(&listens, LISTEN_TIMEOUT)?.code != 0 {
        bail!("Member {number} of etcd doesn't listen: {}{}", member.out.tail(5), member.err.tail(5));
    }
    Ok(())
}

impl Etcd {
    /// Starts all members.
    ///
    /// # Errors
    /// This machine has no etcd, or a member doesn't start.
    pub fn begin(lab: &Lab) -> Result<Self> {
        if !Path::new(PROGRAM).exists() {
            bail!("`--only etcd` needs {PROGRAM} on this machine (Debian: etcd-server)");
        }
        let host = lab.host(HOST)?;
        host.install(Path::new(PROGRAM))?;
        host.sh("mkdir -p /run/etcd")?;
        let members = (0..MEMBERS).map(|number| start(host, number)).collect::<Result<Vec<_>>>()?;
        for (number, member) in members.iter().enumerate() {
            await_member(host, number, member)?;
        }
        Ok(Self { members })
    }

    /// Returns the process of a member.
    pub fn member(&self, number: usize) -> Result<&Session> {
        self.members.get(number).with_context(|| format!("etcd has no member {number}"))
    }

    /// Restarts a killed member.
    pub fn restart(&mut self, lab: &Lab, number: usize) -> Result<()> {
        let host = lab.host(HOST)?;
        let member = start(host, number)?;
        await_member(host, number, &member)?;
        if let Some(place) = self.members.get_mut(number) {
            *place = member;
        }
        Ok(())
    }

    /// Waits until the service, which may just have been killed, leads again: its previous lease must expire first.
    pub fn await_leader(lab: &Lab, address: &str, service: &Session) -> Result<()> {
        let leads = format!(
            "for i in $(seq 300); do timeout 10 causeway cluster hosts --cluster {address} --json > /dev/null 2>&1 && exit 0; sleep 0.5; done; exit 1"
        );
        if lab.host(HOST)?.run(&leads, LISTEN_TIMEOUT)?.code != 0 {
            bail!("The service doesn't lead: {}", service.err.tail(8));
        }
        Ok(())
    }

    /// Returns the service's flags for etcd.
    pub fn flags() -> String {
        let all: Vec<String> = (0..MEMBERS).map(client).collect();
        // Emulated hosts may stall for many seconds.
        format!("--etcd {} --leader-lease 30", all.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The members and the service use the same addresses of the members.
    #[test]
    fn members_know_each_other() {
        for number in 0..MEMBERS {
            let command = command(number);
            for other in 0..MEMBERS {
                assert!(command.contains(&format!("e{other}={}", peer(other))), "{command}");
            }
            assert!(command.contains(&format!("--name e{number} ")));
            assert!(Etcd::flags().contains(&client(number)));
        }
    }
}
