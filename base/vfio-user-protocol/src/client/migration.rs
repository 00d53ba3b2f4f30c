//! Requests for the migration of a device.

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

/// Limit of one dirty-page report in bytes of guest memory.
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

    /// Returns whether the device's state can be migrated, both while it runs and after it has stopped.
    ///
    /// # Errors
    /// The connection is lost, or the reply is invalid.
    pub fn can_migrate(&self) -> Result<bool, ClientError> {
        let name = "DEVICE_FEATURE MIGRATION";
        let flags = feature::GET | feature::MIGRATION;
        let reply = match self.feature(name, flags, &[], 8, &String::new) {
            Ok(reply) => reply,
            // Every server without migration refuses it.
            Err(ClientError::Refused { .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        let what =
            reply.body.get(size_of::<DeviceFeature>()..).and_then(|data| u64::read_from_bytes(data).ok());
        let what = what.ok_or(ClientError::Malformed { request: name, what: "it has another length" })?;
        let all = MIGRATION_STOP_COPY | MIGRATION_PRE_COPY;
        Ok(what & all == all)
    }

    /// Sets the device's migration state. Returns after the device has entered it.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
    pub fn set_device_state(&self, state: DeviceState) -> Result<(), ClientError> {
        let data = MigDeviceState { state: state as u32, data_fd: u32::MAX };
        let flags = feature::SET | feature::MIG_DEVICE_STATE;
        let limit = size_of::<MigDeviceState>();
        self.feature("DEVICE_FEATURE MIG_DEVICE_STATE", flags, data.as_bytes(), limit, &|| {
            format!("{state:?}")
        })
        .map(drop)
    }

    /// Reads the next bytes of the device's state, at most [`Client::max_transfer`]. Fewer bytes mean that no more are
    /// available now.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
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

    /// Reads all of the device's state that is available now.
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

    /// Passes bytes of a saved state to the device, in order.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
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

    /// Starts dirty-page logging: the device records its writes to these ranges (address, bytes).
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
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

    /// Stops dirty-page logging.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
    pub fn stop_dma_logging(&self) -> Result<(), ClientError> {
        let flags = feature::SET | feature::DMA_LOGGING_STOP;
        self.feature("DEVICE_FEATURE DMA_LOGGING_STOP", flags, &[], MAX_REPLY, &String::new).map(drop)
    }

    /// Requests that the device throttles other hosts' writes to guest memory by this per cent, 0 to 99. Returns false
    /// if the device doesn't support it.
    ///
    /// # Errors
    /// The connection is lost, or the server refuses for another reason.
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

    /// Returns whether the device supports post-copy ([`Client::late_memory`]).
    ///
    /// # Errors
    /// The connection is lost, or the reply is invalid.
    pub fn can_be_late(&self) -> Result<bool, ClientError> {
        let flags = feature::PROBE | feature::SET | feature::LATE_MEMORY;
        match self.feature("DEVICE_FEATURE LATE_MEMORY", flags, &[], MAX_REPLY, &String::new) {
            Ok(_) => Ok(true),
            Err(ClientError::Refused { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Starts post-copy at the device: of the mapped ranges (address, bytes, offset of the range's bitmap in the file)
    /// only pages in the bitmap are present. The device requests pages on `wishes`, one end of a pair of Unix stream
    /// sockets. `arrivals` is an eventfd that signals their arrival. Returns false if the device doesn't support it.
    ///
    /// # Errors
    /// The connection is lost, or the server refuses for another reason.
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

    /// Returns and clears the dirty bitmap of one mapped range: a bit per page of 4096 bytes, from the lowest bit of
    /// the first word on.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
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
