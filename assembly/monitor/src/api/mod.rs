//! The API of this VM: HTTP and JSON on a Unix socket.
mod control;
pub use control::{ControlError, VmControl};
