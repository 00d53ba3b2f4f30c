//! The mappings of each peer: its RAM as read-only memslots, the pair's segment, and the eventfd that signals it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use machine::memory::{GuestMemorySpace, map_window, unmap_window};
use machine::slots::{HostMapping, SlotId};
use machine::vm::{IoEvent, IoSpace, Vm};
use neighbour::registers::PEER_NAME_SIZE;
use neighbour::window::{Geometry, Window};
use neighbour_protocol::Piece;

/// The mappings of one peer.
#[derive(Debug)]
pub(super) struct PeerMapping {
    pub epoch: u32,
    pub vm: String,
    pub window: Window,
    pub segment: Arc<OwnedFd>,
    pub signal: Arc<OwnedFd>,
    slots: Vec<SlotId>,
    /// Start and size of each range that this VM's own devices may read as well.
    device_ranges: Vec<(u64, u64)>,
}

/// Mappings of all peers, by slot.
#[derive(Debug, Default)]
pub(super) struct PeerMappings(pub BTreeMap<u32, PeerMapping>);

/// A `Connect` message with its descriptors.
#[derive(Debug)]
pub(super) struct Offer {
    pub slot: u32,
    pub epoch: u32,
    pub vm: String,
    pub ram: Vec<Piece>,
    pub fds: Vec<OwnedFd>,
}

/// Checks that KVM accepts the eventfd. As a doorbell, a refused one would remove the BAR with all doorbells. The check briefly attaches it
/// at the start of the peer's window. A store there has no other effect, and a spurious signal is harmless.
fn probe(vm: &Vm, at: u64, signal: &Arc<OwnedFd>) -> Result<(), machine::vm::VmError> {
    let event =
        IoEvent { space: IoSpace::Memory, address: at, width: 4, datamatch: None, fd: Arc::clone(signal) };
    vm.add_ioevent(&event)?;
    vm.remove_ioevent(&event)
}

impl PeerMapping {
    /// Maps a peer's RAM into the VM, and lets the VM's devices read it. After an error nothing is mapped.
    pub(super) fn map(
        vm: &Vm,
        memory: &GuestMemorySpace,
        geometry: &Geometry,
        offer: Offer,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let Offer { slot, epoch, vm: name, ram, mut fds } = offer;
        if name.len() > PEER_NAME_SIZE {
            let problem = format!(
                "the name {name:?} has {} bytes, and a register {PEER_NAME_SIZE}; give the VM a shorter one",
                name.len()
            );
            return Err(problem.into());
        }
        let (Some(signal), Some(segment)) = (fds.pop(), fds.pop()) else {
            return Err("descriptors are missing".into());
        };
        let signal = Arc::new(signal);
        let extents: Vec<(u64, u64)> = ram.iter().map(|piece| (piece.address, piece.size)).collect();
        let window = geometry.window(slot, &extents)?;
        probe(vm, geometry.start(slot)?, &signal)?;
        let mut peer = Self {
            epoch,
            vm: name,
            window,
            segment: Arc::new(segment),
            signal,
            slots: Vec::new(),
            device_ranges: Vec::new(),
        };
        for piece in &ram {
            let mapped = peer.map_piece(vm, memory, piece, &fds);
            if let Err(error) = mapped {
                peer.unmap(vm, memory);
                return Err(error);
            }
        }
        Ok(peer)
    }

    fn map_piece(
        &mut self,
        vm: &Vm,
        memory: &GuestMemorySpace,
        piece: &Piece,
        files: &[OwnedFd],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let file = usize::try_from(piece.file).ok().and_then(|file| files.get(file));
        let file = file.ok_or("a piece of RAM is in a file that didn't come")?;
        // `geometry.window` has checked that the range lies in the window.
        let at = self
            .window
            .start()
            .checked_add(piece.address)
            .ok_or("a piece of RAM lies beyond all addresses")?;
        let name = format!("window of {}", self.vm);
        let mapping = HostMapping::new(&name, file.as_fd(), piece.offset, piece.size, false)?;
        self.slots.push(vm.slots().add(&name, at, mapping, true)?);
        map_window(memory, at, file.as_fd(), piece.offset, piece.size)?;
        self.device_ranges.push((at, piece.size));
        Ok(())
    }

    /// Unmaps the peer from the guest and its devices. A range that can't be unmapped stays for the VM's lifetime, with an error in the
    /// log.
    pub(super) fn unmap(&mut self, vm: &Vm, memory: &GuestMemorySpace) {
        for (start, size) in self.device_ranges.drain(..) {
            if let Err(error) = unmap_window(memory, start, size) {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "A neighbour's window can't be taken from devices"
                );
            }
        }
        for slot in self.slots.drain(..) {
            if let Err(error) = vm.slots().remove(slot) {
                tracing::error!(%error, "A neighbour's window can't be taken from the guest");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use machine::kvm::Host;
    use machine::memory::{GuestRam, RamLayout, RamOptions, Readers};
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    /// A peer whose eventfd KVM refuses isn't mapped. Doorbells of other peers aren't affected.
    #[test]
    fn a_peer_whose_signal_is_no_eventfd_is_not_mapped() {
        let host = match Host::open() {
            Ok(host) => host,
            Err(error) => return facilities::missing(facilities::Facility::Kvm, error),
        };
        let vm = host.create_vm().unwrap();
        let own = GuestRam::allocate(&RamLayout::new(&[2 << 20]).unwrap(), &RamOptions::default()).unwrap();
        let memory = own.memory();
        let geometry = Geometry::new(1 << 32, 1 << 32, 4).unwrap();
        let size = 2 << 20;
        let options =
            RamOptions { name: "peer".to_owned(), readers: Readers::Anybody, ..RamOptions::default() };
        let ram = GuestRam::allocate(&RamLayout::new(&[size]).unwrap(), &options).unwrap();
        let offer = |signal: OwnedFd| Offer {
            slot: 2,
            epoch: 1,
            vm: "peer".to_owned(),
            ram: vec![Piece { address: 0, size, file: 0, offset: 0 }],
            fds: vec![
                ram.regions()[0].read_only.as_ref().unwrap().try_clone().unwrap().into(),
                memfd_create("segment", MemfdFlags::CLOEXEC).unwrap(),
                signal,
            ],
        };
        let wrong = memfd_create("signal", MemfdFlags::CLOEXEC).unwrap();
        let error = PeerMapping::map(&vm, &memory, &geometry, offer(wrong)).unwrap_err().to_string();
        assert!(error.contains("attach an eventfd"), "{error}");
        assert!(vm.slots().lookup(geometry.start(2).unwrap()).is_none());
        let right = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let mut peer = PeerMapping::map(&vm, &memory, &geometry, offer(right())).unwrap();
        assert!(vm.slots().lookup(geometry.start(2).unwrap()).is_some());
        peer.unmap(&vm, &memory);
        PeerMapping::map(&vm, &memory, &geometry, offer(right())).unwrap().unmap(&vm, &memory);
    }
}
