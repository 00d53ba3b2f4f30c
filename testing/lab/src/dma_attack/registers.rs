//! A card's registers from user space: ports through reads and writes of the sysfs file, memory through a mapping.
#![allow(unsafe_code, reason = "a BAR is mapped and accessed by volatile writes")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::NonNull;

use anyhow::{Context, Result, bail};
use rustix::mm::{MapFlags, ProtFlags};

/// A BAR.
enum Bar {
    Ports(File),
    Memory { start: NonNull<u8>, length: usize },
}

/// The first two BARs of a card.
pub struct Registers([Bar; 2]);

impl Registers {
    /// Opens the BARs of the device in this sysfs directory. `ports` tells which BARs consist of ports. A missing BAR
    /// is opened as ports that accept nothing.
    pub fn open(folder: &Path, ports: [bool; 2]) -> Result<Self> {
        let bar = |number: usize, ports: bool| -> Result<Bar> {
            let path = folder.join(format!("resource{number}"));
            if !path.exists() {
                return Ok(Bar::Ports(OpenOptions::new().write(true).open("/dev/null")?));
            }
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .open(&path)
                .with_context(|| format!("Can't open {}", path.display()))?;
            if ports {
                return Ok(Bar::Ports(file));
            }
            let length = usize::try_from(file.metadata()?.len())?.max(4096);
            // SAFETY: a new mapping at an address of the kernel's choice; it stays until this program ends.
            let start = unsafe {
                rustix::mm::mmap(
                    std::ptr::null_mut(),
                    length,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED,
                    &file,
                    0,
                )
            }
            .with_context(|| format!("Can't map {}", path.display()))?;
            let start = NonNull::new(start.cast::<u8>()).context("A mapping at address 0")?;
            Ok(Bar::Memory { start, length })
        };
        Ok(Registers([bar(0, ports[0])?, bar(1, ports[1])?]))
    }

    /// Reads a register of one byte among a card's ports.
    pub fn read_port(&self, bar: u8, offset: u32) -> Result<u8> {
        let Some(Bar::Ports(file)) = self.0.get(usize::from(bar)) else { bail!("BAR {bar} has no ports") };
        let mut byte = [0];
        file.read_exact_at(&mut byte, u64::from(offset)).context("Can't read a port")?;
        Ok(byte[0])
    }

    /// Writes a register of 1, 2 or 4 bytes by one access.
    pub fn write(&mut self, bar: u8, offset: u32, size: u8, value: u32) -> Result<()> {
        let bytes = value.to_le_bytes();
        let bytes = bytes.get(..usize::from(size)).context("A register has at most 4 bytes")?;
        match self.0.get(usize::from(bar)).context("There is no such BAR")? {
            Bar::Ports(file) => {
                file.write_all_at(bytes, u64::from(offset)).context("Can't write a port")?;
            }
            Bar::Memory { start, length } => {
                let offset = offset as usize;
                if offset + bytes.len() > *length || !offset.is_multiple_of(bytes.len()) {
                    bail!("There is no register of {size} bytes at {offset:#x}");
                }
                // SAFETY: inside the mapping and aligned. Device memory isn't a Rust object.
                unsafe {
                    let at = start.as_ptr().add(offset);
                    match *bytes {
                        [a] => at.write_volatile(a),
                        [a, b] => at.cast::<u16>().write_volatile(u16::from_le_bytes([a, b])),
                        _ => at.cast::<u32>().write_volatile(value),
                    }
                }
            }
        }
        Ok(())
    }
}
