//! `include/causeway_neighbour.h` is generated here from the Rust constants. After a change of the layout, run this test with
//! `CAUSEWAY_WRITE_HEADER=1` and commit the file. Offsets may only change together with the version.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use neighbour::layout as l;
use neighbour::registers as r;
use neighbour::window;

fn header() -> String {
    let mut text = String::from(
        "/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */\n\
         /* Neighbours: the PCI function, and the segment of a pair. Made by devices/neighbour/tests/c_header.rs; explained in\n \
         * docs/design/specs/neighbours-abi.md. All numbers are little-endian. */\n\
         #ifndef CAUSEWAY_NEIGHBOUR_H\n#define CAUSEWAY_NEIGHBOUR_H\n\n\
         #ifdef __KERNEL__\n#include <linux/build_bug.h>\n#include <linux/types.h>\n#else\n#include <stdint.h>\n\
         typedef uint16_t __le16;\ntypedef uint32_t __le32;\ntypedef uint64_t __le64;\n#endif\n",
    );
    let mut group = |title: &str, values: &[(&str, u64)]| {
        let _ = writeln!(text, "\n/* {title} */");
        for (name, value) in values {
            let _ = writeln!(text, "#define CW_NB_{name} {value:#x}ULL");
        }
    };
    group(
        "PCI function",
        &[
            ("VENDOR", r::VENDOR.into()),
            ("DEVICE", r::DEVICE.into()),
            ("BAR_REGISTERS", r::BAR_REGISTERS.into()),
            ("BAR_SEGMENTS", r::BAR_SEGMENTS.into()),
            ("BAR_MSIX", r::BAR_MSIX.into()),
            ("REGISTER_MAGIC_VALUE", r::MAGIC.into()),
            ("REGISTER_VERSION_VALUE", r::VERSION.into()),
            ("MAX_SLOTS", window::MAX_SLOTS.into()),
            ("MAX_EXTENTS", window::MAX_EXTENTS as u64),
        ],
    );
    group(
        "Registers in BAR 0",
        &[
            ("REGISTER_MAGIC", r::REGISTER_MAGIC),
            ("REGISTER_VERSION", r::REGISTER_VERSION),
            ("OWN_SLOT", r::OWN_SLOT),
            ("SLOTS", r::SLOTS),
            ("BASE", r::BASE),
            ("STRIDE", r::STRIDE),
            ("ENTRIES", r::ENTRIES),
            ("SEGMENT_STRIDE", r::SEGMENT_STRIDE),
            ("HEARTBEAT_MS", r::HEARTBEAT_MS),
            ("DRIVER", r::DRIVER),
            ("CHANGED", r::CHANGED),
            ("DISCARDED", r::DISCARDED),
            ("DOORBELLS", r::DOORBELLS),
            ("DOORBELL_STRIDE", r::DOORBELL_STRIDE),
            ("COMMON", r::COMMON),
            ("COMMON_STRIDE", r::COMMON_STRIDE),
            ("PEERS", r::PEERS),
            ("PEER_STRIDE", r::PEER_STRIDE),
        ],
    );
    group(
        "In the block of a peer",
        &[
            ("PEER_STATE", r::PEER_STATE),
            ("PEER_EPOCH", r::PEER_EPOCH),
            ("PEER_WINDOW", r::PEER_WINDOW),
            ("PEER_EXTENTS", r::PEER_EXTENTS),
            ("PEER_RELEASE", r::PEER_RELEASE),
            ("PEER_REASON", r::PEER_REASON),
            ("PEER_EXTENT", r::PEER_EXTENT),
            ("PEER_KEEP", r::PEER_KEEP),
            ("PEER_NAME", r::PEER_NAME),
            ("PEER_NAME_SIZE", r::PEER_NAME_SIZE as u64),
            ("PEER_MAC", r::PEER_MAC),
            ("PEER_NONE", r::PEER_NONE.into()),
            ("PEER_OFFERED", r::PEER_OFFERED.into()),
            ("PEER_GONE", r::PEER_GONE.into()),
            ("REASON_LEFT", r::reason::LEFT.into()),
            ("REASON_SILENT", r::reason::SILENT.into()),
            ("REASON_HUNG", r::reason::HUNG.into()),
            ("REASON_OWN", r::reason::OWN.into()),
            ("REASON_GIVEN_UP", r::reason::GIVEN_UP.into()),
            ("REASON_REGISTRY", r::reason::REGISTRY.into()),
        ],
    );
    group(
        "Segment: offsets in bytes; within a direction from DIRECTIONS on",
        &[
            ("MAGIC", l::MAGIC),
            ("VERSION", l::VERSION.into()),
            ("READY", l::READY as u64),
            ("READY_STRIDE", l::READY_STRIDE as u64),
            ("DIRECTIONS", l::DIRECTIONS as u64),
            ("TAKEN", l::TAKEN as u64),
            ("RECEIVER_SLEEPS", l::RECEIVER_SLEEPS as u64),
            ("SENDER_SLEEPS", l::SENDER_SLEEPS as u64),
            ("MESSAGES", l::MESSAGES as u64),
            ("LEAST_ENTRIES", l::LEAST_ENTRIES.into()),
            ("MOST_ENTRIES", l::MOST_ENTRIES.into()),
            ("MOST_PARTS", l::MOST_PARTS as u64),
            ("FLAG_MORE", l::FLAG_MORE.into()),
            ("STATUS_UNREACHABLE", neighbour::channel::STATUS_UNREACHABLE.into()),
        ],
    );
    text.push_str(
        "\nstruct cw_nb_header {\n\t__le64 magic;\n\t__le32 version;\n\t__le32 entries;\n\t__le64 epoch;\n\t__le64 base;\n\
         \t__le64 stride;\n\t__le32 slots[2];\n\t__le64 size;\n};\n\n\
         struct cw_nb_message {\n\t__le64 address;\n\t__le32 length;\n\t__le16 flags;\n\t__le16 kind;\n\t__le32 id;\n\
         \t__le32 note;\n\t__le64 stamp; /* written last: epoch << 32 | (uint32_t)(number + 1) */\n};\n\n\
         struct cw_nb_completion {\n\t__le32 id;\n\t__le32 status;\n\t__le64 stamp;\n};\n\n\
         /* Bytes of one direction, and of the whole segment, with rings of this many entries. */\n\
         #define CW_NB_DIRECTION_SIZE(entries) \\\n\
         \t((CW_NB_MESSAGES + (unsigned long long)(entries) * \\\n\
         \t  (sizeof(struct cw_nb_message) + sizeof(struct cw_nb_completion)) + 4095) & ~4095ULL)\n\
         #define CW_NB_SEGMENT_SIZE(entries) (CW_NB_DIRECTIONS + 2 * CW_NB_DIRECTION_SIZE(entries))\n\
         #define CW_NB_STAMP(epoch, number) ((unsigned long long)(epoch) << 32 | (unsigned int)((number) + 1))\n\n",
    );
    let mut check = |condition: String| {
        let _ = writeln!(text, "_Static_assert({condition}, \"layout\");");
    };
    for (field, offset) in [
        ("header, magic", l::HEADER_MAGIC),
        ("header, version", l::HEADER_VERSION_ENTRIES),
        ("header, entries", l::HEADER_VERSION_ENTRIES + 4),
        ("header, epoch", l::HEADER_EPOCH),
        ("header, base", l::HEADER_BASE),
        ("header, stride", l::HEADER_STRIDE),
        ("header, slots", l::HEADER_SLOTS),
        ("header, size", l::HEADER_SIZE),
        ("message, address", 0),
        ("message, length", 8),
        ("message, flags", 12),
        ("message, kind", 14),
        ("message, id", 16),
        ("message, note", 20),
        ("message, stamp", l::MESSAGE_SIZE - 8),
        ("completion, status", 4),
        ("completion, stamp", l::COMPLETION_SIZE - 8),
    ] {
        check(format!("__builtin_offsetof(struct cw_nb_{field}) == {offset}"));
    }
    check(format!("sizeof(struct cw_nb_message) == {}", l::MESSAGE_SIZE));
    check(format!("sizeof(struct cw_nb_completion) == {}", l::COMPLETION_SIZE));
    for entries in [8, 1024, 16384] {
        let size = l::Layout::new(entries).map_or(0, |layout| layout.size());
        check(format!("CW_NB_SEGMENT_SIZE({entries}) == {size}"));
    }
    text.push_str("\n#endif\n");
    text
}

fn path() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include/causeway_neighbour.h")
}

#[test]
fn the_c_header_is_what_the_constants_say() {
    let wanted = header();
    if std::env::var_os("CAUSEWAY_WRITE_HEADER").is_some() {
        std::fs::write(path(), &wanted).unwrap();
    }
    let found = std::fs::read_to_string(path()).unwrap();
    assert!(
        found == wanted,
        "{} is out of date; run this test with CAUSEWAY_WRITE_HEADER=1",
        path().display()
    );
}

/// A C compiler accepts the header's own assertions: offsets, sizes, and the sizes of whole segments.
#[test]
fn a_c_compiler_agrees() {
    let Ok(output) = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c"])
        .arg(path())
        .output()
    else {
        facilities::missing(facilities::Facility::Cc, "the header's assertions are not checked");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
