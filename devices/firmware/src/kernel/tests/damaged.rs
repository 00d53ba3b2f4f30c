//! Damaged images: loading any bytes returns `Ok` or a one-sentence error, and writes only where the result says. Dirty
//! bitmaps show every written page.

use machine::memory::{Bitmap, GuestMemoryBackend, GuestMemoryRegion};
use proptest::prelude::*;

use super::*;

/// RAM that the loader gets. Small, as the test inspects every page after every case.
const SMALL_RAM: u64 = 24 * MIB;

/// A kind of damage to an image.
#[derive(Debug, Clone)]
enum Damage {
    Truncate(prop::sample::Index),
    Flip(prop::sample::Index, u8),
    /// Replaces one to eight bytes by a number that tends to break arithmetic.
    Field(prop::sample::Index, u64, usize),
    /// Does the same within the first 512 + 123 bytes, which contain the headers.
    HeaderField(usize, u64, usize),
    Append(Vec<u8>),
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        any::<u32>().prop_map(u64::from),
        (0u32..64).prop_map(|bit| 1 << bit),
        (0u32..64).prop_map(|bit| (1u64 << bit).wrapping_sub(1)),
        Just(u64::MAX),
        Just(0),
        0u64..0x1_0000,
        (0u64..0x8000).prop_map(|page| page << 12),
    ]
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        1 => index().prop_map(Damage::Truncate),
        3 => (index(), 0u8..8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        3 => (index(), number(), 1usize..9).prop_map(|(at, n, len)| Damage::Field(at, n, len)),
        9 => (0usize..0x270, number(), 1usize..9).prop_map(|(at, n, len)| Damage::HeaderField(at, n, len)),
        1 => prop::collection::vec(any::<u8>(), 1..64).prop_map(Damage::Append),
    ]
}

fn apply(image: &mut Vec<u8>, damage: &Damage) {
    if image.is_empty() {
        return;
    }
    let mut put = |at: usize, number: u64, len: usize| {
        for (slot, byte) in image.iter_mut().skip(at).take(len).zip(number.to_le_bytes()) {
            *slot = byte;
        }
    };
    match damage {
        Damage::HeaderField(at, number, len) => put(*at, *number, *len),
        Damage::Field(at, number, len) => {
            let at = at.index(image.len());
            for (slot, byte) in image.iter_mut().skip(at).take(*len).zip(number.to_le_bytes()) {
                *slot = byte;
            }
        }
        Damage::Truncate(at) => {
            let len = at.index(image.len());
            image.truncate(len);
        }
        Damage::Flip(at, bit) => {
            let at = at.index(image.len());
            image[at] ^= 1 << bit;
        }
        Damage::Append(bytes) => image.extend(bytes),
    }
}

fn protocol() -> impl Strategy<Value = BootProtocol> {
    prop_oneof![Just(BootProtocol::Auto), Just(BootProtocol::Linux64), Just(BootProtocol::Pvh)]
}

/// Loads with `ram` smaller than the memory behind it, and checks the writes.
fn check(kernel: &[u8], initrds: &[&[u8]], command_line: &str, protocol: BootProtocol) {
    // Twice the loader's RAM, so that a write past its end is visible.
    let memory = memory(2 * SMALL_RAM);
    let kernel = ImageBytes(kernel);
    let initrds: Vec<_> = initrds.iter().map(|bytes| ImageBytes(bytes)).collect();
    let initrds: Vec<_> = initrds.iter().map(|image| image as &dyn Image).collect();
    let files = BootFiles { kernel: &kernel, initrds: &initrds, command_line, protocol };
    let result = load(&memory, &ram(SMALL_RAM), &files, Contents::Anything, RSDP);
    let allowed: Vec<AddressRange> = match &result {
        Ok(loaded) => {
            assert!(loaded.kernel.start >= layout::KERNEL_MINIMUM && loaded.kernel.end() <= SMALL_RAM);
            let boot_structures = AddressRange { start: 0, len: layout::CONVENTIONAL_END };
            [Some(boot_structures), Some(loaded.kernel), loaded.initrd].into_iter().flatten().collect()
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with(|c: char| c.is_ascii_uppercase()), "{text}");
            assert!(!text.contains('\n') && !text.ends_with('.') && text.len() < 400, "{text}");
            // A refused image must leave no trace. The images are in memory, so reads can't fail.
            Vec::new()
        }
    };
    let region = memory.iter().next().unwrap();
    for page in 0..2 * SMALL_RAM / layout::PAGE_SIZE {
        let address = page * layout::PAGE_SIZE;
        if region.bitmap().dirty_at(usize::try_from(address).unwrap()) {
            let inside =
                |range: &AddressRange| range.start < address + layout::PAGE_SIZE && address < range.end();
            assert!(allowed.iter().any(inside), "wrote at {address:#x}, result {result:?}");
        }
    }
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(6000))]

    #[test]
    fn bzimages(damages in prop::collection::vec(damage(), 1..5), protocol in protocol()) {
        let mut image = bzimage();
        damages.iter().for_each(|damage| apply(&mut image, damage));
        check(&image, &[b"initrd"], "quiet", protocol);
    }

    #[test]
    fn vmlinuxes(damages in prop::collection::vec(damage(), 1..5), protocol in protocol()) {
        let mut image = vmlinux();
        damages.iter().for_each(|damage| apply(&mut image, damage));
        check(&image, &[b"initrd"], "quiet", protocol);
    }
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn random_bytes_behind_a_magic_number(
        elf in any::<bool>(),
        bytes in prop::collection::vec(any::<u8>(), 0..2000),
    ) {
        let mut image = bytes;
        if elf {
            image.splice(0..0, *b"\x7fELF\x02\x01");
        } else if image.len() > 0x206 {
            image[0x202..0x206].copy_from_slice(b"HdrS");
        }
        check(&image, &[], "", BootProtocol::Auto);
    }

    #[test]
    fn initrds_and_command_lines_of_any_size(
        sizes in prop::collection::vec(0usize..9000, 0..4),
        text in "\\PC{0,3000}",
    ) {
        let initrds: Vec<Vec<u8>> = sizes.iter().map(|&size| vec![0xa5; size]).collect();
        let initrds: Vec<&[u8]> = initrds.iter().map(Vec::as_slice).collect();
        check(&bzimage(), &initrds, &text, BootProtocol::Auto);
    }
}
