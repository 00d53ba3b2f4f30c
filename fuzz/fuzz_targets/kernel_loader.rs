//! Untrusted kernel images: damaged bzImages, damaged ELF files, any bytes.
//!
//! Checked: loading returns a result or one sentence. It writes only what the result names, and nothing after an error in a header.
//! The dirty bitmap shows every written page.

#![no_main]

use causeway_fuzz::kernels;
use firmware::image::{Image, ImageBytes};
use firmware::kernel::{BootFiles, BootProtocol, Contents, load};
use firmware::layout;
use firmware::map::{AddressRange, RamRange};
use libfuzzer_sys::fuzz_target;
use machine::memory::{GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryRegion};

/// RAM that the loader gets.
const RAM: u64 = 16 << 20;
/// RAM beyond it, which detects writes out of bounds.
const BEYOND: u64 = 1 << 20;
/// RAM above 4 GiB, for initrds.
const HIGH: u64 = 64 << 10;

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    image: Base,
    patches: Vec<Patch>,
    truncate: Option<u16>,
    initrds: Vec<u16>,
    command_line: u16,
    protocol: Protocol,
    high: bool,
    /// 0xA5: memory isn't zero. Rare, since zeroing megabytes is slow.
    contents: u8,
}

#[derive(Debug, arbitrary::Arbitrary)]
enum Base {
    BzImage,
    VmLinux,
    Bytes(Vec<u8>),
}

#[derive(Debug, arbitrary::Arbitrary)]
enum Protocol {
    Auto,
    Linux64,
    Pvh,
}

#[derive(Debug, arbitrary::Arbitrary)]
struct Patch {
    at: u16,
    len: u8,
    number: Number,
}

/// Numbers that tend to break arithmetic.
#[derive(Debug, arbitrary::Arbitrary)]
enum Number {
    Any(u64),
    Word(u32),
    Small(u8),
    Bit(u8),
    Ones(u8),
    Page(u16),
}

impl Number {
    fn value(&self) -> u64 {
        match self {
            Self::Any(any) => *any,
            Self::Word(word) => u64::from(*word),
            Self::Small(small) => u64::from(*small),
            Self::Bit(bit) => 1 << (bit % 64),
            Self::Ones(bit) => u64::MAX >> (bit % 64),
            Self::Page(page) => u64::from(*page) << 12,
        }
    }
}

struct Fixture {
    memory: GuestMemory,
    bzimage: Vec<u8>,
    vmlinux: Vec<u8>,
}

thread_local! {
    static FIXTURE: Fixture = Fixture {
        memory: GuestMemory::from_ranges(&[
            (GuestAddress(0), (RAM + BEYOND) as usize),
            (GuestAddress(layout::HIGH_RAM_START), HIGH as usize),
        ])
        .expect("17 MiB"),
        bzimage: kernels::bzimage(),
        vmlinux: kernels::vmlinux(),
    };
}

fuzz_target!(|input: Input| FIXTURE.with(|fixture| run(fixture, &input)));

fn run(fixture: &Fixture, input: &Input) {
    let mut image = match &input.image {
        Base::BzImage => fixture.bzimage.clone(),
        Base::VmLinux => fixture.vmlinux.clone(),
        Base::Bytes(bytes) => bytes.clone(),
    };
    for patch in &input.patches {
        // Most of the decisive bytes are in the first 1 KiB.
        let at = usize::from(patch.at);
        let at = if at < 0xC000 { at % 0x400 } else { at - 0xC000 };
        let bytes = patch.number.value().to_le_bytes();
        for (byte, new) in image.iter_mut().skip(at).zip(&bytes[..usize::from(patch.len) % 9]) {
            *byte = *new;
        }
    }
    if let Some(len) = input.truncate {
        image.truncate(len.into());
    }
    let memory = &fixture.memory;
    let mut ram = vec![RamRange { range: AddressRange { start: 0, len: RAM }, node: 0 }];
    if input.high {
        ram.push(RamRange { range: AddressRange { start: layout::HIGH_RAM_START, len: HIGH }, node: 0 });
    }
    let zeroes = [0; 0x1_0000];
    let initrds: Vec<_> =
        input.initrds.iter().take(4).map(|len| ImageBytes(&zeroes[..usize::from(*len)])).collect();
    let initrds: Vec<_> = initrds.iter().map(|image| image as &dyn Image).collect();
    let kernel = ImageBytes(&image);
    let command_line = "x".repeat(usize::from(input.command_line) % 3000);
    let protocol = match input.protocol {
        Protocol::Auto => BootProtocol::Auto,
        Protocol::Linux64 => BootProtocol::Linux64,
        Protocol::Pvh => BootProtocol::Pvh,
    };
    let files = BootFiles { kernel: &kernel, initrds: &initrds, command_line: &command_line, protocol };
    let contents = if input.contents == 0xA5 { Contents::Anything } else { Contents::Zeroes };
    let result = load(memory, &ram, &files, contents, layout::ACPI_TABLES);
    let allowed: Vec<AddressRange> = match &result {
        Ok(loaded) => {
            assert_ne!(loaded.protocol, BootProtocol::Auto);
            assert!(loaded.kernel.start >= layout::KERNEL_MINIMUM && loaded.kernel.end() <= RAM);
            let boot_structures = AddressRange { start: 0, len: layout::CONVENTIONAL_END };
            [Some(boot_structures), Some(loaded.kernel), loaded.initrd].into_iter().flatten().collect()
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with(|c: char| c.is_ascii_uppercase()), "{text}");
            assert!(!text.contains('\n') && !text.ends_with('.') && text.len() < 500, "{text}");
            Vec::new()
        }
    };
    for region in memory.iter() {
        // A word of the bitmap is 64 pages.
        for (at, word) in (0_u64..).zip((**region).bitmap().get_and_reset()) {
            for bit in (0..64).filter(|bit| word != 0 && word >> bit & 1 != 0) {
                let address = region.start_addr().0 + (at * 64 + bit) * 4096;
                let inside = |range: &AddressRange| range.start < address + 4096 && address < range.end();
                assert!(allowed.iter().any(inside), "wrote at {address:#x}, result {result:?}");
            }
        }
    }
}
