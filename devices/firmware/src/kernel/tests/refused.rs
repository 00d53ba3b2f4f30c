//! Each user error yields one sentence with the problem and the remedy.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::*;
use crate::image::ImageFile;

fn refusal(kernel: &[u8]) -> String {
    boot(&memory(RAM), kernel, &[], "", BootProtocol::Auto).unwrap_err().to_string()
}

fn patched(mut file: Vec<u8>, offset: usize, bytes: &[u8]) -> Vec<u8> {
    file[offset..offset + bytes.len()].copy_from_slice(bytes);
    file
}

#[track_caller]
fn assert_says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

#[test]
fn files_that_are_no_kernel() {
    assert_says(&refusal(b""), &["is empty"]);
    assert_says(&refusal(b"x"), &["neither a bzImage nor a vmlinux", "give a bzImage"]);
    assert_says(&refusal(&[0x1f, 0x8b, 8, 0]), &["gzip"]);
    assert_says(&refusal(b"070701cpio"), &["cpio archive"]);
    assert_says(&refusal(&vec![0; 8192]), &["neither a bzImage nor a vmlinux"]);
    let mut arm = vec![0; 4096];
    arm[0x38..0x3c].copy_from_slice(b"ARM\x64");
    assert_says(&refusal(&arm), &["ARM64"]);
}

#[test]
fn files_that_are_no_files() {
    let missing = ImageFile::open(Path::new("/nonexistent/vmlinuz"), "kernel").unwrap_err();
    assert_says(&missing.to_string(), &["kernel /nonexistent/vmlinuz can't be opened"]);
    let directory = ImageFile::open(Path::new("/"), "initrd").unwrap_err();
    assert_says(&directory.to_string(), &["initrd / is a directory"]);
    let device = ImageFile::open(Path::new("/dev/null"), "kernel").unwrap_err();
    assert_says(&device.to_string(), &["not a regular file"]);
}

#[test]
fn a_file_is_read_like_bytes_and_one_that_shrinks_is_an_error() {
    let path: PathBuf = std::env::temp_dir().join(format!("firmware-test-{}", std::process::id()));
    File::create(&path).unwrap().write_all(&bzimage()).unwrap();
    let file = ImageFile::open(&path, "kernel").unwrap();
    let memory = memory(RAM);
    let files = BootFiles { kernel: &file, initrds: &[], command_line: "", protocol: BootProtocol::Auto };
    let loaded = load(&memory, &ram(RAM), &files, Contents::Zeroes, RSDP).unwrap();
    assert_eq!(bytes_at(&memory, loaded.kernel.start, 4096), vec![0x90; 4096]);

    File::options().write(true).open(&path).unwrap().set_len(5000).unwrap();
    let error = load(&memory, &ram(RAM), &files, Contents::Zeroes, RSDP).unwrap_err();
    std::fs::remove_file(&path).unwrap();
    assert_says(&error.to_string(), &["can't be read at byte 2560"]);
}

#[test]
fn damaged_bzimages() {
    let good = bzimage();
    assert_says(&refusal(&good[..5000]), &["truncated", "6656", "5000"]);
    assert_says(&refusal(&good[..0x220]), &["truncated", "setup header"]);
    assert_says(&refusal(&patched(good.clone(), 0x1fe, &[0, 0])), &["boot flag is 0x0000"]);
    assert_says(&refusal(&patched(good.clone(), 0x206, &[6, 2])), &["older than version 2.12"]);
    assert_says(&refusal(&patched(good.clone(), 0x236, &[0, 0])), &["32-bit x86"]);
    assert_says(&refusal(&patched(good.clone(), 0x211, &[0])), &["zImage"]);
    assert_says(&refusal(&patched(good.clone(), 0x1f4, &[1, 0, 0, 0])), &["only 16 bytes"]);
    assert_says(&refusal(&patched(good.clone(), 0x230, &[3, 0, 0, 0])), &["alignment 0x3"]);
    assert_says(&refusal(&patched(good.clone(), 0x258, &[0xff; 8])), &["out of range"]);
    assert_says(&refusal(&patched(good.clone(), 0x258, &[0, 0, 0, 0, 1, 0, 0, 0])), &["must lie below"]);
    let low = patched(patched(good.clone(), 0x234, &[0]), 0x258, &[0; 8]);
    assert_says(&refusal(&low), &["where boot structures lie"]);
    let error = boot(&memory(RAM), &good, &[], "", BootProtocol::Pvh).unwrap_err().to_string();
    assert_says(&error, &["PVH", "give the vmlinux"]);
}

#[test]
fn damaged_vmlinuxes() {
    let good = vmlinux();
    assert_says(&refusal(&good[..40]), &["truncated", "ELF header"]);
    assert_says(&refusal(&good[..100]), &["truncated", "program header table"]);
    assert_says(&refusal(&good[..1000]), &["truncated", "a segment"]);
    assert_says(&refusal(&patched(good.clone(), 18, &[3, 0])), &["32-bit x86"]);
    assert_says(&refusal(&patched(good.clone(), 18, &[183, 0])), &["ARM64"]);
    assert_says(&refusal(&patched(good.clone(), 4, &[1])), &["ELF class 1"]);
    assert_says(&refusal(&patched(good.clone(), 5, &[2])), &["byte order 2"]);
    assert_says(&refusal(&patched(good.clone(), 16, &[3, 0])), &["ELF type is 3"]);
    assert_says(&refusal(&patched(good.clone(), 56, &[0, 0])), &["0 program headers"]);
    assert_says(&refusal(&patched(good.clone(), 56, &[0xff, 0xff])), &["65535 program headers"]);
    // File size above memory size, in the first program header.
    assert_says(&refusal(&patched(good.clone(), 64 + 40, &[1, 0])), &["0xbb8 bytes in the file and 0x1"]);
    assert_says(&refusal(&patched(good.clone(), 64 + 24, &[0xff; 8])), &["beyond the address space"]);
    assert_says(&refusal(&patched(good.clone(), 64 + 8, &[0xff; 8])), &["file offset 0xffffffffffffffff"]);
    assert_says(&refusal(&patched(good.clone(), 64 + 24, &0x1000u64.to_le_bytes())), &["boot structures"]);
    let overlap = patched(good.clone(), 64 + 56 + 24, &(KERNEL_AT + 8).to_le_bytes());
    assert_says(&refusal(&overlap), &["overlap"]);
    let mut bad_note = good.clone();
    let entry_at = bad_note.len() - 8;
    bad_note[entry_at..].copy_from_slice(&(1u64 << 40).to_le_bytes());
    assert_says(&refusal(&bad_note), &["PVH entry note"]);
    bad_note[entry_at..].copy_from_slice(&0x10u64.to_le_bytes());
    assert_says(&refusal(&bad_note), &["entry point 0x10 lies outside"]);
    let no_note = elf(&[ElfSegment { kind: 1, address: KERNEL_AT, bytes: vec![0x90], memory: 1 }]);
    let error = boot(&memory(RAM), &no_note, &[], "", BootProtocol::Pvh).unwrap_err().to_string();
    assert_says(&error, &["no PVH entry note"]);
}

/// Found by the fuzz target `kernel_loader`: the loader accepted a segment in RAM above the PCI hole.
#[test]
fn a_segment_above_the_hole_is_refused_even_where_there_is_ram() {
    let (low, high) = (64 * MIB, MIB);
    let regions = [(GuestAddress(0), low), (GuestAddress(layout::HIGH_RAM_START), high)];
    let regions = regions.map(|(start, len)| (start, usize::try_from(len).unwrap()));
    let memory = GuestMemory::from_ranges(&regions).unwrap();
    let ram = [(0, low), (layout::HIGH_RAM_START, high)]
        .map(|(start, len)| RamRange { range: AddressRange { start, len }, node: 0 });
    let kernel = patched(vmlinux(), 64 + 56 + 24, &layout::HIGH_RAM_START.to_le_bytes());
    let kernel = ImageBytes(&kernel);
    let files = BootFiles { kernel: &kernel, initrds: &[], command_line: "", protocol: BootProtocol::Auto };
    let error = load(&memory, &ram, &files, Contents::Zeroes, RSDP).unwrap_err().to_string();
    assert_says(&error, &["kernels must lie below 0xc0000000"]);
}

#[test]
fn what_does_not_fit_says_how_much_memory_would_do() {
    // 16 MiB to 16 MiB + 60 MiB, and 64 MiB of RAM.
    let big = patched(bzimage(), 0x260, &(60u32 << 20).to_le_bytes());
    assert_says(&refusal(&big), &["RAM there ends at 0x4000000", "at least 76 MiB"]);
    let initrd = vec![1; 50 << 20];
    let error = boot(&memory(RAM), &bzimage(), &[&initrd], "", BootProtocol::Auto).unwrap_err();
    assert_says(&error.to_string(), &["initrd", "at least 68 MiB"]);
    let error = boot(&memory(RAM), &bzimage(), &[b""], "", BootProtocol::Auto).unwrap_err();
    assert_says(&error.to_string(), &["initrd", "is empty"]);
}

#[test]
fn command_lines() {
    let with = |text: &str| boot(&memory(RAM), &bzimage(), &[], text, BootProtocol::Auto);
    assert!(with(&"x".repeat(2047)).is_ok());
    assert_says(&with(&"x".repeat(2048)).unwrap_err().to_string(), &["2048 bytes", "2047 at most"]);
    assert_says(&with("a\0b").unwrap_err().to_string(), &["NUL at byte 1"]);
}

#[test]
fn memory_that_is_not_there_or_too_small() {
    let kernel = bzimage();
    let kernel = ImageBytes(&kernel);
    let files = BootFiles { kernel: &kernel, initrds: &[], command_line: "", protocol: BootProtocol::Auto };
    let attempt = |size: u64, ram: &[RamRange]| {
        load(&memory(size), ram, &files, Contents::Zeroes, RSDP).unwrap_err().to_string()
    };
    assert_says(&attempt(8 * MIB, &ram(8 * MIB)), &["first 16 MiB must be RAM"]);
    assert_says(&attempt(32 * MIB, &ram(64 * MIB)), &["are not guest memory"]);
    assert_says(&attempt(32 * MIB, &[]), &["must be RAM"]);
    let twice = [ram(32 * MIB), ram(32 * MIB)].concat();
    assert_says(&attempt(64 * MIB, &twice), &["overlaps"]);
}
