//! BARs whose mapped ranges change while a guest stores to them, on real KVM.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ::machine::vcpu::VcpuEvent;
use ::machine::x86::kvm_regs;
use pci::function::{
    BarKind, BarLayout, BarMapping, BarPlace, BarPlacer as _, ConfigEffect, Doorbell, FunctionError,
    PciFunction, SavedFunction,
};
use pci::interrupt::IntxLine;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::MachinePlacer;
use common::{Guest, STOP, WINDOW, host, program};

#[path = "../../../../base/machine/tests/it/common/mod.rs"]
mod common;

const SIZE: u64 = 32 << 20;
const BAR: BarLayout = BarLayout { index: 2, kind: BarKind::Memory32, prefetchable: false, size: SIZE };

/// A function with one BAR, mapped or not, that records the writes that reach it.
struct Doorbells {
    memory: Arc<OwnedFd>,
    mapped: AtomicBool,
    trapped: Mutex<Vec<(u64, u64)>>,
}

impl PciFunction for Doorbells {
    fn name(&self) -> &str {
        "doorbells"
    }
    fn bars(&self) -> Vec<BarLayout> {
        vec![BAR]
    }
    fn config_read(&self, _: u16, _: &mut [u8]) {}
    fn config_write(&self, _: u16, _: &[u8]) -> ConfigEffect {
        ConfigEffect::default()
    }
    fn places(&self) -> Vec<BarPlace> {
        vec![BarPlace { layout: BAR, address: Some(WINDOW) }]
    }
    fn bar_read(&self, _: u8, _: u64, _: &mut [u8]) {}
    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        assert_eq!(bar, 2);
        self.trapped.lock().unwrap().push((offset, u64::from_le_bytes(data.try_into().unwrap())));
    }
    fn doorbells(&self) -> Vec<Doorbell> {
        Vec::new()
    }
    fn mappings(&self) -> Vec<BarMapping> {
        let mapping = |offset| BarMapping {
            bar: 2,
            offset,
            len: SIZE / 2,
            fd: Arc::clone(&self.memory),
            fd_offset: offset,
            read_only: false,
        };
        if self.mapped.load(Ordering::SeqCst) { vec![mapping(0), mapping(SIZE / 2)] } else { Vec::new() }
    }
    fn attach_intx(&self, _: Arc<dyn IntxLine>) {}
    fn reset(&self) -> Result<(), FunctionError> {
        Ok(())
    }
    fn quiesce(&self) -> Result<(), FunctionError> {
        Ok(())
    }
    fn unquiesce(&self) -> Result<(), FunctionError> {
        Ok(())
    }
    fn save(&self) -> Result<SavedFunction, FunctionError> {
        Err(FunctionError::NotSaveable { name: "doorbells".to_owned(), reason: "a test".to_owned() })
    }
    fn inspect(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

/// The guest writes each of four million words once, with its own address, while the ranges are mapped and trapped repeatedly. Each word
/// must be in the memory or have been trapped.
#[test]
fn no_store_is_lost_while_ranges_are_mapped_and_trapped() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    let placer =
        MachinePlacer::new(Arc::clone(&guest.vm), Arc::clone(&guest.ports), Arc::clone(&guest.memory));
    let memory = memfd_create("doorbells", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memory, SIZE).unwrap();
    let doorbells = Arc::new(Doorbells {
        memory: Arc::new(memory),
        mapped: AtomicBool::new(false),
        trapped: Mutex::default(),
    });
    let function = Arc::clone(&doorbells) as Arc<dyn PciFunction>;
    placer.place(&function, BAR, WINDOW).unwrap();

    // loop: mov [rdi], rdi; add rdi, 8; dec rcx; jnz loop
    let code = program(&[&[0x48, 0x89, 0x3f, 0x48, 0x83, 0xc7, 0x08, 0x48, 0xff, 0xc9, 0x75, 0xf4], &STOP]);
    let done = AtomicBool::new(false);
    let flips = std::thread::scope(|scope| {
        let flipper = scope.spawn(|| {
            let mut flips = 0_u64;
            while !done.load(Ordering::SeqCst) {
                doorbells.mapped.fetch_xor(true, Ordering::SeqCst);
                placer.refresh(&function, BAR, WINDOW).unwrap();
                flips += 1;
                // Trapped stores are much slower, so they get fewer of the words.
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
            flips
        });
        let regs = kvm_regs { rdi: WINDOW, rcx: SIZE / 8, ..Default::default() };
        let event = guest.run(&code, regs);
        done.store(true, Ordering::SeqCst);
        assert_eq!(event, VcpuEvent::Stopped { vcpu: 0 });
        flipper.join().unwrap()
    });

    let mut words = vec![0; usize::try_from(SIZE).unwrap()];
    assert_eq!(rustix::io::pread(&doorbells.memory, &mut words, 0).unwrap(), words.len());
    let trapped = doorbells.trapped.lock().unwrap();
    let mut seen = vec![0_u64; usize::try_from(SIZE / 8).unwrap()];
    for (offset, value) in trapped.iter() {
        assert_eq!(*value, WINDOW + offset);
        seen[usize::try_from(offset / 8).unwrap()] += 1;
    }
    let mut landed = 0_u64;
    for (index, (word, trapped)) in words.chunks_exact(8).zip(&seen).enumerate() {
        let value = u64::from_le_bytes(word.try_into().unwrap());
        let address = WINDOW + 8 * u64::try_from(index).unwrap();
        assert!(value == 0 || value == address);
        let times = trapped + u64::from(value != 0);
        assert!(times == 1, "word {index} of {} was stored {times} times", SIZE / 8);
        landed += u64::from(value != 0);
    }
    assert_eq!(guest.exits("memory:doorbells bar2"), trapped.len() as u64);
    eprintln!("{landed} stores landed in memory, {} were trapped, {flips} changes", trapped.len());

    placer.unplace(&function, BAR, WINDOW).unwrap();
    placer.unplace(&function, BAR, WINDOW).unwrap();
    assert!(placer.refresh(&function, BAR, WINDOW).is_err());
    assert_eq!(guest.vm.slots().list().len(), 1, "only RAM is left");
}
