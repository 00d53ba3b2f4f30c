//! Integration tests of `vpio`. They form one binary, since each binary links everything.
#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod e1000;
mod e1000_attacks;
mod e1000_page;
mod ne2000;
mod ne2000_attacks;
mod ne2000_exits;
mod open;
mod recovery;
mod remote;
mod rtl8139;
mod rtl8139_attacks;
mod rtl8139_bulk;
mod rtl8139_page;
mod sharing;
mod sharing_no_iommu;
mod sharing_remote;
mod support;
mod unmapping;
