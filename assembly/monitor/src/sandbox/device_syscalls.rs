//! The lists that device modules publish for their threads.

/// Worker threads of virtio devices: one list per module that runs in them.
pub(super) const WORKERS: &[&[i64]] = &[
    virtio_devices::worker::SYSCALLS,
    virtio_devices::block::SYSCALLS,
    virtio_devices::net::worker::SYSCALLS,
    virtio_devices::net::tap::SYSCALLS,
    virtio_devices::net::passt::SYSCALLS,
];

/// Threads that start and stop workers when the driver or the API says so.
pub(super) const SPAWNERS: &[&[i64]] = &[virtio_devices::worker::SPAWN_SYSCALLS];

/// The console's thread.
pub(super) const CONSOLE: &[&[i64]] = &[platform_devices::console::SYSCALLS];

/// vCPU threads that write to the console.
pub(super) const VCPUS: &[&[i64]] = &[platform_devices::console::VCPU_SYSCALLS];

/// The main thread as it takes devices apart.
pub(super) const END: &[&[i64]] = &[virtio_devices::net::passt::END_SYSCALLS];
