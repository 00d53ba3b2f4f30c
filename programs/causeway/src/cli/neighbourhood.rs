//! Options of `causeway host` for neighbourhoods.

use std::time::Duration;

use clap::Args;
use host::neighbours::{Geometry, Heartbeat, NeighboursConfig, WindowError};
use monitor::description::ByteSize;

/// How large neighbourhoods are, and when a member counts as dead.
#[derive(Debug, Args)]
pub struct NeighbourhoodArgs {
    /// Slots of a neighbourhood, which limit its number of VMs: 1 to 64  [default: 16]
    #[arg(long, value_name = "COUNT")]
    pub neighbour_slots: Option<u32>,
    /// Largest memory of a VM in a neighbourhood, with the hole below 4 GiB: a power of two of at least 2M. All windows lie between
    /// 512G, or the window's size where that is larger, and the end of what the processor addresses  [default: 32G]
    #[arg(long, value_name = "SIZE")]
    pub neighbour_window: Option<ByteSize>,
    /// Heartbeat time-out: a neighbour without a heartbeat for this time counts as dead, milliseconds; more on hosts that often don't run
    /// their VMs
    #[arg(long, value_name = "MS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(300..=60_000))]
    pub neighbour_patience: u64,
}

impl NeighbourhoodArgs {
    /// Returns the daemon's configuration.
    ///
    /// # Errors
    /// Windows of this number and size are impossible.
    pub fn config(&self) -> Result<NeighboursConfig, WindowError> {
        let default = NeighboursConfig::default();
        let stride = self.neighbour_window.map_or(default.geometry.stride(), |size| size.0);
        let slots = self.neighbour_slots.unwrap_or(default.geometry.slots());
        Ok(NeighboursConfig {
            geometry: Geometry::new(default.geometry.base().max(stride), stride, slots)?,
            heartbeat: Heartbeat {
                patience: Duration::from_millis(self.neighbour_patience),
                ..Heartbeat::DEFAULT
            },
            ..default
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: NeighbourhoodArgs,
    }

    fn geometry(line: &str) -> Result<(u64, u64, u32), String> {
        let words = std::iter::once("host").chain(line.split(' ').filter(|word| !word.is_empty()));
        let config = Line::try_parse_from(words).unwrap().args.config().map_err(|error| error.to_string())?;
        Ok((config.geometry.base(), config.geometry.stride(), config.geometry.slots()))
    }

    #[test]
    fn number_and_size_of_windows_are_options() {
        assert_eq!(geometry(""), Ok((512 << 30, 32 << 30, 16)));
        assert_eq!(geometry("--neighbour-slots 64"), Ok((512 << 30, 32 << 30, 64)));
        assert_eq!(geometry("--neighbour-slots 2 --neighbour-window 1T"), Ok((1 << 40, 1 << 40, 2)));
        for (line, word) in [
            ("--neighbour-slots 65", "1 to 64"),
            ("--neighbour-slots 0", "1 to 64"),
            ("--neighbour-window 3G", "power of two"),
            ("--neighbour-window 1M", "power of two"),
            ("--neighbour-slots 64 --neighbour-window 1024T", "52-bit"),
        ] {
            let error = geometry(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
