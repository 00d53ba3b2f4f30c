//! The API of this VM: HTTP and JSON on a Unix socket, one request per connection.
//!
//! ```text
//! ApiListener::bind   makes the socket (0600) and runtime   before the sandbox closes
//! ApiListener::serve  starts a thread of its own, "api"     calls VmControl, one request at a time
//! ApiServer::stop     waits for responses in progress       removes the socket file
//! ```
//!
//! The only asynchronous code of the monitor. Only clients of the same user, or root, are served: the API checks the peer's credentials
//! besides the file's mode. A client can neither hold a connection open for long nor send much.

mod control;
mod document;
mod inspect_path;
mod routes;
mod server;
mod socket;

pub use control::{ControlError, VmControl};
pub use document::openapi;
pub use server::{ApiError, ApiListener, ApiServer, SYSCALLS};
pub(crate) use socket::{SocketFile, listen_for_packets};

#[cfg(test)]
pub(crate) mod tests;
