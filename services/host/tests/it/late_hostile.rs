//! A hostile client's post-copy descriptors: it tries to block the engine's thread, which serves all VMs of the host.

use crate::common;

use std::io::Write as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::time::Duration;

use common::adding::pair;
use common::cluster::{Cluster, guest, wait_to_know};
use common::moving::Move;
use dma::arriving::bitmap_size;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{
    MemfdFlags, OFlags, SealFlags, fcntl_add_seals, fcntl_getfl, fcntl_setfl, ftruncate, memfd_create,
};
use rustix::pipe::pipe;

/// Longer than any step that doesn't hang.
const HANGS: Duration = Duration::from_secs(60);

fn bitmap(size: u64) -> OwnedFd {
    let file = memfd_create("late", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bitmap_size(size)).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    file
}

fn make_blocking(fd: BorrowedFd<'_>) {
    let flags = fcntl_getfl(fd).unwrap();
    fcntl_setfl(fd, flags - OFlags::NONBLOCK).unwrap();
}

/// Descriptors other than an eventfd and one end of a Unix stream socket are refused. The daemon serves another VM of the host even after
/// the client has made its eventfd blocking.
#[test]
fn descriptors_of_one_vm_stop_no_other() {
    let cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2)];
    let (mut a, _b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[1]]);
    let victim = guest(&daemons[1], "victim", 9);
    let on_its_way = Move::begin(&mut a, daemons[0].socket(), daemons[1].socket(), "h2");
    let size = on_its_way.machine.size;
    let file = bitmap(size);
    let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let plain = || -> OwnedFd {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[0; 64]).unwrap();
        file.into()
    };
    let clients = [&on_its_way.monitor.ethernet, &*on_its_way.monitor.rdma];
    let say = |index: usize, wishes: &OwnedFd, arrivals: &OwnedFd| {
        clients[index].late_memory(&[(0, size, 0)], file.as_fd(), wishes.as_fd(), arrivals.as_fd())
    };
    let (_asked, wishes) = UnixStream::pair().unwrap();
    let wishes = OwnedFd::from(wishes);
    let datagrams = || OwnedFd::from(std::os::unix::net::UnixDatagram::unbound().unwrap());
    let tcp = || OwnedFd::from(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    // Their reader would block.
    let (silent, _other) = pipe().unwrap();
    for index in [0, 1] {
        for arrivals in [silent.try_clone().unwrap(), plain()] {
            assert!(say(index, &wishes, &arrivals).is_err(), "function {index}");
        }
        for wishes in [event(), plain(), silent.try_clone().unwrap(), datagrams(), tcp()] {
            assert!(say(index, &wishes, &event()).is_err(), "function {index}");
        }
    }
    let arrivals = event();
    assert!(say(1, &wishes, &arrivals).unwrap());
    make_blocking(arrivals.as_fd());
    make_blocking(wishes.as_fd());
    // Each response wakes the engine, which then sleeps again.
    let (answered, answers) = channel();
    let asking = std::thread::spawn(move || {
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(20));
            let version = victim.monitor.read(pvrdma::abi::registers::VERSION);
            if answered.send(version).is_err() {
                break;
            }
        }
        victim
    });
    for number in 0..20 {
        let version = answers.recv_timeout(HANGS);
        assert_eq!(version, Ok(pvrdma::abi::registers::INTERFACE_VERSION), "answer {number}");
    }
    drop(asking.join().unwrap());
}
