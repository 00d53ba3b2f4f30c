//! Migrates a device's state from one server to another, with its dirty pages, between this crate's client and server.
//! Also invalid migration messages.

use std::os::fd::AsFd;
use std::time::Duration;

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vfio_user_device::TestDevice;
use vfio_user_protocol::client::{Client, ClientError};
use vfio_user_protocol::migration::DeviceState;

const TIMEOUT: Duration = Duration::from_secs(5);
const MIB: u64 = 1 << 20;

/// More than one message's worth migrates, in PreCopy and the rest in StopCopy. An invalid state is refused, and the
/// connection stays open.
#[test]
fn state_moves_from_one_server_to_another() {
    let (from, to) = (TestDevice::new(), TestDevice::new());
    let ((stream, _from), (other, _to)) = (from.serve_pair(), to.serve_pair());
    let (source, destination) =
        (Client::from_stream(stream, TIMEOUT).unwrap(), Client::from_stream(other, TIMEOUT).unwrap());
    assert!(source.can_migrate().unwrap());
    let fill = |value: u8| {
        for offset in (0..4096).step_by(1024) {
            source.region_write(4, offset, &[value; 1024]).unwrap();
            source.region_write(0, offset, &[value ^ 1; 1024]).unwrap();
        }
        // Records of more than a message's limit, with the pages of BAR 2 that are registers.
        for offset in (4096..8192).chain(12288..16384).step_by(1024) {
            source.region_write(2, offset, &[value ^ 2; 1024]).unwrap();
        }
    };
    fill(7);
    assert!(source.read_migration_data().is_err(), "not while it only works");
    source.set_device_state(DeviceState::PreCopy).unwrap();
    destination.set_device_state(DeviceState::Resuming).unwrap();
    let first = source.read_all_migration_data().unwrap();
    assert_eq!(first.len(), 4 * 4096 * 13);
    source.region_write(0, 100, &[9; 3]).unwrap();
    source.set_device_state(DeviceState::StopCopy).unwrap();
    let rest = source.read_all_migration_data().unwrap();
    assert_eq!(rest.len(), 3 * 13);
    assert!(source.read_all_migration_data().unwrap().is_empty());
    // Pieces of any size.
    destination.write_migration_data(&first[..1000]).unwrap();
    assert!(destination.set_device_state(DeviceState::Stop).is_err(), "a record is cut");
    destination.write_migration_data(&first[1000..]).unwrap();
    destination.write_migration_data(&rest).unwrap();
    destination.set_device_state(DeviceState::Stop).unwrap();
    destination.set_device_state(DeviceState::Running).unwrap();
    let read = |client: &Client, region, offset| {
        let mut bytes = [0; 512];
        client.region_read(region, offset, &mut bytes).unwrap();
        bytes
    };
    for (region, offset) in [(0, 0), (4, 3584), (2, 4096), (2, 12288)] {
        assert_eq!(read(&source, region, offset), read(&destination, region, offset));
    }
    assert_eq!(read(&destination, 0, 100)[..4], [9, 9, 9, 6]);
    assert!(matches!(destination.set_device_state(DeviceState::Resuming), Ok(())));
    assert!(matches!(destination.set_device_state(DeviceState::PreCopy), Err(ClientError::Refused { .. })));
    assert!(!destination.is_failed());
}

/// Each dirty page of the requested range is reported once, for any size. Unmapped ranges are refused.
#[test]
fn dirty_pages_are_told_once() {
    let device = TestDevice::new();
    let (stream, _server) = device.serve_pair();
    let client = Client::from_stream(stream, TIMEOUT).unwrap();
    let file = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 64 * MIB).unwrap();
    let big = 48 << 30;
    client.dma_map(file.as_fd(), 0, 0, 16 * MIB, true).unwrap();
    // A test device doesn't map it.
    client.dma_map(file.as_fd(), 0, 1 << 32, big, true).unwrap();
    assert!(client.take_dirty(0, MIB).is_err(), "nothing is logged");
    client.start_dma_logging(&[(0, 16 * MIB), (1 << 32, big)]).unwrap();
    for address in [0, 5000, MIB + 4096 * 65, (1 << 32) + big - 1] {
        device.touch(address);
    }
    let mut low = vec![0; 64];
    (low[0], low[5]) = (0b11, 0b10);
    assert_eq!(client.take_dirty(0, 16 * MIB).unwrap(), low);
    assert_eq!(client.take_dirty(0, 16 * MIB).unwrap(), vec![0; 64]);
    let high = client.take_dirty(1 << 32, big).unwrap();
    assert_eq!((high.len(), high.iter().filter(|word| **word != 0).count()), (196_608, 1));
    assert_eq!(high.last(), Some(&(1 << 63)));
    for (address, size) in [(16 * MIB, MIB), (15 * MIB, 2 * MIB), (u64::MAX - 4095, 4096)] {
        assert!(matches!(client.take_dirty(address, size), Err(ClientError::Refused { .. })));
    }
    assert!(client.hold_back(20).unwrap() && client.hold_back(99).unwrap());
    assert!(matches!(client.hold_back(100), Err(ClientError::Refused { .. })));
    assert_eq!(device.held_back(), [20, 99]);
    client.stop_dma_logging().unwrap();
    assert!(!client.hold_back(30).unwrap(), "it has no way to do so");
    assert!(client.take_dirty(0, MIB).is_err() && !client.is_failed());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any bytes as a migration message get a reply, and the server continues.
    #[test]
    fn any_bytes_are_an_answer(messages in prop::collection::vec((16_u16..19, any::<u32>(), prop::collection::vec(any::<u8>(), 0..64)), 1..20)) {
        use std::io::{Read as _, Write as _};
        let device = TestDevice::new();
        let (stream, _server) = device.serve_pair();
        let mut raw = stream.try_clone().unwrap();
        let client = Client::from_stream(stream, TIMEOUT).unwrap();
        raw.set_nonblocking(false).unwrap();
        for (command, flags, mut body) in messages {
            if command == 16 && body.len() >= 8 {
                // A valid flag word, more often than by chance.
                body[4..8].copy_from_slice(&(flags & 0x7_000F).to_le_bytes());
            }
            let size = u32::try_from(16 + body.len()).unwrap();
            let mut message = [7_u16.to_ne_bytes(), command.to_ne_bytes()].concat();
            message.extend(size.to_ne_bytes());
            message.extend([0; 8]);
            message.extend(&body);
            raw.write_all(&message).unwrap();
            let mut head = [0; 16];
            raw.read_exact(&mut head).unwrap();
            let length = u32::from_ne_bytes(head[4..8].try_into().unwrap());
            let mut rest = vec![0; usize::try_from(length).unwrap() - 16];
            raw.read_exact(&mut rest).unwrap();
        }
        prop_assert!(client.device().is_ok());
    }
}
