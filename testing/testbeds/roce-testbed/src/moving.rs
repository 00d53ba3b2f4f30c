//! Connections that are saved, restored, and moved to another host.

use roce::connection::Connection;

use super::world::{Event, World};

impl World {
    /// Saves both ends of a connection, and replaces them by restored ones.
    pub(super) fn save(&mut self, link: u32) {
        let now = self.now;
        for side in &mut self.links[link as usize].sides {
            let saved = side.connection.save(now);
            match Connection::restore(&saved, now) {
                Ok(restored) if restored.save(now) == saved => {
                    let bounded = saved.responder.resources.len()
                        <= usize::from(saved.config.max_dest_rd_atomic)
                        && saved.requester.queue.len() <= saved.config.max_requests as usize;
                    if !bounded {
                        self.verdict = Some(format!("link {link}: its state grows without bound"));
                    }
                    side.connection = restored;
                    self.report.restored += 1;
                }
                Ok(_) => self.verdict = Some(format!("link {link}: another state after restoring")),
                Err(error) => self.verdict = Some(format!("link {link}: {error} at {now} ns")),
            }
        }
        let open = self.links[link as usize].flows.iter().any(|flow| !flow.is_done());
        if open && self.rng.chance(900) {
            let after = u64::from(self.rng.below(100_000_000 / self.faults.saves.max(1) / 100));
            self.schedule(after, link, 0, Event::Save);
        }
    }

    /// Begins to move one end to another host, and suspends the other end.
    pub(super) fn hold(&mut self, link: u32, at: u8, until: u64) {
        let now = self.now;
        let [left, right] = &mut self.links[link as usize].sides;
        let (mover, peer) = if at == 0 { (left, right) } else { (right, left) };
        if mover.moving.is_some() || peer.moving.is_some() {
            return;
        }
        mover.connection.suspend(now);
        peer.connection.suspend(now);
        mover.moving = Some(Box::new(mover.connection.save(now)));
        self.schedule(until.saturating_sub(now), link, at, Event::Arrive);
    }

    /// Completes the move of an end.
    pub(super) fn arrive(&mut self, link: u32, at: u8) {
        let now = self.now;
        let [left, right] = &mut self.links[link as usize].sides;
        let (mover, peer) = if at == 0 { (left, right) } else { (right, left) };
        let Some(saved) = mover.moving.take() else { return };
        match Connection::restore(&saved, now) {
            Ok(restored) => mover.connection = restored,
            Err(error) => {
                self.verdict = Some(format!("link {link}: {error}, after moving"));
                return;
            }
        }
        self.report.restored += 1;
        mover.connection.resume(now);
        peer.connection.resume(now);
        for side in 0..2 {
            if !self.links[link as usize].sides[usize::from(side)].dead {
                self.drive(link, side);
            }
        }
    }
}
