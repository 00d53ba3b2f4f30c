//! Migration of a pair's guests to other hosts.

use super::{Device, Layout, Member, Pair, boot, boot_with, start_daemon, up};
use crate::channel::Session;
use crate::guest::Guest;
use crate::host::Host;
use crate::lab::Lab;
use crate::transcript::Waited;
use anyhow::{Context, Result, bail};
use std::time::Duration;

/// A guest that migrates to another host.
pub struct Coming<'a> {
    /// The guest at its source.
    pub member: &'a Member<'a>,
    /// Its number, from 0.
    pub number: usize,
    /// Its number of CPUs.
    pub cpus: u32,
}

/// Starts a monitor on a host that waits at an address for a guest, and returns when it listens.
pub fn await_guest(
    lab: &Lab,
    layout: &Layout,
    coming: &Coming<'_>,
    (host, address): (usize, &str),
    patience: Duration,
) -> Result<Guest> {
    let mut layout = layout.clone();
    if let Some(place) = layout.hosts.get_mut(coming.number) {
        *place = host;
    }
    let there: &Host = lab.host(host)?;
    let next = boot_with(lab, &layout, Device::Pvrdma, coming.cpus, coming.number + 1, Some(address))?;
    // The monitor prints whether the cluster knows it after it listens. A query by a program would take an emulated
    // host most of a second.
    match next.session.err.wait_for("The address for the incoming VM", 0, patience) {
        Waited::Line(..) => {}
        Waited::Ended | Waited::Timeout => {
            let name = coming.member.name;
            bail!("The monitor on {} doesn't wait for VM {name}: {}", there.name(), next.session.err.tail(8));
        }
    }
    Ok(next)
}

impl<'a> Member<'a> {
    /// Replaces the guest after its migration to another host. Returns the previous one.
    pub fn moved(&mut self, guest: Guest, host: &'a Host) -> Guest {
        self.host = host;
        std::mem::replace(&mut self.guest, guest)
    }
}

fn no_such(number: usize) -> String {
    format!("There is no guest number {number} that moves")
}

impl<'a> Pair<'a> {
    /// Returns a guest by its number, from 0.
    pub fn member(&self, number: usize) -> Result<&Member<'a>> {
        match number {
            0 => Ok(&self.a),
            1 => Ok(&self.b),
            _ => self.more.get(number - 2).with_context(|| no_such(number)),
        }
    }

    /// Starts a monitor on a host that waits at an address for a guest, and returns when it listens.
    pub fn await_guest(
        &self,
        number: usize,
        host: usize,
        address: &str,
        patience: Duration,
    ) -> Result<Guest> {
        let coming = Coming { member: self.member(number)?, number, cpus: self.cpus };
        await_guest(self.lab, &self.layout, &coming, (host, address), patience)
    }

    /// Restarts a host's daemon, whose process has ended. Returns the previous session.
    pub fn restart_daemon(&mut self, host: usize) -> Result<Session> {
        let arguments =
            self.layout.daemons.get(host).with_context(|| format!("Host number {host} has no daemon"))?;
        let new = start_daemon(self.lab.host(host)?, arguments)?;
        let place =
            self.daemons.get_mut(host).with_context(|| format!("Host number {host} has no daemon"))?;
        Ok(std::mem::replace(place, new))
    }

    /// Boots a guest again on a host, after its monitor has ended.
    pub fn reboot(&mut self, number: usize, host: usize) -> Result<()> {
        let place = self.layout.hosts.get_mut(number).with_context(|| no_such(number))?;
        *place = host;
        let name = self.member(number)?.name;
        self.lab.host(host)?.sh(&format!("rm -f {}", crate::guest_channel::socket(name)))?;
        let guest = boot(self.lab, &self.layout, self.device, self.cpus, number + 1)?;
        let member = up(self.lab, &self.layout, self.device, number + 1, guest)?;
        match number {
            0 => self.a = member,
            1 => self.b = member,
            _ => *self.more.get_mut(number - 2).with_context(|| no_such(number))? = member,
        }
        Ok(())
    }

    /// Replaces a guest after its migration. Returns the previous one.
    pub fn moved(&mut self, number: usize, guest: Guest, host: usize) -> Result<Guest> {
        let host = self.lab.host(host)?;
        let member = match number {
            0 => &mut self.a,
            1 => &mut self.b,
            _ => self.more.get_mut(number - 2).with_context(|| no_such(number))?,
        };
        Ok(member.moved(guest, host))
    }
}
