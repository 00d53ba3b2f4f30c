//! Which port a frame goes to: a learning switch's table, without frames and ports themselves.
//!
//! A port with a station address of its own (a device) keeps it for good: nobody else can learn it away. Other
//! addresses are learnt, from ports that may send for others, and forgotten when they were silent for long.

use std::collections::HashMap;
use std::time::Duration;

use crate::mac::MacAddress;

/// Most learnt addresses of one port: a flood of made-up addresses pushes out nobody else's.
const LEARNT_MAX: usize = 1024;

/// Where a station is.
#[derive(Debug, Clone, Copy)]
struct Station {
    port: usize,
    /// When it was heard last; `None`: it is the port's own.
    heard: Option<Duration>,
}

/// Where a frame goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// To one port.
    Port(usize),
    /// To all ports but the one it came from.
    Flood,
    /// Nowhere: its destination is behind the port it came from.
    Nowhere,
}

/// The table.
#[derive(Debug)]
pub(crate) struct Switch {
    stations: HashMap<MacAddress, Station>,
    /// Learnt addresses per port.
    learnt: HashMap<usize, usize>,
    aging: Duration,
    swept: Duration,
}

impl Switch {
    /// `aging`: how long a silent station is remembered.
    pub fn new(aging: Duration) -> Self {
        Self { stations: HashMap::new(), learnt: HashMap::new(), aging, swept: Duration::ZERO }
    }

    /// A port with its own address comes. `false` when another port has that address as its own.
    pub fn add_own(&mut self, port: usize, address: MacAddress) -> bool {
        match self.stations.get(&address) {
            Some(Station { heard: None, .. }) => return false,
            Some(Station { port, .. }) => self.forget_one(*port),
            None => {}
        }
        self.stations.insert(address, Station { port, heard: None });
        true
    }

    /// A port goes.
    pub fn remove_port(&mut self, port: usize) {
        self.stations.retain(|_, station| station.port != port);
        self.learnt.remove(&port);
    }

    fn forget_one(&mut self, port: usize) {
        if let Some(count) = self.learnt.get_mut(&port) {
            *count = count.saturating_sub(1);
        }
    }

    /// A frame from `source` came in at `port`. Whether it may: a port that may not send for others (`any_source`) sends
    /// from its own address only, and nobody sends from an address that is another port's own.
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
                // It has moved; see below for the count of this port.
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

    /// Where a frame from `port` to `destination` goes.
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

    /// Forgets silent stations; does something only when a quarter of the aging time has passed since.
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

    /// Addresses and their ports, for `inspect`: own ones with `true`.
    pub fn stations(&self) -> impl Iterator<Item = (MacAddress, usize, bool)> {
        self.stations.iter().map(|(address, station)| (*address, station.port, station.heard.is_none()))
    }
}

#[cfg(test)]
mod tests;
