/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Messages between client and server of mmblk, version 1; explained in docs/design/specs/neighbours-abi.md. All
 * numbers are little-endian. Reserved fields are 0, and refused otherwise, so that they can get a meaning later.
 *
 * The first part of every message is exactly one of the structures below, in the sender's memory. The receiver copies it once,
 * and reads only the copy. The other parts are data.
 */
#ifndef MMBLK_WIRE_H
#define MMBLK_WIRE_H

#include <linux/build_bug.h>
#include <linux/types.h>

#define MMBLK_MAGIC	0x4b4c424du	/* MBLK in memory order */
#define MMBLK_VERSION	1

/* Alignment of addresses and lengths of data, bytes. Sizes and offsets on the device are aligned to its logical block. */
#define MMBLK_ALIGN	512u
/* Data parts of one message: all parts except the first. */
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
	MMBLK_IO = 1,		/* the exported device reports an error */
	MMBLK_NOSPC = 2,
	MMBLK_READONLY = 3,
	MMBLK_UNSUPPORTED = 4,
	MMBLK_RANGE = 5,	/* beyond the end, or not whole blocks */
	MMBLK_PROTOCOL = 6,	/* the message is malformed */
	MMBLK_SESSION = 7,	/* the session doesn't exist (any more) */
	MMBLK_NOEXPORT = 8,	/* no export has that name, or not for this client */
	MMBLK_BAD_VERSION = 9,
	MMBLK_BUSY = 10,	/* no room now; retry */
	MMBLK_MEDIUM = 11,
	MMBLK_TIMEOUT = 12,
};

enum mmblk_op {
	MMBLK_READ = 0,
	MMBLK_WRITE = 1,
	MMBLK_FLUSH = 2,	/* makes completed writes durable; offset and bytes 0 */
	MMBLK_DISCARD = 3,	/* makes contents undefined */
	MMBLK_ZEROES = 4,	/* sets contents to zeros */
};

/* Flags of a command. */
#define MMBLK_F_FUA	0x1	/* WRITE, ZEROES: durable before it is completed */
#define MMBLK_F_NOUNMAP	0x2	/* ZEROES: keep the space */

/* Features. A client offers those that it supports, and the server answers with those that both and the export support. */
#define MMBLK_FEAT_FLUSH	0x01ull	/* there is a cache: FLUSH is needed; FUA is supported */
#define MMBLK_FEAT_DISCARD	0x02ull
#define MMBLK_FEAT_ZEROES	0x04ull
#define MMBLK_FEAT_ALL		0x07ull

/* Flags of an export. */
#define MMBLK_EXPORT_READONLY	0x1
#define MMBLK_EXPORT_STABLE	0x2	/* pages must not change during a write (checksums, parity) */
#define MMBLK_EXPORT_ROTATES	0x4
/* Completed writes that aren't flushed are lost when the server's VM dies: another instance means that they may be lost. */
#define MMBLK_EXPORT_VOLATILE	0x8
#define MMBLK_EXPORT_ALL	0xf

struct mmblk_attach {
	__le32 magic;
	__le16 version;
	__le16 queues;		/* queues that the client would use, 1 to MMBLK_MOST_QUEUES */
	__le64 features;
	__le16 depth;		/* commands per queue */
	__le16 reserved;
	__le32 most_bytes;	/* limit of one command's data */
	u8 export[MMBLK_NAME];	/* padded with zeros */
	__le64 reserved2;
};

struct mmblk_attached {
	__le32 magic;
	__le16 version;
	__le16 queues;		/* as many as requested, or fewer */
	__le64 features;
	__le16 depth;
	__le16 reserved;
	__le32 most_bytes;
	__le32 session;
	__le32 flags;
	__le64 bytes;		/* size of the device */
	u8 instance[16];	/* changes each time that the export is enabled */
	__le32 logical_block;	/* bytes, a power of two, at least 512; the same for physical blocks */
	__le32 physical_block;
	__le32 io_min;
	__le32 io_opt;
	__le32 most_discard;	/* bytes, like the two below; 0: not supported */
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
	__le16 queue;		/* number of the session's queue */
	__le32 bytes;
	__le64 offset;		/* bytes */
	__le64 tag;		/* the client's own, returned in struct mmblk_data */
	__le64 reserved;
};

struct mmblk_data {
	__le64 tag;
	__le32 offset;		/* in the command's data, bytes */
	__le32 bytes;		/* of the other parts */
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
