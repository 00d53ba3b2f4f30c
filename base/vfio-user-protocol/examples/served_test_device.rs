//! Serves the test device on a socket until it is killed, for manual tests of a monitor: `served_test_device SOCKET
//! [MILLISECONDS]`. With a number, it changes the doorbell mode at this interval. It prints each event as a line on
//! standard output.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use std::os::fd::AsFd;
use vfio_user_device::TestDevice;
use vfio_user_protocol::device::Device;
use vfio_user_protocol::doorbell_mode::DoorbellMode;
use vfio_user_protocol::server::Server;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("a path for the socket");
    let period = arguments.next().map(|text| Duration::from_millis(text.parse().expect("milliseconds")));
    let device = TestDevice::new();
    let server = Server::bind(Path::new(&path)).unwrap();
    let served: Arc<dyn Device> = device.clone();
    std::thread::spawn(move || {
        let mut mode = DoorbellMode::Trapped;
        loop {
            std::thread::sleep(period.unwrap_or(Duration::from_millis(100)));
            if period.is_some() {
                mode =
                    if mode == DoorbellMode::Trapped { DoorbellMode::Mapped } else { DoorbellMode::Trapped };
                device.want(mode);
            }
            for event in device.events() {
                println!("{event:?}");
            }
            device.clear_events();
        }
    });
    let never = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    server.serve(&served, never.as_fd()).unwrap();
}
