//! Connects PCI functions to the machine's interrupt controllers: the traits of `pci` over those of `machine`.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use machine::interrupt::{InterruptController, MsiRoute};
use pci::interrupt::{InterruptError, Msi, MsiMessage, MsiVector};

/// Allocates MSI-X vectors as routes of the machine's interrupt controller.
pub struct ControllerMsi {
    controller: Arc<dyn InterruptController>,
}

impl ControllerMsi {
    /// Allocates from `controller`.
    pub fn new(controller: Arc<dyn InterruptController>) -> Self {
        Self { controller }
    }
}

impl Msi for ControllerMsi {
    fn allocate(&self, count: u16) -> Result<Vec<Arc<dyn MsiVector>>, InterruptError> {
        let routes = self.controller.allocate_msi(count).map_err(|source| {
            refused(format!("allocate {count} message-signalled interrupt routes"), source)
        })?;
        Ok(routes.into_iter().map(|route| Arc::new(RouteVector { route }) as Arc<dyn MsiVector>).collect())
    }
}

struct RouteVector {
    route: Arc<dyn MsiRoute>,
}

impl MsiVector for RouteVector {
    fn set(&self, message: Option<MsiMessage>) -> Result<(), InterruptError> {
        let what = || match message {
            Some(MsiMessage { address, data }) => {
                format!("route a vector to address {address:#x}, data {data:#x}")
            }
            None => "mask a vector".to_owned(),
        };
        self.route
            .set(message.map(|MsiMessage { address, data }| machine::interrupt::MsiMessage { address, data }))
            .map_err(|source| refused(what(), source))
    }

    fn trigger(&self) -> Result<(), InterruptError> {
        self.route
            .trigger()
            .map_err(|source| refused("send a message-signalled interrupt".to_owned(), source))
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.route.eventfd()
    }
}

fn refused(what: String, source: std::io::Error) -> InterruptError {
    InterruptError::Refused { what, source }
}
