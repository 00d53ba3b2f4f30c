//! Configuration space of a served function: bytes of the monitor and bytes of the server.
//!
//! | bytes | emulated by |
//! |---|---|
//! | header | the monitor, which sends a changed command register to the server |
//! | list of capabilities | the server, without those that aren't offered |
//! | MSI-X capability | the monitor, which sends message control to the server |
//! | other capabilities, registers, extended space | the server |

use std::ops::Range;

use pci::config::ConfigSpace;
use pci::function::ConfigEffect;
use pci::registers::{
    CAP_MSIX, CAPABILITY_POINTER, COMMAND, COMMAND_BUS_MASTER, FIRST_CAPABILITY, LEGACY_CONFIG_SPACE_SIZE,
    STATUS, STATUS_CAPABILITY_LIST,
};

use super::shape::{MSIX_CAPABILITY_LEN, Shape};

/// The server's part of an access.
pub(super) trait Server {
    /// Reads configuration space. Returns `false` if the server can't be reached.
    fn read(&self, offset: u16, data: &mut [u8]) -> bool;
    /// Writes configuration space. The implementation reports failures.
    fn write(&self, offset: u16, data: &[u8]);
}

/// Configuration space.
#[derive(Debug)]
pub(super) struct Registers {
    config: ConfigSpace,
    /// During a pause the server gets a command register without bus mastering.
    pub quiesced: bool,
}

impl Registers {
    pub(super) fn new(config: ConfigSpace) -> Self {
        Self { config, quiesced: false }
    }

    pub(super) fn config(&self) -> &ConfigSpace {
        &self.config
    }

    pub(super) fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    /// The command register for the server.
    pub(super) fn command(&self) -> u16 {
        let command = self.config.u16(COMMAND);
        if self.quiesced { command & !COMMAND_BUS_MASTER } else { command }
    }

    /// MSI-X capability: offset in the guest's view, and in the monitor's own space.
    fn msix(&self, shape: &Shape) -> Option<(u16, u16)> {
        let (at, _) = shape.msix.as_ref()?;
        Some((*at, self.config.capability_offset(CAP_MSIX)?))
    }

    /// A guest's read of 1, 2 or 4 bytes within a dword.
    pub(super) fn read(&self, shape: &Shape, server: &dyn Server, offset: u16, data: &mut [u8]) {
        self.config.read(offset, data);
        if offset >= FIRST_CAPABILITY {
            let inside = usize::from(offset) + data.len() <= shape.config.len();
            if !inside || !server.read(offset, data) {
                // The power-on state; zeros beyond the server's end.
                for (at, byte) in (usize::from(offset)..).zip(data.iter_mut()) {
                    *byte = shape.config.get(at).copied().unwrap_or(0);
                }
            }
            if let Some((at, own)) = self.msix(shape) {
                for (offset, byte) in (offset..).zip(data.iter_mut()) {
                    if (at..at + MSIX_CAPABILITY_LEN).contains(&offset) {
                        *byte = self.config.u8(own + (offset - at));
                    }
                }
            }
        }
        if usize::from(offset) >= LEGACY_CONFIG_SPACE_SIZE {
            return;
        }
        for (at, byte) in (offset..).zip(data.iter_mut()) {
            if at == STATUS {
                let [list, _] = STATUS_CAPABILITY_LIST.to_le_bytes();
                let present = if shape.capabilities.is_empty() { 0 } else { list };
                *byte = *byte & !list | present;
            }
            if let Some(link) = link(shape, at) {
                *byte = link;
            }
        }
    }

    /// A guest's write of 1, 2 or 4 bytes within a dword. The server gets its part.
    pub(super) fn write(
        &mut self,
        shape: &Shape,
        server: &dyn Server,
        offset: u16,
        data: &[u8],
    ) -> ConfigEffect {
        if offset < FIRST_CAPABILITY {
            let before = self.command();
            let effect = self.config.write(offset, data);
            if self.command() != before {
                server.write(COMMAND, &self.command().to_le_bytes());
            }
            return effect;
        }
        if let Some((at, own)) = self.msix(shape)
            && (at..at + MSIX_CAPABILITY_LEN).contains(&(offset & !3))
        {
            let effect = self.config.write(own + (offset - at), data);
            server.write(at + 2, &self.config.u16(own + 2).to_le_bytes());
            return effect;
        }
        let inside = usize::from(offset) + data.len() <= shape.config.len();
        if inside && !hidden(shape).any(|range| range.contains(&offset)) {
            server.write(offset, data);
        }
        ConfigEffect::default()
    }
}

/// The value of a link in the capability list, if `at` is one.
fn link(shape: &Shape, at: u16) -> Option<u8> {
    if at == CAPABILITY_POINTER {
        return Some(shape.capabilities.first().copied().unwrap_or(0));
    }
    let index = shape.capabilities.iter().position(|capability| u16::from(*capability) + 1 == at)?;
    Some(shape.capabilities.get(index + 1).copied().unwrap_or(0))
}

/// Ranges of capabilities that the guest doesn't see: up to the next capability, or the length of the longest MSI capability.
fn hidden(shape: &Shape) -> impl Iterator<Item = Range<u16>> + '_ {
    const MAX_MSI_CAPABILITY_BYTES: u16 = 24;
    let all = || shape.capabilities.iter().chain(&shape.hidden);
    shape.hidden.iter().map(move |at| {
        let start = u16::from(*at);
        let next = all().map(|other| u16::from(*other)).filter(|other| *other > start).min();
        start..next.unwrap_or(u16::MAX).min(start + MAX_MSI_CAPABILITY_BYTES)
    })
}
