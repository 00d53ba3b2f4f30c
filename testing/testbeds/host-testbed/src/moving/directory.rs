//! Directory of the hosts of one process, and parameters of their guests.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use dma::{MappedMemory, MemoryRegion};
use hca::names::Gid;
use host::transport::{Directory, DirectoryReport, News, TransportKind};
use nomad::{HostId, VmId};
use pvrdma::Config;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::{SEGMENT, SEGMENT_NAME};

/// The guest outside of the cluster, which no directory knows.
pub(super) const OUTSIDE: VmId = VmId(200);

/// A host's view of where VMs are.
#[derive(Debug)]
pub(super) struct LiveDirectory {
    pub hosts: Vec<SocketAddr>,
    pub places: Mutex<HashMap<u32, usize>>,
    /// Pin of all VMs.
    pub pin: Option<TransportKind>,
}

impl LiveDirectory {
    pub fn set(&self, vm: VmId, host: HostId) {
        self.places.lock().unwrap().insert(vm.0, host.0 as usize - 1);
    }
}

impl Directory for LiveDirectory {
    fn owner(&self, segment: &str, gid: Gid) -> Option<host::transport::VmId> {
        let address = gid.ipv4()?.octets();
        (segment == SEGMENT_NAME && u32::from(address[3]) != OUTSIDE.0)
            .then(|| host::transport::VmId(u32::from(address[3])))
    }

    fn vm(&self, name: &str) -> Option<host::transport::VmId> {
        name.strip_prefix("vm")?.parse().ok().map(host::transport::VmId)
    }

    fn host(&self, vm: host::transport::VmId) -> Option<SocketAddr> {
        self.hosts.get(*self.places.lock().unwrap().get(&vm.0)?).copied()
    }

    fn hosts(&self) -> Vec<SocketAddr> {
        self.hosts.clone()
    }

    fn pin(&self, _: host::transport::VmId) -> Option<TransportKind> {
        self.pin
    }

    fn mtu(&self) -> roce::Mtu {
        roce::Mtu::B1024
    }

    fn sockets(&self) -> u16 {
        1
    }

    fn tell(&self, _: News<'_>) {}

    fn report(&self) -> Option<DirectoryReport> {
        None
    }
}

pub(super) fn gid(vm: VmId) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xFF, 0xFF, 10, 0, 0, u8::try_from(vm.0).unwrap()]);
    gid
}

pub(super) fn memory(size: u64) -> MappedMemory {
    let file: OwnedFd = memfd_create("guest", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, size).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    MappedMemory::default().with(MemoryRegion::map(0, size, &file, 0, true).unwrap()).unwrap()
}

pub(super) fn config(vm: VmId) -> Config {
    let mut config =
        Config::new(format!("vm{}", vm.0), SEGMENT, [2, 0, 0, 0, 0, u8::try_from(vm.0).unwrap()]);
    config.max_uar = 16;
    config
}
