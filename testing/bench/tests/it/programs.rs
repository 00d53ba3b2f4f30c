//! The payload programs, and a payload VM's output.

use bench::programs::Programs;
use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};

/// Returns the programs, or `None` without KVM.
pub fn programs(test: &str) -> Option<&'static Programs> {
    static PROGRAMS: OnceLock<Programs> = OnceLock::new();
    if !std::path::Path::new("/dev/kvm").exists() {
        facilities::missing(facilities::Facility::Kvm, format!("{test} needs /dev/kvm"));
        return None;
    }
    Some(PROGRAMS.get_or_init(|| Programs::build().unwrap()))
}

/// A VM's output so far. Clones share it.
#[derive(Clone, Default)]
pub struct Output(Arc<Mutex<Vec<u8>>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Output {
    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}
