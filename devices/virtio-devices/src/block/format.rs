//! Detects the format of a disk image by its signature.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Signature, its offset, and the format's name. Source: the probes of QEMU 10.2's `block/*.c`.
const FORMATS: [(&[u8], usize, &str); 11] = [
    (b"QFI\xfb", 0, QCOW2),
    (b"KDMV", 0, "VMDK"),
    (b"COWD", 0, "VMDK"),
    (b"# Disk DescriptorFile", 0, "VMDK"),
    (b"vhdxfile", 0, "VHDX"),
    // A fixed-size VHD has its signature at the end only, and is otherwise raw.
    (b"conectix", 0, "VHD"),
    (&[0x7f, 0x10, 0xda, 0xbe], 64, "VDI"),
    (b"QED\0", 0, "QED"),
    (b"WithoutFreeSpace", 0, "Parallels"),
    (b"WithouFreSpacExt", 0, "Parallels"),
    (b"Bochs Virtual HD Image", 0, "Bochs"),
];
const QCOW2: &str = "qcow2";
/// Length that includes every signature, bytes.
const HEAD_BYTES: usize = 68;

/// The format whose signature this file has, if any. A file that can't be read has none, and fails later with its error.
pub(super) fn recognized(file: &File) -> Option<&'static str> {
    let mut buffer = [0; HEAD_BYTES];
    let head = read_head(file, &mut buffer);
    let is = |signature: &[u8], at| head.get(at..).is_some_and(|head| head.starts_with(signature));
    FORMATS.iter().find(|(signature, at, _)| is(signature, *at)).map(|(_, _, name)| *name)
}

/// Whether `file` has qcow2's signature.
pub(super) fn is_qcow2(file: &File) -> bool {
    recognized(file) == Some(QCOW2)
}

/// Reads the beginning of a file into `buffer`, as much as it has.
pub(super) fn read_head<'a>(file: &File, buffer: &'a mut [u8]) -> &'a [u8] {
    let mut len = 0;
    while let Some(rest) = buffer.get_mut(len..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, len as u64) {
            Ok(0) => break,
            Ok(count) => len += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    buffer.get(..len).unwrap_or_default()
}
