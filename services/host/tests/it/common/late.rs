//! Post-copy memory of a VM: acts as a monitor that fetches pages, with all pages missing at first.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use dma::arriving::{Bitmap, bitmap_size, wished};
use dma::{Dma, MappedMemory};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vfio_user_protocol::client::Client;

const PAGE: u64 = 4096;

/// Pages that arrive when they are requested, or at the end.
pub struct LateRam {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<BTreeSet<u64>>,
}

impl LateRam {
    /// Begins post-copy for all of `ram` from address 0 on, `size` bytes whose pages were removed from its file. Notifies `clients`. The
    /// pages' contents will be `contents`.
    pub fn begin(ram: &MappedMemory, size: u64, contents: Vec<u8>, clients: [&Client; 2]) -> Self {
        let file = memfd_create("late", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, bitmap_size(size)).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let bitmap = Bitmap::map(&file, 0, size).unwrap();
        let (wishes, wisher) = UnixStream::pair().unwrap();
        wishes.set_nonblocking(true).unwrap();
        let (wishes, wisher) = (OwnedFd::from(wishes), OwnedFd::from(wisher));
        // For the guest, whose CPU waits for pages.
        let own = Arc::new(wisher.try_clone().unwrap());
        ram.set_late((0, size), Bitmap::map(&file, 0, size).unwrap(), own).unwrap();
        let arrivals = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        for client in clients {
            assert!(client.can_be_late().unwrap());
            let told = client.late_memory(&[(0, size, 0)], file.as_fd(), wisher.as_fd(), arrivals.as_fd());
            assert!(told.unwrap());
            // Once, and only mapped pages.
            assert!(
                client.late_memory(&[(0, size, 0)], file.as_fd(), wisher.as_fd(), arrivals.as_fd()).is_err()
            );
            assert!(
                client.late_memory(&[(0, PAGE, 0)], file.as_fd(), wisher.as_fd(), arrivals.as_fd()).is_err()
            );
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (ram, stopped) = (ram.clone(), Arc::clone(&stop));
        let thread =
            std::thread::spawn(move || serve(&ram, &contents, &bitmap, (&wishes, &arrivals), &stopped));
        Self { stop, thread }
    }

    /// Delivers all other pages. Returns the pages that were requested before.
    pub fn end(self) -> BTreeSet<u64> {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

fn serve(
    ram: &MappedMemory,
    contents: &[u8],
    bitmap: &Bitmap,
    (wishes, arrivals): (&OwnedFd, &OwnedFd),
    stop: &AtomicBool,
) -> BTreeSet<u64> {
    let place = |page: u64| {
        let at = usize::try_from(page * PAGE).unwrap();
        if !bitmap.has(page) {
            ram.write(page * PAGE, &contents[at..at + 4096]).unwrap();
            bitmap.set(page);
        }
    };
    let ring = || rustix::io::write(arrivals, &1_u64.to_ne_bytes()).unwrap();
    let mut asked = BTreeSet::new();
    while !stop.load(Ordering::SeqCst) {
        let mut wish = [0; 8];
        if rustix::io::read(wishes, &mut wish) != Ok(8) {
            std::thread::sleep(Duration::from_micros(200));
            continue;
        }
        // Transfer time from another host.
        std::thread::sleep(Duration::from_millis(1));
        let (address, pages) = wished(wish);
        (address / PAGE..address / PAGE + pages).for_each(&place);
        asked.extend(address / PAGE..address / PAGE + pages);
        bitmap.came();
        ring();
    }
    (0..contents.len() as u64 / PAGE).for_each(place);
    bitmap.complete();
    ring();
    asked
}
