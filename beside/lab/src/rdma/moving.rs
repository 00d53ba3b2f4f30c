//! Guests of a pair that move to other hosts.

use super::{Member, Pair, boot_with};
use crate::guest::Guest;
use crate::host::Host;
use anyhow::{Result, bail};
use std::time::Duration;

impl<'a> Pair<'a> {
    /// A guest by its number: 0 is the first.
    pub fn member(&self, number: usize) -> Result<&Member<'a>> {
        match number {
            0 => Ok(&self.a),
            1 => Ok(&self.b),
            _ => bail!("A pair has no guest number {number} that moves"),
        }
    }

    /// A monitor on a host that waits at an address for a guest to come, once it does.
    pub fn await_guest(
        &self,
        number: usize,
        host: usize,
        address: &str,
        patience: Duration,
    ) -> Result<Guest> {
        let mut layout = self.layout.clone();
        if let Some(place) = layout.hosts.get_mut(number) {
            *place = host;
        }
        let there: &Host = self.lab.host(host)?;
        let next = boot_with(self.lab, &layout, self.device, self.cpus, number + 1, Some(address))?;
        let name = self.member(number)?.name;
        let waits = format!(
            "for i in $(seq 400); do causeway inspect {name} summary | grep -q incoming && exit 0; sleep 0.3; done; exit 1"
        );
        if there.run(&waits, patience)?.code != 0 {
            bail!("The monitor on {} doesn't wait for VM {name}: {}", there.name(), next.session.err.tail(8));
        }
        Ok(next)
    }

    /// A guest has come there. Gives the one that it was.
    pub fn moved(&mut self, number: usize, guest: Guest, host: usize) -> Result<Guest> {
        let host = self.lab.host(host)?;
        let member = match number {
            0 => &mut self.a,
            1 => &mut self.b,
            _ => bail!("A pair has no guest number {number} that moves"),
        };
        member.host = host;
        Ok(std::mem::replace(&mut member.guest, guest))
    }
}
