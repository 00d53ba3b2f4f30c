//! DMA attacks by a card (`lab attack`), in a guest or on a bare host. They need no driver: only a card's BARs, and
//! memory that the kernel doesn't use. [`crate::scenarios`] decides whether an attack succeeded, by the target's bytes
//! and the frames on the wire.

pub mod beside;
pub mod cards;
mod registers;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use cards::{Card, OWN, SIZE};
use registers::Registers;

/// Content of a correct driver's frames.
pub const HONEST: [u8; 8] = *b"CWhonest";
/// Time-out of a card's reset.
const RESET: Duration = Duration::from_millis(300);

/// Size in bytes of the rings in the attacker's own memory. The frames follow.
const RINGS: usize = 0x1_0000;

/// The directory of PCI devices.
const DEVICES: &str = "/sys/bus/pci/devices";

/// Returns the only card of that kind.
fn only(name: &str, identity: (u16, u16)) -> Result<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(DEVICES).with_context(|| format!("Can't list {DEVICES}"))? {
        let path = entry?.path();
        let number = |name: &str| {
            let text = std::fs::read_to_string(path.join(name)).ok()?;
            u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
        };
        if number("vendor").zip(number("device")) == Some(identity) {
            found.push(path);
        }
    }
    match found.as_slice() {
        [path] => Ok(path.clone()),
        _ => bail!("There are {} cards of kind {name} here; say which (--address)", found.len()),
    }
}

/// Enables decoding of the BARs and bus mastering, as a driver does.
fn enable(path: &Path) -> Result<()> {
    let config = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path.join("config"))
        .with_context(|| format!("Can't open the configuration space in {}", path.display()))?;
    let mut command = [0; 2];
    config.read_exact_at(&mut command, 4)?;
    config.write_all_at(&(u16::from_le_bytes(command) | 7).to_le_bytes(), 4)?;
    Ok(())
}

/// Opens memory by physical addresses, outside of the kernel's.
fn memory() -> Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/mem").context("Can't open /dev/mem")
}

fn write(registers: &mut Registers, through: u8, &(bar, offset, size, value): &cards::Write) -> Result<()> {
    registers.write(if bar == 0 { through } else { bar }, offset, size, value)
}

/// Parameters of an attack.
#[derive(Debug)]
pub struct Request {
    /// The card's name.
    pub card: String,
    /// The attack's index in the card's list. Without it, a correct driver's frame is sent.
    pub number: Option<usize>,
    /// The BAR for registers that all BARs have.
    pub bar: u8,
    /// The card's PCI address. Default: the only card of the kind.
    pub address: Option<String>,
    /// Time in which frames may arrive.
    pub hold: Duration,
    /// Bytes that must have been received into the attacker's own memory in the end.
    pub marker: Option<String>,
}

/// Prepares card and memory, executes the attack, waits while frames arrive, and resets the card.
pub fn run(request: &Request) -> Result<()> {
    let card = Card::find(&request.card)
        .with_context(|| format!("There are no attacks on a card {:?}", request.card))?;
    let attack = match request.number {
        Some(number) => Some(
            card.attacks
                .get(number)
                .with_context(|| format!("There is no attack {number} on {}", card.name))?,
        ),
        None => None,
    };
    let path = match &request.address {
        Some(address) => Path::new(DEVICES).join(address),
        None => only(card.name, card.identity)?,
    };
    enable(&path)?;
    let mut registers = Registers::open(&path, card.ports)?;
    let memory = memory()?;
    let store = |address: u32, bytes: &[u8]| {
        memory
            .write_all_at(bytes, u64::from(address))
            .with_context(|| format!("Can't write memory at {address:#x}: is it kept free (memmap)?"))
    };
    let reset = |registers: &mut Registers| -> Result<()> {
        write(registers, request.bar, &card.reset)?;
        std::thread::sleep(RESET);
        Ok(())
    };
    reset(&mut registers)?;
    store(OWN, &HONEST.repeat(SIZE as usize / HONEST.len()))?;
    // Rings of empty descriptors.
    store(OWN, &[0; RINGS])?;
    for &(address, word) in card.memory.iter().chain(attack.map_or(&[][..], |attack| attack.memory)) {
        store(address, &word.to_le_bytes())?;
    }
    let then = attack.map_or(card.honest, |attack| attack.writes);
    for access in card.setup.iter().chain(then).chain(card.let_in) {
        write(&mut registers, request.bar, access)?;
    }
    std::thread::sleep(request.hold);
    reset(&mut registers)?;
    if let Some(marker) = &request.marker {
        let mut bytes = vec![0; SIZE as usize];
        memory.read_exact_at(&mut bytes, u64::from(OWN)).context("Can't read the attacker's own memory")?;
        if !bytes.windows(marker.len()).any(|window| window == marker.as_bytes()) {
            bail!("No frame with {marker:?} was stored in the attacker's own memory");
        }
    }
    Ok(())
}
