/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What client and server of mmblk say to each other; explained in docs/reference/neighbours.md. Version 1. All numbers are
 * little-endian. What is reserved is 0, and refused otherwise, so that it can get a meaning later.
 *
 * The first part of every message is one of the structures below, as long as it is, in the sender's memory. It is copied once and
 * only the copy is looked at. The parts behind it are data.
 */
#ifndef MMBLK_WIRE_H
#define MMBLK_WIRE_H

#include <linux/build_bug.h>
#include <linux/types.h>

#define MMBLK_MAGIC	0x4b4c424du	/* MBLK in memory order */
#define MMBLK_VERSION	1

/* Addresses and lengths of data are multiples of this many bytes; sizes and offsets on the device of its logical block. */
#define MMBLK_ALIGN	512u
/* Data parts of one message: the first part is the structure. */
#define MMBLK_DATA_PARTS (CW_NB_MOST_PARTS - 1)
#define MMBLK_NAME	64
#define MMBLK_MOST_QUEUES 64
#define MMBLK_MOST_DEPTH 1024
#define MMBLK_MOST_BYTES 0x100000u

/* NEIGH_PROTO_BLK_REQUEST: client to server. */
#define MMBLK_ATTACH	1	/* struct mmblk_attach; note: the client's number for the device */
#define MMBLK_DETACH	2	/* struct mmblk_detach; note: session */
#define MMBLK_COMMAND	3	/* struct mmblk_command, data of a write; note: session */

/* NEIGH_PROTO_BLK_REPLY: server to client. note: the client's number for the device. */
#define MMBLK_ATTACHED	1	/* struct mmblk_attached; before the ATTACH comes back */
#define MMBLK_DATA	2	/* struct mmblk_data, data that was read; before the COMMAND comes back with MMBLK_OK */
#define MMBLK_RESIZED	3	/* struct mmblk_attached with another size */
#define MMBLK_ENDED	4	/* struct mmblk_ended: the server has ended the session */

/* Statuses of completions. */
enum mmblk_status {
	MMBLK_OK = 0,
	MMBLK_IO = 1,		/* the device that is exported says so */
	MMBLK_NOSPC = 2,
	MMBLK_READONLY = 3,
	MMBLK_UNSUPPORTED = 4,
	MMBLK_RANGE = 5,	/* beyond the end, or not whole blocks */
	MMBLK_PROTOCOL = 6,	/* the message is not as it must be */
	MMBLK_SESSION = 7,	/* there is no such session (any more) */
	MMBLK_NOEXPORT = 8,	/* no export of that name, or not for this client */
	MMBLK_BAD_VERSION = 9,
	MMBLK_BUSY = 10,	/* no room for it now; try again */
	MMBLK_MEDIUM = 11,
	MMBLK_TIMEOUT = 12,
};

enum mmblk_op {
	MMBLK_READ = 0,
	MMBLK_WRITE = 1,
	MMBLK_FLUSH = 2,	/* what was completed before is durable afterwards; offset and bytes 0 */
	MMBLK_DISCARD = 3,	/* contents are undefined afterwards */
	MMBLK_ZEROES = 4,	/* contents are zeros afterwards */
};

/* Flags of a command. */
#define MMBLK_F_FUA	0x1	/* WRITE, ZEROES: durable before it is completed */
#define MMBLK_F_NOUNMAP	0x2	/* ZEROES: keep the space */

/* Features. A client offers what it can, the server answers with what both can and the export does. */
#define MMBLK_FEAT_FLUSH	0x01ull	/* there is a cache: FLUSH is needed; FUA is understood */
#define MMBLK_FEAT_DISCARD	0x02ull
#define MMBLK_FEAT_ZEROES	0x04ull
#define MMBLK_FEAT_ALL		0x07ull

/* Flags of an export. */
#define MMBLK_EXPORT_READONLY	0x1
#define MMBLK_EXPORT_STABLE	0x2	/* pages must not change while they are being written (checksums, parity) */
#define MMBLK_EXPORT_ROTATES	0x4
/* What was completed and not flushed is lost when the serving VM dies: another instance afterwards means that it may be lost. */
#define MMBLK_EXPORT_VOLATILE	0x8
#define MMBLK_EXPORT_ALL	0xf

struct mmblk_attach {
	__le32 magic;
	__le16 version;
	__le16 queues;		/* as many as the client would use, 1 to MMBLK_MOST_QUEUES */
	__le64 features;
	__le16 depth;		/* commands per queue */
	__le16 reserved;
	__le32 most_bytes;	/* of one command's data */
	u8 export[MMBLK_NAME];	/* filled up with zeros */
	__le64 reserved2;
};

struct mmblk_attached {
	__le32 magic;
	__le16 version;
	__le16 queues;		/* as many as were asked for, or fewer */
	__le64 features;
	__le16 depth;
	__le16 reserved;
	__le32 most_bytes;
	__le32 session;
	__le32 flags;
	__le64 bytes;		/* size of the device */
	u8 instance[16];	/* another one each time the export begins to be served */
	__le32 logical_block;	/* bytes, powers of two, 512 and more; for physical blocks likewise */
	__le32 physical_block;
	__le32 io_min;
	__le32 io_opt;
	__le32 most_discard;	/* bytes, as the two below; 0: not at all */
	__le32 discard_granularity;
	__le32 most_zeroes;
	__le32 reserved2;
};

struct mmblk_detach {
	__le32 magic;
	__le32 session;
};

struct mmblk_command {
	u8 op;
	u8 flags;
	__le16 queue;		/* which of the session's queues */
	__le32 bytes;
	__le64 offset;		/* bytes */
	__le64 tag;		/* the client's own, comes back in struct mmblk_data */
	__le64 reserved;
};

struct mmblk_data {
	__le64 tag;
	__le32 offset;		/* within the command's data, bytes */
	__le32 bytes;		/* of the parts behind this */
};

struct mmblk_ended {
	__le32 magic;
	__le32 session;
};

static_assert(sizeof(struct mmblk_attach) == 96);
static_assert(sizeof(struct mmblk_attached) == 88);
static_assert(sizeof(struct mmblk_detach) == 8);
static_assert(sizeof(struct mmblk_command) == 32);
static_assert(sizeof(struct mmblk_data) == 16);
static_assert(sizeof(struct mmblk_ended) == 8);

#endif
