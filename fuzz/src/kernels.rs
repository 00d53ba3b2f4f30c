//! Synthetic kernels that a loader accepts, as a base for damage.

/// Load address.
const KERNEL_AT: u64 = 2 << 20;

/// A bzImage of protocol 2.15 (Documentation/arch/x86/boot.rst) with four setup sectors and 4 KiB of code.
pub fn bzimage() -> Vec<u8> {
    let mut file = vec![0; 5 * 512];
    let mut set = |offset: usize, bytes: &[u8]| file[offset..offset + bytes.len()].copy_from_slice(bytes);
    set(0x1F1, &[4]);
    set(0x1F4, &(4096_u32 / 16).to_le_bytes());
    set(0x1FE, &0xAA55_u16.to_le_bytes());
    set(0x202, b"HdrS");
    set(0x206, &0x020F_u16.to_le_bytes());
    set(0x211, &[1]);
    set(0x22C, &0x7FFF_FFFF_u32.to_le_bytes());
    set(0x230, &0x20_0000_u32.to_le_bytes());
    set(0x234, &[1, 21]);
    set(0x236, &0x3F_u16.to_le_bytes());
    set(0x238, &2047_u32.to_le_bytes());
    set(0x258, &KERNEL_AT.to_le_bytes());
    set(0x260, &0x10_0000_u32.to_le_bytes());
    file.resize(5 * 512 + 4096, 0x90);
    file
}

/// An ELF executable with code, data and BSS, and a PVH note (Xen public headers, elfnote.h).
pub fn vmlinux() -> Vec<u8> {
    let notes = notes(KERNEL_AT + 0x10);
    // Type, address, bytes in the file, bytes in memory.
    let segments: [(u32, u64, &[u8], u64); 3] = [
        (1, KERNEL_AT, &[0x90; 600], 600),
        (1, KERNEL_AT + 0x2000, &[0x55; 100], 0x3000),
        (4, 0, &notes, notes.len() as u64),
    ];
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    file.extend(2_u16.to_le_bytes());
    file.extend(62_u16.to_le_bytes());
    file.extend(1_u32.to_le_bytes());
    for word in [KERNEL_AT, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, segments.len() as u16, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    let mut offset = 64 + 56 * segments.len() as u64;
    for (kind, address, bytes, memory) in segments {
        file.extend(kind.to_le_bytes());
        file.extend(5_u32.to_le_bytes());
        let virtual_address = address | 0xFFFF_FFFF_8000_0000;
        for word in [offset, virtual_address, address, bytes.len() as u64, memory, 4] {
            file.extend(word.to_le_bytes());
        }
        offset += bytes.len() as u64;
    }
    for (_, _, bytes, _) in segments {
        file.extend(bytes);
    }
    file
}

fn notes(entry: u64) -> Vec<u8> {
    let mut notes = Vec::new();
    for (kind, description) in [(6_u32, b"2.6\0".to_vec()), (18, entry.to_le_bytes().to_vec())] {
        notes.extend(4_u32.to_le_bytes());
        notes.extend((description.len() as u32).to_le_bytes());
        notes.extend(kind.to_le_bytes());
        notes.extend(b"Xen\0");
        notes.extend(description);
    }
    notes
}
