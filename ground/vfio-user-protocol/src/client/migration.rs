//! Requests of a client that moves the guest.

use std::mem::size_of;
use std::os::fd::BorrowedFd;

use zerocopy::{FromBytes, IntoBytes};

use super::{Client, ClientError, MAX_REPLY, Request};
use crate::migration::DeviceState;
use crate::socket::Message;
use crate::wire::{
    DeviceFeature, HoldBack, LOG_PAGE, LateRange, LateStart, LoggingRange, LoggingReport, LoggingStart,
    MAX_TRANSFER, MIGRATION_PRE_COPY, MIGRATION_STOP_COPY, MigData, MigDeviceState, command, feature,
    wire_len,
};

/// Bytes of guest memory whose pages one report tells of at most.
const REPORT: u64 = 16 << 30;

impl Client {
    fn feature(
        &self,
        name: &'static str,
        flags: u32,
        data: &[u8],
        reply_limit: usize,
        values: &dyn Fn() -> String,
    ) -> Result<Message, ClientError> {
        let argsz = wire_len(size_of::<DeviceFeature>() + data.len().max(reply_limit));
        let head = DeviceFeature { argsz, flags };
        self.request(
            &Request {
                command: command::DEVICE_FEATURE,
                name,
                parts: &[head.as_bytes(), data],
                fds: &[],
                reply_limit: size_of::<DeviceFeature>() + reply_limit,
            },
            values,
        )
    }

    /// Whether the device's state can be moved, while it works and when it has stopped.
    ///
    /// # Errors
    /// When the connection is lost, or the answer can't be.
    pub fn can_migrate(&self) -> Result<bool, ClientError> {
        let name = "DEVICE_FEATURE MIGRATION";
        let flags = feature::GET | feature::MIGRATION;
        let reply = match self.feature(name, flags, &[], 8, &String::new) {
            Ok(reply) => reply,
            // What every server without it says.
            Err(ClientError::Refused { .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        let what =
            reply.body.get(size_of::<DeviceFeature>()..).and_then(|data| u64::read_from_bytes(data).ok());
        let what = what.ok_or(ClientError::Malformed { request: name, what: "it has another length" })?;
        let all = MIGRATION_STOP_COPY | MIGRATION_PRE_COPY;
        Ok(what & all == all)
    }

    /// Has the device enter a state; it has when this returns.
    ///
    /// # Errors
    /// When the connection is lost or the server refuses.
    pub fn set_device_state(&self, state: DeviceState) -> Result<(), ClientError> {
        let data = MigDeviceState { state: state as u32, data_fd: u32::MAX };
        let flags = feature::SET | feature::MIG_DEVICE_STATE;
        let limit = size_of::<MigDeviceState>();
        self.feature("DEVICE_FEATURE MIG_DEVICE_STATE", flags, data.as_bytes(), limit, &|| {
            format!("{state:?}")
        })
        .map(drop)
    }

    /// The device's state's next bytes, at most [`Client::max_transfer`]. Fewer: there is no more at present.
    ///
    /// # Errors
    /// When the connection is lost or the server refuses.
    pub fn read_migration_data(&self) -> Result<Vec<u8>, ClientError> {
        let name = "MIG_DATA_READ";
        let size = self.max_transfer().min(MAX_TRANSFER);
        let head = MigData { argsz: wire_len(size_of::<MigData>()), size };
        let most = usize::try_from(size).unwrap_or(0);
        let reply = self.request(
            &Request {
                command: command::MIG_DATA_READ,
                name,
                parts: &[head.as_bytes()],
                fds: &[],
                reply_limit: size_of::<MigData>() + most,
            },
            &|| format!("{size} bytes"),
        )?;
        match MigData::read_from_prefix(&reply.body) {
            Ok((head, data)) if usize::try_from(head.size) == Ok(data.len()) => Ok(data.to_vec()),
            _ => Err(ClientError::Malformed { request: name, what: "it has another length" }),
        }
    }

    /// All that there is of the device's state at present.
    ///
    /// # Errors
    /// As [`Client::read_migration_data`].
    pub fn read_all_migration_data(&self) -> Result<Vec<u8>, ClientError> {
        let most = usize::try_from(self.max_transfer().min(MAX_TRANSFER)).unwrap_or(0);
        let mut all = Vec::new();
        loop {
            let data = self.read_migration_data()?;
            let last = data.len() < most;
            all.extend(data);
            if last {
                return Ok(all);
            }
        }
    }

    /// Hands the device bytes of a state, in order.
    ///
    /// # Errors
    /// When the connection is lost or the server refuses.
    pub fn write_migration_data(&self, data: &[u8]) -> Result<(), ClientError> {
        let piece = usize::try_from(self.max_transfer().min(MAX_TRANSFER)).unwrap_or(0).max(1);
        for data in data.chunks(piece) {
            let head =
                MigData { argsz: wire_len(size_of::<MigData>() + data.len()), size: wire_len(data.len()) };
            self.request(
                &Request {
                    command: command::MIG_DATA_WRITE,
                    name: "MIG_DATA_WRITE",
                    parts: &[head.as_bytes(), data],
                    fds: &[],
                    reply_limit: size_of::<MigData>(),
                },
                &|| format!("{} bytes", data.len()),
            )?;
        }
        Ok(())
    }

    /// Has the device note from now on which pages of these ranges (address, bytes) it writes.
    ///
    /// # Errors
    /// When the connection is lost or the server refuses.
    pub fn start_dma_logging(&self, ranges: &[(u64, u64)]) -> Result<(), ClientError> {
        let start = LoggingStart { page_size: LOG_PAGE, ranges: wire_len(ranges.len()), reserved: 0 };
        let mut data = start.as_bytes().to_vec();
        for &(address, size) in ranges {
            data.extend_from_slice(LoggingRange { address, size }.as_bytes());
        }
        let flags = feature::SET | feature::DMA_LOGGING_START;
        self.feature("DEVICE_FEATURE DMA_LOGGING_START", flags, &data, MAX_REPLY, &|| {
            format!("{} ranges", ranges.len())
        })
        .map(drop)
    }

    /// Ends it.
    ///
    /// # Errors
    /// When the connection is lost or the server refuses.
    pub fn stop_dma_logging(&self) -> Result<(), ClientError> {
        let flags = feature::SET | feature::DMA_LOGGING_STOP;
        self.feature("DEVICE_FEATURE DMA_LOGGING_STOP", flags, &[], MAX_REPLY, &String::new).map(drop)
    }

    /// Asks the device to let others write less into guest memory, by so many per cent, 0 to 99. Whether it can.
    ///
    /// # Errors
    /// When the connection is lost, or the server refuses for another reason than that it has no way to do so.
    pub fn hold_back(&self, percent: u8) -> Result<bool, ClientError> {
        let data = HoldBack { percent: u32::from(percent) };
        let flags = feature::SET | feature::HOLD_BACK;
        let name = "DEVICE_FEATURE HOLD_BACK";
        match self.feature(name, flags, data.as_bytes(), MAX_REPLY, &|| format!("{percent} per cent")) {
            Ok(_) => Ok(true),
            Err(ClientError::Refused { source, .. })
                if source.raw_os_error() == Some(rustix::io::Errno::NOTTY.raw_os_error()) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether the device can do without memory that is still to come ([`Client::late_memory`]).
    ///
    /// # Errors
    /// When the connection is lost, or the answer can't be.
    pub fn can_be_late(&self) -> Result<bool, ClientError> {
        let flags = feature::PROBE | feature::SET | feature::LATE_MEMORY;
        match self.feature("DEVICE_FEATURE LATE_MEMORY", flags, &[], MAX_REPLY, &String::new) {
            Ok(_) => Ok(true),
            Err(ClientError::Refused { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Tells the device that part of the guest's memory is still to come: of mapped ranges (address, bytes, where the range's bitmap begins in the
    /// file) only pages that the bitmap names are there. `wishes` is one end of a pair of Unix sockets (stream), `arrivals` an eventfd. Whether it can do without.
    ///
    /// # Errors
    /// When the connection is lost, or the server refuses for another reason than that it can't.
    pub fn late_memory(
        &self,
        ranges: &[(u64, u64, u64)],
        bitmap: BorrowedFd<'_>,
        wishes: BorrowedFd<'_>,
        arrivals: BorrowedFd<'_>,
    ) -> Result<bool, ClientError> {
        let name = "DEVICE_FEATURE LATE_MEMORY";
        let start = LateStart { ranges: wire_len(ranges.len()), reserved: 0 };
        let mut data = start.as_bytes().to_vec();
        for &(address, size, bitmap) in ranges {
            data.extend_from_slice(LateRange { address, size, bitmap }.as_bytes());
        }
        let flags = feature::SET | feature::LATE_MEMORY;
        let argsz = wire_len(size_of::<DeviceFeature>() + data.len().max(MAX_REPLY));
        let head = DeviceFeature { argsz, flags };
        let sent = self.request(
            &Request {
                command: command::DEVICE_FEATURE,
                name,
                parts: &[head.as_bytes(), &data],
                fds: &[bitmap, wishes, arrivals],
                reply_limit: size_of::<DeviceFeature>() + MAX_REPLY,
            },
            &|| format!("{} ranges", ranges.len()),
        );
        match sent {
            Ok(_) => Ok(true),
            Err(ClientError::Refused { source, .. })
                if source.raw_os_error() == Some(rustix::io::Errno::NOTTY.raw_os_error()) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Takes which pages of 4096 bytes the device has written since the last call, of one mapped range: a bit each, from the lowest of the first
    /// word on.
    ///
    /// # Errors
    /// When the connection is lost or the server refuses.
    pub fn take_dirty(&self, address: u64, size: u64) -> Result<Vec<u64>, ClientError> {
        let name = "DEVICE_FEATURE DMA_LOGGING_REPORT";
        let mut all = Vec::new();
        let mut done = 0;
        while done < size {
            let report = LoggingReport {
                address: address.saturating_add(done),
                size: (size - done).min(REPORT),
                page_size: LOG_PAGE,
            };
            let words = usize::try_from(report.size.div_ceil(64 * LOG_PAGE)).unwrap_or(usize::MAX);
            let bytes = words.saturating_mul(8);
            let flags = feature::GET | feature::DMA_LOGGING_REPORT;
            let limit = size_of::<LoggingReport>() + bytes;
            let reply = self.feature(name, flags, report.as_bytes(), limit, &|| {
                format!("{:#x} bytes at {:#x}", report.size, report.address)
            })?;
            let bitmap = reply.body.get(size_of::<DeviceFeature>() + size_of::<LoggingReport>()..);
            let bitmap = bitmap.filter(|bitmap| bitmap.len() == bytes);
            let bitmap =
                bitmap.ok_or(ClientError::Malformed { request: name, what: "it has another length" })?;
            let word = |bytes: &[u8]| <[u8; 8]>::try_from(bytes).map_or(0, u64::from_ne_bytes);
            all.extend(bitmap.chunks(8).map(word));
            done += report.size;
        }
        Ok(all)
    }
}
