//! bzImage: a setup header, then the compressed kernel (Linux Documentation/arch/x86/boot.rst).

use linux_loader::loader::bootparam::setup_header;
use machine::memory::ByteValued;

use super::{BootProtocol, KernelError, KernelFormat, Plan, Segment};
use crate::image::Image;
use crate::layout;
use crate::ranges::AddressRange;

/// Offset of the setup header in the file and in `boot_params`.
pub(super) const HEADER_OFFSET: usize = 0x1f1;
const MAGIC_OFFSET: usize = 0x202;
const MAGIC: [u8; 4] = *b"HdrS";
const BOOT_FLAG: u16 = 0xaa55;
const SECTOR: u64 = 512;
/// Sectors of real-mode code if `setup_sects` is 0.
const DEFAULT_SETUP_SECTORS: u8 = 4;
/// 2.12 introduced `xloadflags`, which tells whether there is a 64-bit entry.
const OLDEST_PROTOCOL: u16 = 0x020c;
/// `loadflags`: the protected-mode code belongs at 1 MiB or above.
const LOADED_HIGH: u8 = 1 << 0;
/// `xloadflags`: there is a 64-bit entry point.
const XLF_KERNEL_64: u16 = 1 << 0;
/// `xloadflags`: kernel, parameters and initrd may lie above 4 GiB.
const XLF_CAN_BE_LOADED_ABOVE_4G: u16 = 1 << 1;
/// Offset of the 64-bit entry in the protected-mode code.
const ENTRY_64: u64 = 0x200;

/// Returns whether the file has a setup header.
pub(super) fn matches(head: &[u8]) -> bool {
    head.get(MAGIC_OFFSET..MAGIC_OFFSET + MAGIC.len()) == Some(&MAGIC)
}

/// Reads the setup header from the start of the file, and checks that this program can boot such a kernel.
fn read_header(image: &dyn Image, head: &[u8], protocol: BootProtocol) -> Result<setup_header, KernelError> {
    let malformed = |what: String| KernelError::Malformed { name: image.name(), what };
    if protocol == BootProtocol::Pvh {
        return Err(KernelError::Protocol {
            name: image.name(),
            protocol: "PVH",
            why: "it is a bzImage; give the vmlinux",
        });
    }
    let header_end = HEADER_OFFSET + size_of::<setup_header>();
    let Some(bytes) = head.get(HEADER_OFFSET..header_end) else {
        return Err(KernelError::Truncated {
            name: image.name(),
            what: "its setup header",
            needed: header_end as u64,
            have: image.len(),
        });
    };
    let mut header = setup_header::default();
    header.as_mut_slice().copy_from_slice(bytes);
    // Fields of a packed structure are copied, never borrowed.
    let (flag, version, xloadflags) = (header.boot_flag, header.version, header.xloadflags);
    if flag != BOOT_FLAG {
        return Err(malformed(format!("its boot flag is {flag:#06x} instead of {BOOT_FLAG:#06x}")));
    }
    if version < OLDEST_PROTOCOL {
        return Err(KernelError::Protocol {
            name: image.name(),
            protocol: "the Linux 64-bit protocol",
            why: "its setup header is older than version 2.12 (Linux 3.8)",
        });
    }
    if xloadflags & XLF_KERNEL_64 == 0 {
        return Err(KernelError::WrongMachine { name: image.name(), machine: "32-bit x86".to_owned() });
    }
    if header.loadflags & LOADED_HIGH == 0 {
        return Err(malformed("it is a zImage, which loads below 1 MiB".to_owned()));
    }
    Ok(header)
}

/// Parses the header; `head` is the start of the file.
pub(super) fn plan(image: &dyn Image, head: &[u8], protocol: BootProtocol) -> Result<Plan, KernelError> {
    let malformed = |what: String| KernelError::Malformed { name: image.name(), what };
    let header = read_header(image, head, protocol)?;
    let sectors = if header.setup_sects == 0 { DEFAULT_SETUP_SECTORS } else { header.setup_sects };
    let file_offset = (u64::from(sectors) + 1) * SECTOR;
    // In units of 16 bytes, rounded up: the last unit may be incomplete.
    let syssize = header.syssize;
    let code_len = u64::from(syssize) * 16;
    if code_len <= ENTRY_64 {
        return Err(malformed(format!("its code is only {code_len} bytes long")));
    }
    let available = image.len().saturating_sub(file_offset);
    if available + 15 < code_len {
        return Err(KernelError::Truncated {
            name: image.name(),
            what: "its compressed kernel",
            needed: file_offset + code_len,
            have: image.len(),
        });
    }
    let file_len = code_len.min(available);

    let (preferred, alignment) = (header.pref_address, u64::from(header.kernel_alignment));
    let start = if header.relocatable_kernel != 0 {
        if !alignment.is_power_of_two() {
            return Err(malformed(format!("its alignment {alignment:#x} is not a power of two")));
        }
        // Only at or above its preferred address: below it the kernel would relocate itself upwards, over an initrd.
        preferred.max(layout::KERNEL_MINIMUM).checked_next_multiple_of(alignment)
    } else {
        Some(preferred)
    };
    let size = u64::from(header.init_size).max(code_len);
    let Some(start) = start.filter(|start| start.checked_add(size).is_some()) else {
        return Err(malformed(format!("its preferred address {preferred:#x} is out of range")));
    };
    let kernel = AddressRange { start, len: size };
    Ok(Plan {
        format: KernelFormat::BzImage,
        protocol: BootProtocol::Linux64,
        segments: vec![Segment { file_offset, file_len, range: kernel, zero_rest: false }],
        kernel,
        entry: start + ENTRY_64,
        header: Some(header),
        command_line_max: u64::from(header.cmdline_size),
        initrd_end_max: u64::from(header.initrd_addr_max) + 1,
        initrd_above_4g: header.xloadflags & XLF_CAN_BE_LOADED_ABOVE_4G != 0,
    })
}
