//! The shadow register page of a NIC, and writes that signal an eventfd instead of exiting (`vpio::shown`, `vpio::plan`).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use device_models::Access;
use device_models::describe::{Bar, Device};
use machine::slots::{PAGE, SharedPage};
use pci::function::{BarMapping, Doorbell};
use rustix::event::{EventfdFlags, eventfd};
use vpio::plan::{PagePlan, Told, plan};
use vpio::shown::Shown;

use super::NicError;

/// The shadow register page of a NIC.
pub(super) struct RegisterPage {
    page: SharedPage,
    /// Memory BARs that begin with the page.
    bars: Vec<u8>,
    /// Bytes of the page that are registers.
    size: u32,
    signaled: Vec<(Told, Arc<OwnedFd>)>,
    /// Signaled writes must be processed at once.
    prompt: bool,
}

impl RegisterPage {
    /// The page of a device; `None` if its drivers' reads must exit.
    pub fn of(name: &str, device: &'static Device) -> Result<Option<Self>, NicError> {
        let plan = plan(device);
        let bars: Vec<u8> = plan
            .pages
            .iter()
            .filter(|(_, offset, plan)| *offset == 0 && *plan == PagePlan::ReadOnlyShadow)
            .map(|(bar, ..)| *bar)
            .collect();
        let Some(Bar::Memory(size)) = bars.first().and_then(|bar| device.bars.get(usize::from(*bar))) else {
            return Ok(None);
        };
        let page = SharedPage::new(name).map_err(|error| NicError::machine("page of registers", error))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let signaled = plan.told.into_iter().map(|signaled| Ok((signaled, Arc::new(eventfd(0, flags)?))));
        let signaled: Result<_, rustix::io::Errno> = signaled.collect();
        let signaled = signaled.map_err(|error| NicError::machine("descriptor", error))?;
        let page = Self { page, bars, size: (*size).min(PAGE_BYTES), signaled, prompt: device.polled.prompt };
        // A BAR may be larger than the device.
        (page.size..PAGE_BYTES).for_each(|offset| page.page.store(offset, 1, u32::MAX));
        Ok(Some(page))
    }

    pub fn put(&self, shown: Shown) {
        if shown.offset < self.size {
            self.page.store(shown.offset, shown.bytes, shown.value);
        }
    }

    /// Fills all registers: with ones for a device that is gone, with zeros before an update.
    pub fn fill(&self, value: u32) {
        (0..self.size).for_each(|offset| self.page.store(offset, 1, value));
    }

    /// The value that the guest reads. For tests.
    #[cfg(test)]
    pub fn load(&self, offset: u32, bytes: u8) -> u32 {
        self.page.load(offset, bytes)
    }

    pub fn mappings(&self) -> Vec<BarMapping> {
        let of = |bar: &u8| BarMapping {
            bar: *bar,
            offset: 0,
            len: PAGE,
            fd: self.page.file(),
            fd_offset: 0,
            read_only: true,
        };
        self.bars.iter().map(of).collect()
    }

    pub fn doorbells(&self) -> Vec<Doorbell> {
        let of = |(signaled, fd): &(Told, Arc<OwnedFd>)| Doorbell {
            bar: signaled.bar,
            offset: u64::from(signaled.offset),
            width: signaled.bytes,
            datamatch: Some(u64::from(signaled.value)),
            fd: Arc::clone(fd),
        };
        self.signaled.iter().map(of).collect()
    }

    /// Eventfds of writes that must be processed at once.
    pub fn prompt(&self) -> &[(Told, Arc<OwnedFd>)] {
        if self.prompt { &self.signaled } else { &[] }
    }

    /// Writes that were signaled since the last call.
    pub fn take_signaled(&self) -> impl Iterator<Item = Access> {
        let rung = |fd: &OwnedFd| {
            let mut count = [0; 8];
            rustix::io::read(fd, &mut count).is_ok()
        };
        self.signaled.iter().filter(move |(_, fd)| rung(fd)).map(|(signaled, _)| Access {
            bar: signaled.bar,
            offset: signaled.offset,
            size: signaled.bytes,
            write: Some(signaled.value),
        })
    }
}

/// [`PAGE`] as the type of register offsets.
const PAGE_BYTES: u32 = 4096;
const _: () = assert!(PAGE_BYTES as u64 == PAGE);
