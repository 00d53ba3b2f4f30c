/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/* Neighbours: the PCI function, and the segment of a pair. Made by devices/neighbour/tests/c_header.rs; explained in
 * docs/design/specs/neighbours-abi.md. All numbers are little-endian. */
#ifndef CAUSEWAY_NEIGHBOUR_H
#define CAUSEWAY_NEIGHBOUR_H

#ifdef __KERNEL__
#include <linux/build_bug.h>
#include <linux/types.h>
#else
#include <stdint.h>
typedef uint16_t __le16;
typedef uint32_t __le32;
typedef uint64_t __le64;
#endif

/* PCI function */
#define CW_NB_VENDOR 0x1af4ULL
#define CW_NB_DEVICE 0x10f5ULL
#define CW_NB_BAR_REGISTERS 0x0ULL
#define CW_NB_BAR_SEGMENTS 0x2ULL
#define CW_NB_BAR_MSIX 0x4ULL
#define CW_NB_REGISTER_MAGIC_VALUE 0x424e5743ULL
#define CW_NB_REGISTER_VERSION_VALUE 0x2ULL
#define CW_NB_MAX_SLOTS 0x40ULL
#define CW_NB_MAX_EXTENTS 0x4ULL

/* Registers in BAR 0 */
#define CW_NB_REGISTER_MAGIC 0x0ULL
#define CW_NB_REGISTER_VERSION 0x4ULL
#define CW_NB_OWN_SLOT 0x8ULL
#define CW_NB_SLOTS 0xcULL
#define CW_NB_BASE 0x10ULL
#define CW_NB_STRIDE 0x18ULL
#define CW_NB_ENTRIES 0x20ULL
#define CW_NB_SEGMENT_STRIDE 0x24ULL
#define CW_NB_HEARTBEAT_MS 0x28ULL
#define CW_NB_DRIVER 0x2cULL
#define CW_NB_CHANGED 0x30ULL
#define CW_NB_DISCARDED 0x38ULL
#define CW_NB_DOORBELLS 0x3000ULL
#define CW_NB_DOORBELL_STRIDE 0x8ULL
#define CW_NB_COMMON 0x2400ULL
#define CW_NB_COMMON_STRIDE 0x8ULL
#define CW_NB_PEERS 0x4000ULL
#define CW_NB_PEER_STRIDE 0x100ULL

/* In the block of a peer */
#define CW_NB_PEER_STATE 0x0ULL
#define CW_NB_PEER_EPOCH 0x4ULL
#define CW_NB_PEER_WINDOW 0x8ULL
#define CW_NB_PEER_EXTENTS 0x10ULL
#define CW_NB_PEER_RELEASE 0x14ULL
#define CW_NB_PEER_REASON 0x18ULL
#define CW_NB_PEER_EXTENT 0x20ULL
#define CW_NB_PEER_KEEP 0x1cULL
#define CW_NB_PEER_NAME 0x60ULL
#define CW_NB_PEER_NAME_SIZE 0x40ULL
#define CW_NB_PEER_MAC 0xa0ULL
#define CW_NB_PEER_NONE 0x0ULL
#define CW_NB_PEER_OFFERED 0x1ULL
#define CW_NB_PEER_GONE 0x2ULL
#define CW_NB_REASON_LEFT 0x1ULL
#define CW_NB_REASON_SILENT 0x2ULL
#define CW_NB_REASON_HUNG 0x3ULL
#define CW_NB_REASON_OWN 0x4ULL
#define CW_NB_REASON_GIVEN_UP 0x5ULL
#define CW_NB_REASON_REGISTRY 0x6ULL

/* Segment: offsets in bytes; within a direction from DIRECTIONS on */
#define CW_NB_MAGIC 0x42484749454e5743ULL
#define CW_NB_VERSION 0x1ULL
#define CW_NB_READY 0x100ULL
#define CW_NB_READY_STRIDE 0x80ULL
#define CW_NB_DIRECTIONS 0x1000ULL
#define CW_NB_TAKEN 0x0ULL
#define CW_NB_RECEIVER_SLEEPS 0x80ULL
#define CW_NB_SENDER_SLEEPS 0x100ULL
#define CW_NB_MESSAGES 0x200ULL
#define CW_NB_LEAST_ENTRIES 0x8ULL
#define CW_NB_MOST_ENTRIES 0x4000ULL
#define CW_NB_MOST_PARTS 0x20ULL
#define CW_NB_FLAG_MORE 0x1ULL
#define CW_NB_STATUS_UNREACHABLE 0xffff0003ULL

struct cw_nb_header {
	__le64 magic;
	__le32 version;
	__le32 entries;
	__le64 epoch;
	__le64 base;
	__le64 stride;
	__le32 slots[2];
	__le64 size;
};

struct cw_nb_message {
	__le64 address;
	__le32 length;
	__le16 flags;
	__le16 kind;
	__le32 id;
	__le32 note;
	__le64 stamp; /* written last: epoch << 32 | (uint32_t)(number + 1) */
};

struct cw_nb_completion {
	__le32 id;
	__le32 status;
	__le64 stamp;
};

/* Bytes of one direction, and of the whole segment, with rings of this many entries. */
#define CW_NB_DIRECTION_SIZE(entries) \
	((CW_NB_MESSAGES + (unsigned long long)(entries) * \
	  (sizeof(struct cw_nb_message) + sizeof(struct cw_nb_completion)) + 4095) & ~4095ULL)
#define CW_NB_SEGMENT_SIZE(entries) (CW_NB_DIRECTIONS + 2 * CW_NB_DIRECTION_SIZE(entries))
#define CW_NB_STAMP(epoch, number) ((unsigned long long)(epoch) << 32 | (unsigned int)((number) + 1))

_Static_assert(__builtin_offsetof(struct cw_nb_header, magic) == 0, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_header, version) == 8, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_header, entries) == 12, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_header, epoch) == 16, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_header, base) == 24, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_header, stride) == 32, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_header, slots) == 40, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_header, size) == 48, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_message, address) == 0, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_message, length) == 8, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_message, flags) == 12, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_message, kind) == 14, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_message, id) == 16, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_message, note) == 20, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_message, stamp) == 24, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_completion, status) == 4, "layout");
_Static_assert(__builtin_offsetof(struct cw_nb_completion, stamp) == 8, "layout");
_Static_assert(sizeof(struct cw_nb_message) == 32, "layout");
_Static_assert(sizeof(struct cw_nb_completion) == 16, "layout");
_Static_assert(CW_NB_SEGMENT_SIZE(8) == 12288, "layout");
_Static_assert(CW_NB_SEGMENT_SIZE(1024) == 110592, "layout");
_Static_assert(CW_NB_SEGMENT_SIZE(16384) == 1585152, "layout");

#endif
