//! Interoperability with the crate `vfio_user`: this crate's server with its client, and this crate's client with its
//! server.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vfio_user_device::{TEST_MEMORY_BAR, TEST_VECTORS, TestDevice, TestEvent};
use vfio_user_protocol::client::Client;
use vfio_user_protocol::device::{Device, INTERRUPT_MSIX, REGION_CONFIG};
use vfio_user_protocol::server::Server;

#[test]
fn their_client_uses_our_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("device.sock");
    let server = Server::bind(&path).unwrap();
    let device = TestDevice::new();
    let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    std::thread::scope(|scope| {
        let served: Arc<dyn Device> = device.clone();
        let (server, stop_ref) = (&server, &stop);
        scope.spawn(move || server.serve(&served, stop_ref.as_fd()).unwrap());
        let mut client = vfio_user::Client::new(&path).unwrap();
        let memory = client.region(TEST_MEMORY_BAR).unwrap();
        let areas: Vec<_> = memory.sparse_areas.iter().map(|area| (area.offset, area.size)).collect();
        assert_eq!(areas, [(0, 4096), (8192, 4096)]);
        rustix::io::pwrite(device.memory(), b"x", 8192).unwrap();
        let mut seen = [0];
        rustix::io::pread(memory.file_offset.as_ref().unwrap().file(), &mut seen, 8192).unwrap();
        assert_eq!(&seen, b"x");

        let mut id = [0; 4];
        client.region_read(REGION_CONFIG, 0, &mut id).unwrap();
        assert_eq!(id, [0x5E, 0xCA, 0x57, 0x5E]);
        client.region_write(0, 4, &[1, 2, 3, 4]).unwrap();
        client.region_read(0, 4, &mut id).unwrap();
        assert_eq!(id, [1, 2, 3, 4]);
        let irq = client.get_irq_info(INTERRUPT_MSIX).unwrap();
        assert_eq!((irq.count, irq.flags & 1), (TEST_VECTORS, 1));
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        // DATA_EVENTFD and ACTION_TRIGGER.
        client.set_irqs(INTERRUPT_MSIX, 0x24, 1, 1, &[event.as_raw_fd()]).unwrap();
        assert!(device.raise(1) && !device.raise(0));
        rustix::io::read(&event, &mut [0; 8]).unwrap();
        let ram = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&ram, 1 << 20).unwrap();
        client.dma_map(0, 0, 1 << 20, ram.as_raw_fd()).unwrap();
        assert_eq!(device.dma().len(), 1);
        client.dma_unmap(0, 1 << 20).unwrap();
        assert!(device.dma().is_empty());
        client.reset().unwrap();
        assert_eq!(device.events().last(), Some(&TestEvent::Reset));
        client.shutdown().unwrap();
        device.wait_for("the end", |events| events.last() == Some(&TestEvent::Disconnected));
        rustix::io::write(&stop, &1_u64.to_ne_bytes()).unwrap();
    });
}

#[derive(Default)]
struct Theirs {
    registers: Vec<u8>,
    events: Vec<File>,
    mapped: Vec<(u64, u64, bool)>,
}

struct Backend(Arc<Mutex<Theirs>>);

impl vfio_user::ServerBackend for Backend {
    fn region_read(&mut self, _: u32, offset: u64, data: &mut [u8]) -> Result<(), std::io::Error> {
        let at = usize::try_from(offset).unwrap();
        data.copy_from_slice(&self.0.lock().unwrap().registers[at..at + data.len()]);
        Ok(())
    }

    fn region_write(&mut self, _: u32, offset: u64, data: &[u8]) -> Result<(), std::io::Error> {
        let at = usize::try_from(offset).unwrap();
        self.0.lock().unwrap().registers[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn dma_map(
        &mut self,
        _: vfio_user::DmaMapFlags,
        _offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> Result<(), std::io::Error> {
        self.0.lock().unwrap().mapped.push((address, size, fd.is_some()));
        Ok(())
    }

    fn dma_unmap(
        &mut self,
        _: vfio_user::DmaUnmapFlags,
        _address: u64,
        _size: u64,
    ) -> Result<(), std::io::Error> {
        self.0.lock().unwrap().mapped.clear();
        Ok(())
    }

    fn reset(&mut self) -> Result<(), std::io::Error> {
        self.0.lock().unwrap().registers.fill(0);
        Ok(())
    }

    fn set_irqs(
        &mut self,
        _index: u32,
        _flags: u32,
        _start: u32,
        _count: u32,
        fds: Vec<File>,
    ) -> Result<(), std::io::Error> {
        self.0.lock().unwrap().events = fds;
        Ok(())
    }
}

#[test]
fn our_client_uses_their_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("device.sock");
    let memory = memfd_create("bar", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memory, 8192).unwrap();
    rustix::io::pwrite(&memory, b"y", 4096).unwrap();
    let mut regions = Vec::new();
    for index in 0..9_u32 {
        let mut region = vfio_user::ServerRegion {
            region_info: Default::default(),
            sparse_areas: Vec::new(),
            mmap_fd: (index == 2).then(|| memory.as_raw_fd()),
        };
        region.region_info.index = index;
        region.region_info.argsz = 32;
        // Readable, writable, and BAR 2 mappable.
        region.region_info.flags = if index == 2 { 7 } else { 3 };
        region.region_info.size = if index == 2 { 8192 } else { 256 };
        if index == 2 {
            let mut area = vfio_user::SparseArea { area: Default::default() };
            area.area.offset = 4096;
            area.area.size = 4096;
            region.sparse_areas.push(area);
        }
        regions.push(region);
    }
    let irqs = (0..5).map(|index| vfio_user::IrqInfo { index, flags: 1, count: index * 2 }).collect();
    let server = vfio_user::Server::new(&path, true, irqs, regions).unwrap();
    let state = Arc::new(Mutex::new(Theirs { registers: vec![0; 256], ..Theirs::default() }));
    let mut backend = Backend(Arc::clone(&state));
    std::thread::scope(|scope| {
        scope.spawn(move || server.run(&mut backend).unwrap());
        let client = Client::connect(&path, Duration::from_secs(5)).unwrap();
        assert_eq!(client.device().unwrap().regions, 9);
        let bar = client.region(2).unwrap();
        assert_eq!(bar.mappings.len(), 1);
        let mut seen = [0];
        rustix::io::pread(&bar.mappings[0].fd, &mut seen, bar.mappings[0].fd_offset).unwrap();
        assert_eq!(&seen, b"y");
        assert!(client.region_io_fds(2).unwrap().is_empty());
        assert_eq!(client.interrupts(INTERRUPT_MSIX).unwrap().count, 4);
        client.region_write(0, 4, &[1, 2]).unwrap();
        client.region_write_posted(0, 5, &[3]).unwrap();
        let mut data = [0; 3];
        client.region_read(0, 4, &mut data).unwrap();
        assert_eq!(data, [1, 3, 0]);
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        client.set_eventfds(INTERRUPT_MSIX, 0, &[Some(event.as_fd())]).unwrap();
        assert_eq!(state.lock().unwrap().events.len(), 1);
        client.dma_map(memory.as_fd(), 0, 0x1000, 8192, true).unwrap();
        assert_eq!(state.lock().unwrap().mapped, [(0x1000, 8192, true)]);
        client.dma_unmap(0x1000, 8192).unwrap();
        client.reset().unwrap();
        client.region_read(0, 4, &mut data).unwrap();
        assert_eq!(data, [0; 3]);
        client.close();
    });
}
