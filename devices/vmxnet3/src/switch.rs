//! A learning switch's table: the port for a destination address. It knows neither frames nor ports themselves.
//!
//! A port with a station address of its own (a device) keeps it for good: no other port can learn it. Other addresses are learnt from ports
//! that may send from any address, and expire after a long silence.

use std::collections::HashMap;
use std::time::Duration;

use crate::mac::MacAddress;

/// Limit of learnt addresses of one port, so that a flood of forged addresses evicts no other port's.
const LEARNT_MAX: usize = 1024;

/// Location of a station.
#[derive(Debug, Clone, Copy)]
struct Station {
    port: usize,
    /// When it last sent; `None` for a port's own address.
    heard: Option<Duration>,
}

/// Route of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// To one port.
    Port(usize),
    /// To all ports but the one that it came from.
    Flood,
    /// To none: its destination is at the port that it came from.
    Nowhere,
}

/// The table.
#[derive(Debug)]
pub(crate) struct Switch {
    stations: HashMap<MacAddress, Station>,
    /// Number of learnt addresses per port.
    learnt: HashMap<usize, usize>,
    aging: Duration,
    swept: Duration,
}

impl Switch {
    /// An empty table. `aging` is how long the address of a silent station is kept.
    pub fn new(aging: Duration) -> Self {
        Self { stations: HashMap::new(), learnt: HashMap::new(), aging, swept: Duration::ZERO }
    }

    /// Adds a port with its own address. `false` when another port has that address as its own.
    pub fn add_own(&mut self, port: usize, address: MacAddress) -> bool {
        match self.stations.get(&address) {
            Some(Station { heard: None, .. }) => return false,
            Some(Station { port, .. }) => self.forget_one(*port),
            None => {}
        }
        self.stations.insert(address, Station { port, heard: None });
        true
    }

    /// Removes a port.
    pub fn remove_port(&mut self, port: usize) {
        self.stations.retain(|_, station| station.port != port);
        self.learnt.remove(&port);
    }

    fn forget_one(&mut self, port: usize) {
        if let Some(count) = self.learnt.get_mut(&port) {
            *count = count.saturating_sub(1);
        }
    }

    /// Learns the source address of a frame from `port`, and returns whether the frame is permitted. A port without `any_source` may send
    /// from its own address only. No port may send from another port's own address.
    pub fn admit(&mut self, port: usize, source: MacAddress, any_source: bool, now: Duration) -> bool {
        if source.is_group() {
            return false;
        }
        match self.stations.get_mut(&source) {
            Some(Station { port: owner, heard: None }) => return *owner == port,
            _ if !any_source => return false,
            Some(station) if station.port == port => {
                station.heard = Some(now);
                return true;
            }
            Some(station) => {
                // The station has moved; the count of the new port follows below.
                let before = station.port;
                self.forget_one(before);
                self.stations.remove(&source);
            }
            None => {}
        }
        let count = self.learnt.entry(port).or_default();
        if *count < LEARNT_MAX && source.is_unicast() {
            *count += 1;
            self.stations.insert(source, Station { port, heard: Some(now) });
        }
        true
    }

    /// Route of a frame from `port` to `destination`.
    pub fn route(&self, port: usize, destination: MacAddress, now: Duration) -> Route {
        if destination.is_group() {
            return Route::Flood;
        }
        match self.stations.get(&destination) {
            Some(station) if self.is_stale(station, now) => Route::Flood,
            Some(station) if station.port == port => Route::Nowhere,
            Some(station) => Route::Port(station.port),
            None => Route::Flood,
        }
    }

    fn is_stale(&self, station: &Station, now: Duration) -> bool {
        station.heard.is_some_and(|heard| now.saturating_sub(heard) > self.aging)
    }

    /// Removes silent stations, at most once per quarter of the aging time.
    pub fn sweep(&mut self, now: Duration) {
        if now.saturating_sub(self.swept) < self.aging / 4 {
            return;
        }
        self.swept = now;
        let aging = self.aging;
        let learnt = &mut self.learnt;
        self.stations.retain(|_, station| {
            let keep = station.heard.is_none_or(|heard| now.saturating_sub(heard) <= aging);
            if !keep && let Some(count) = learnt.get_mut(&station.port) {
                *count = count.saturating_sub(1);
            }
            keep
        });
    }

    /// Addresses and their ports, for `inspect`; `true` for a port's own.
    pub fn stations(&self) -> impl Iterator<Item = (MacAddress, usize, bool)> {
        self.stations.iter().map(|(address, station)| (*address, station.port, station.heard.is_none()))
    }
}

#[cfg(test)]
mod tests;
