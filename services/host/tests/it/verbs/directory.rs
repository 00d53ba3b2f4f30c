//! A directory of two VMs in a file, the first of which a test can move.

use std::net::SocketAddr;
use std::sync::Mutex;

use hca::names::Gid;
use host::transport::{Directory, DirectoryReport, FileDirectory, News, TransportKind, VmId};

/// The directory. The first VM has the number 1.
#[derive(Debug)]
pub struct TwoHosts {
    file: FileDirectory,
    first: Mutex<Option<SocketAddr>>,
}

impl TwoHosts {
    /// Reads the file's text.
    pub fn parse(text: &str) -> Self {
        let file = FileDirectory::parse(text, "verbs".as_ref()).unwrap();
        let first = Mutex::new(file.host(VmId(1)));
        Self { file, first }
    }

    /// Moves the first VM to a host, or to none.
    pub fn move_first(&self, to: Option<SocketAddr>) {
        *self.first.lock().unwrap() = to;
    }
}

impl Directory for TwoHosts {
    fn owner(&self, segment: &str, gid: Gid) -> Option<VmId> {
        self.file.owner(segment, gid)
    }

    fn vm(&self, name: &str) -> Option<VmId> {
        self.file.vm(name)
    }

    fn host(&self, vm: VmId) -> Option<SocketAddr> {
        if vm == VmId(1) { *self.first.lock().unwrap() } else { self.file.host(vm) }
    }

    fn hosts(&self) -> Vec<SocketAddr> {
        self.file.hosts()
    }

    fn pin(&self, vm: VmId) -> Option<TransportKind> {
        self.file.pin(vm)
    }

    fn mtu(&self) -> roce::Mtu {
        self.file.mtu()
    }

    fn sockets(&self) -> u16 {
        self.file.sockets()
    }

    fn tell(&self, news: News<'_>) {
        self.file.tell(news);
    }

    fn report(&self) -> Option<DirectoryReport> {
        self.file.report()
    }
}
