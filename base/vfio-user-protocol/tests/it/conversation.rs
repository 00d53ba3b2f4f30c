//! This crate's client against its server over a socket pair: every command, with descriptors.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vfio_user_device::{TEST_MEMORY_BAR, TEST_VECTORS, TestDevice, TestEvent};
use vfio_user_protocol::client::{Client, ClientError};
use vfio_user_protocol::device::{Device, INTERRUPT_INTX, INTERRUPT_MSIX, REGION_CONFIG};
use vfio_user_protocol::doorbell_mode::{self, DoorbellMode};
use vfio_user_protocol::server::{Ended, Server, ServerError};

const TIMEOUT: Duration = Duration::from_secs(5);

fn errno(error: &ClientError) -> Option<i32> {
    match error {
        ClientError::Refused { source, .. } => source.raw_os_error(),
        _ => None,
    }
}

#[test]
fn a_client_learns_all_of_a_device() {
    let device = TestDevice::new();
    let (stream, server) = device.serve_pair();
    let client = Client::from_stream(stream, TIMEOUT).unwrap();
    let about = client.device().unwrap();
    assert!(about.resettable);
    assert_eq!((about.regions, about.interrupts), (10, 6));

    let absent = client.region(1).unwrap();
    assert_eq!((absent.size, absent.readable), (0, false));
    let config = client.region(REGION_CONFIG).unwrap();
    assert_eq!((config.size, config.mappings.len()), (256, 0));
    let memory = client.region(TEST_MEMORY_BAR).unwrap();
    let areas: Vec<_> = memory.mappings.iter().map(|m| (m.offset, m.size, m.fd_offset)).collect();
    assert_eq!(areas, [(0, 4096, 0), (8192, 4096, 8192)]);
    rustix::io::pwrite(device.memory(), b"shared", 8192).unwrap();
    let mut seen = [0; 6];
    rustix::io::pread(&memory.mappings[1].fd, &mut seen, memory.mappings[1].fd_offset).unwrap();
    assert_eq!(&seen, b"shared");
    assert!(Client::is_doorbell_mode(&client.region(doorbell_mode::REGION).unwrap()));

    let doorbells = client.region_io_fds(0).unwrap();
    assert_eq!(doorbells.len(), 1);
    assert_eq!((doorbells[0].offset, doorbells[0].size, doorbells[0].datamatch), (8, 4, Some(7)));
    rustix::io::write(&doorbells[0].fd, &5_u64.to_ne_bytes()).unwrap();
    let mut count = [0; 8];
    rustix::io::read(device.doorbell(), &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 5);
    assert!(client.region_io_fds(4).unwrap().is_empty());

    let msix = client.interrupts(INTERRUPT_MSIX).unwrap();
    assert_eq!((msix.count, msix.flags.eventfd, msix.flags.automasked), (TEST_VECTORS, true, false));
    assert!(client.interrupts(INTERRUPT_INTX).unwrap().flags.automasked);
    assert_eq!(client.interrupts(1).unwrap().count, 0);
    assert_eq!(errno(&client.interrupts(77).unwrap_err()), Some(22));
    drop(client);
    assert_eq!(server.join(), Ended::Disconnected);
    assert_eq!(device.events(), [TestEvent::Disconnected]);
}

#[test]
fn reads_writes_posted_writes_and_resets_arrive_in_order() {
    let device = TestDevice::new();
    let (stream, _server) = device.serve_pair();
    let client = Client::from_stream(stream, TIMEOUT).unwrap();
    let mut id = [0; 4];
    client.region_read(REGION_CONFIG, 0, &mut id).unwrap();
    assert_eq!(id, [0x5E, 0xCA, 0x57, 0x5E]);
    for value in 0..1000_u32 {
        client.region_write_posted(0, 16, &value.to_le_bytes()).unwrap();
    }
    let mut value = [0; 4];
    client.region_read(0, 16, &mut value).unwrap();
    assert_eq!(u32::from_le_bytes(value), 999);
    assert_eq!(device.events().len(), 1000);
    client.region_write(0, 20, &[1]).unwrap();
    // A refused posted write gets no reply and does no harm.
    client.region_write_posted(0, 4096, &[1]).unwrap();
    assert_eq!(errno(&client.region_write(0, 4093, &[0; 4]).unwrap_err()), Some(22));
    assert_eq!(errno(&client.region_read(1, 0, &mut value).unwrap_err()), Some(22));
    assert_eq!(errno(&client.region_read(0, u64::MAX, &mut value).unwrap_err()), Some(22));
    client.reset().unwrap();
    client.region_read(0, 16, &mut value).unwrap();
    assert_eq!(value, [0; 4]);
    assert!(!client.is_failed());
}

#[test]
fn memory_and_interrupts_travel_as_descriptors() {
    let device = TestDevice::new();
    let (stream, server) = device.serve_pair();
    let client = Client::from_stream(stream, TIMEOUT).unwrap();
    let ram = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&ram, 1 << 20).unwrap();
    client.dma_map(ram.as_fd(), 0, 0, 1 << 19, true).unwrap();
    client.dma_map(ram.as_fd(), 1 << 19, 1 << 32, 1 << 19, true).unwrap();
    for (address, size) in [(0, 4096), ((1 << 19) - 1, 2), (0, 1 << 40), ((1 << 32) + 4096, 1)] {
        assert_eq!(errno(&client.dma_map(ram.as_fd(), 0, address, size, true).unwrap_err()), Some(17));
    }
    assert_eq!(errno(&client.dma_map(ram.as_fd(), 0, u64::MAX, 2, true).unwrap_err()), Some(22));
    rustix::io::pwrite(&ram, b"guest", (1 << 19) + 5).unwrap();
    let (address, size, fd) = device.dma().pop().unwrap();
    assert_eq!((address, size), (1 << 32, 1 << 19));
    let mut seen = [0; 5];
    rustix::io::pread(fd.unwrap(), &mut seen, (1 << 19) + 5).unwrap();
    assert_eq!(&seen, b"guest");
    assert_eq!(errno(&client.dma_unmap(1 << 32, 4096).unwrap_err()), Some(2));
    client.dma_unmap(1 << 32, 1 << 19).unwrap();
    assert_eq!(device.dma().len(), 1);

    let events: Vec<_> = (0..TEST_VECTORS)
        .map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
        .collect();
    client
        .set_eventfds(INTERRUPT_MSIX, 0, &[Some(events[0].as_fd()), None, Some(events[2].as_fd())])
        .unwrap();
    assert!(device.raise(0) && !device.raise(1) && device.raise(2));
    let mut count = [0; 8];
    for (event, rang) in events.iter().zip([true, false, true]) {
        assert_eq!(rustix::io::read(event, &mut count).is_ok(), rang);
    }
    assert_eq!(
        errno(&client.set_eventfds(INTERRUPT_MSIX, TEST_VECTORS, &[Some(ram.as_fd())]).unwrap_err()),
        Some(22)
    );
    client.disable_interrupts(INTERRUPT_MSIX).unwrap();
    assert!(!device.raise(0));
    client.set_eventfds(INTERRUPT_INTX, 0, &[Some(events[1].as_fd())]).unwrap();
    device.set_intx(true);
    device.set_intx(true);
    rustix::io::read(&events[1], &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1, "an automasked interrupt fires once");
    client.mask_interrupt(INTERRUPT_INTX, 0, false).unwrap();
    rustix::io::read(&events[1], &mut count).unwrap();
    drop(client);
    assert_eq!(server.join(), Ended::Disconnected);
    assert!(device.dma().is_empty() && !device.raise(0));
}

#[test]
fn many_threads_share_a_client() {
    let device = TestDevice::new();
    let (stream, _server) = device.serve_pair();
    let client = Client::from_stream(stream, TIMEOUT).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let client = &client;
            scope.spawn(move || {
                for round in 0..500_u32 {
                    let value = round.to_le_bytes();
                    client.region_write(0, 64 + 4 * thread, &value).unwrap();
                    client.region_write_posted(0, 128 + 4 * thread, &value).unwrap();
                    let mut seen = [0; 4];
                    client.region_read(0, 64 + 4 * thread, &mut seen).unwrap();
                    assert_eq!(seen, value);
                }
            });
        }
    });
}

#[test]
fn doorbell_mode_is_asked_for_and_reached() {
    let device = TestDevice::new();
    let (stream, _server) = device.serve_pair();
    let client = Client::from_stream(stream, TIMEOUT).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    client.set_eventfds(doorbell_mode::INTERRUPT, 0, &[Some(event.as_fd())]).unwrap();
    device.want(DoorbellMode::Mapped);
    rustix::io::read(&event, &mut [0; 8]).unwrap();
    let mut wanted = [0; 4];
    client.region_read(doorbell_mode::REGION, doorbell_mode::WANTED_OFFSET, &mut wanted).unwrap();
    assert_eq!(DoorbellMode::from_register(u32::from_le_bytes(wanted)), Some(DoorbellMode::Mapped));
    client.region_write(doorbell_mode::REGION, doorbell_mode::REACHED_OFFSET, &wanted).unwrap();
    assert_eq!(device.reached(), DoorbellMode::Mapped);
}

#[test]
fn a_server_that_hangs_or_dies_is_given_up() {
    let device = TestDevice::new();
    let (stream, server) = device.serve_pair();
    let client = Client::from_stream(stream, Duration::from_millis(100)).unwrap();
    device.set_delay(Duration::from_millis(400));
    // A client that waits for the reply gets one, without an error.
    let error = client.region_read(0, 0, &mut [0]).unwrap_err();
    assert!(error.is_lost() && client.is_failed(), "{error:?}");
    assert!(client.region_write_posted(0, 0, &[0]).unwrap_err().is_lost());
    drop(server);

    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    assert!(Client::from_stream(theirs, TIMEOUT).unwrap_err().is_lost());
    // The server is blocked: posted writes fill the socket, then the time-out ends them.
    device.set_delay(Duration::ZERO);
    let (stream, server) = device.serve_pair();
    let client = Client::from_stream(stream, Duration::from_millis(200)).unwrap();
    device.set_delay(Duration::from_secs(1));
    std::thread::scope(|scope| {
        scope.spawn(|| client.region_read(0, 0, &mut [0]));
        std::thread::sleep(Duration::from_millis(50));
        let block = vec![0; 4096];
        while client.region_write_posted(0, 0, &block).is_ok() {}
        assert!(client.is_failed());
    });
    drop(server);
}

#[test]
fn a_server_takes_the_next_client_after_the_last() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("device.sock");
    std::os::unix::net::UnixListener::bind(&path).unwrap();
    let server = Server::bind(&path).unwrap();
    assert!(matches!(Server::bind(&path), Err(ServerError::Taken { .. })));
    let device = TestDevice::new();
    let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    std::thread::scope(|scope| {
        let served: Arc<dyn Device> = device.clone();
        let (server, stop) = (&server, &stop);
        let thread = scope.spawn(move || server.serve(&served, stop.as_fd()));
        // The second bind's probe is a client that disconnects at once.
        device.wait_for("the probe", |events| events == [TestEvent::Disconnected]);
        for round in 2..5 {
            let client = Client::connect(&path, TIMEOUT).unwrap();
            client.region_write(0, 0, &[1]).unwrap();
            drop(client);
            device.wait_for("the end", |events| {
                events.iter().filter(|event| **event == TestEvent::Disconnected).count() == round
            });
        }
        device.authorize_peers(false);
        assert!(Client::connect(&path, TIMEOUT).unwrap_err().is_lost());
        rustix::io::write(stop, &1_u64.to_ne_bytes()).unwrap();
        thread.join().unwrap().unwrap();
    });
    drop(server);
    assert!(!path.exists());
    assert!(matches!(Client::connect(&path, TIMEOUT), Err(ClientError::Connect { .. })));
}
