//! System calls that device modules publish for their threads; only for devices that the VM has.

use machine::interrupt::IrqchipKind;
use virtio_devices::{block, net, rng, vsock, worker};

use crate::description::{NetBackend, VmDescription};

/// Lists of the VM's virtio device workers: one per module that runs in them.
pub(super) fn workers(vm: &VmDescription) -> Vec<&'static [i64]> {
    let tap = vm.net.iter().any(|net| matches!(net.backend, NetBackend::Tap(_) | NetBackend::Fd(_)));
    let user = has_passt(vm);
    let lists: [(bool, &'static [i64]); 9] = [
        (true, worker::SYSCALLS),
        (!vm.disks.is_empty(), block::SYSCALLS),
        (!vm.net.is_empty(), net::worker::SYSCALLS),
        (tap, net::tap::SYSCALLS),
        (user, net::passt::SYSCALLS),
        (has_neighbours_network(vm), crate::neighbour::NETWORK_SYSCALLS),
        (vm.rng, rng::SYSCALLS),
        (vm.vsock.is_some(), vsock::SYSCALLS),
        (!vm.nics.is_empty(), crate::nic::SYSCALLS),
    ];
    lists.into_iter().filter(|(present, _)| *present).map(|(_, list)| list).collect()
}

/// Threads that start and stop workers for the driver or the API.
pub(super) const SPAWNERS: &[i64] = worker::SPAWN_SYSCALLS;

/// The console's thread.
pub(super) const CONSOLE: &[i64] = platform_devices::console::SYSCALLS;

/// vCPU threads that write to the console.
pub(super) const VCPUS: &[i64] = platform_devices::console::VCPU_SYSCALLS;

/// The main thread when it removes devices.
pub(super) fn end(vm: &VmDescription) -> Vec<&'static [i64]> {
    let lists = [(has_passt(vm), net::passt::END_SYSCALLS), (!vm.nics.is_empty(), crate::nic::END_SYSCALLS)];
    lists.into_iter().filter(|(present, _)| *present).map(|(_, list)| list).collect()
}

fn has_neighbours_network(vm: &VmDescription) -> bool {
    vm.net.iter().any(|net| net.backend == NetBackend::Neighbours)
}

/// Whether the VM has a passt process, which is outside the sandbox and which the monitor ends.
pub(super) fn has_passt(vm: &VmDescription) -> bool {
    vm.net.iter().any(|net| net.backend == NetBackend::User)
}

/// Whether other processes serve devices of the VM, or it has neighbours.
fn has_served(vm: &VmDescription) -> bool {
    !vm.rdma.is_empty() || !vm.vfio_user.is_empty() || vm.neighbour.is_some()
}

/// Threads that access devices of other processes.
pub(super) fn served_access(vm: &VmDescription) -> &'static [i64] {
    if has_served(vm) { crate::vfio_user::ACCESS_SYSCALLS } else { &[] }
}

/// Threads that access commodity NICs.
pub(super) fn nic_access(vm: &VmDescription) -> &'static [i64] {
    if vm.nics.is_empty() { &[] } else { crate::nic::SYSCALLS }
}

/// Threads that use interrupt controllers in this process.
pub(super) fn irqchip(vm: &VmDescription) -> &'static [i64] {
    match vm.interrupts {
        IrqchipKind::Kernel => &[],
        IrqchipKind::Monitor => crate::vm::IRQCHIP_SYSCALLS,
    }
}

/// Threads that reconnect to servers of such devices.
pub(super) fn served_watcher(vm: &VmDescription) -> &'static [i64] {
    if has_served(vm) { crate::vfio_user::WATCHER_SYSCALLS } else { &[] }
}
