/* SPDX-License-Identifier: GPL-2.0 */
/* mmblk, server side: exports, sessions, commands. */
#ifndef MMBLK_SERVER_H
#define MMBLK_SERVER_H

#include <linux/mempool.h>
#include <linux/refcount.h>
#include <linux/uuid.h>
#include <linux/xarray.h>

#include "mmblk.h"

#define MMBLK_CHUNKS	(MMBLK_MOST_BYTES / PAGE_SIZE)
#define MMBLK_REPLIES	DIV_ROUND_UP(MMBLK_CHUNKS, MMBLK_DATA_PARTS)

/* A served block device or file. The configuration (under lock) changes only while it isn't enabled. */
struct mmblk_export {
	struct config_group group;
	struct mutex lock;		/* the configuration */
	char path[256];
	char clients[512];		/* names, with a space before and after each */
	bool readonly;
	bool buffered;			/* a file is read and written through the page cache */
	bool enabled;

	struct list_head node;		/* in the server's list, while enabled */
	struct file *file;
	struct block_device *bdev;	/* NULL: a file */
	uuid_t instance;
	u64 bytes;
	u64 features;
	u32 flags;
	u32 logical_block, physical_block, io_min, io_opt;
	u32 most_discard, discard_granularity, most_zeroes;
	/*
	 * Commands. A queue of its own: the exported device may be another server's, and commands then wait for works that
	 * reconnect it.
	 */
	struct workqueue_struct *wq;
	mempool_t *contexts;		/* struct mmblk_read */
	mempool_t *pages;		/* the reserve, for one read at a time */
	struct mutex reserve;		/* held by the read that uses the reserve */
	struct list_head sessions;	/* under the server's mutex */
	struct mmblk_users users;	/* sessions, until their last command */
	struct mmblk_counters counters;
};

/* A neighbour in its role as a client of this VM. */
struct mmblk_speer {
	struct neigh *neigh;
	bool live;			/* under the server's mutex */
	struct xarray sessions;		/* read under its lock (irqs off), changed under the server's mutex, too */
	spinlock_t lock;		/* waiting; irqs off */
	struct list_head waiting;	/* commands whose data waits for room in the ring */
	struct mmblk_users users;	/* sessions, until their last command, and control messages */
};

struct mmblk_session {
	u32 id;
	u32 device;			/* the client's number */
	struct mmblk_export *export;
	struct mmblk_speer *peer;
	struct list_head node;		/* in the export, until the end of its last command */
	bool ended;			/* under the server's mutex */
	u16 queues, depth;
	u32 most_bytes;
	refcount_t refs;		/* one while it is attached, one per command and read context */
	spinlock_t lock;		/* free */
	struct list_head free;
	struct mmblk_req *reqs;
	struct work_struct reap;
};

/* A command in service. Its fields are checked. */
struct mmblk_req {
	struct work_struct work;
	struct list_head node;		/* session's free, or peer's waiting */
	struct mmblk_session *session;
	struct neigh_link *link;
	u32 id;
	u8 op, flags;
	u16 count;
	u32 foreign;			/* bytes in third VMs' memory */
	u32 bytes;
	u64 offset;
	__le64 tag;
	struct neigh_part parts[MMBLK_DATA_PARTS];
	struct mmblk_read *read;
};

/* One message with data of a read. */
struct mmblk_reply {
	struct mmblk_post post;
	struct mmblk_read *read;
	struct mmblk_data head;
	u16 first, count;		/* chunks */
};

struct mmblk_chunk {
	struct page *page;
	u32 length;
	u8 order;
	bool reserved;			/* from the export's reserve */
};

/* The pages of a read, until the client has returned all of them. */
struct mmblk_read {
	struct mmblk_session *session;
	atomic_t pending;		/* replies that aren't completed, and one while they are being sent */
	bool holds_reserve;
	u16 chunks, replies, sent;
	struct mmblk_chunk chunk[MMBLK_CHUNKS];
	struct mmblk_reply reply[MMBLK_REPLIES];
};

/* mmblk_server.c */
extern struct mutex mmblk_server_mutex;
extern struct list_head mmblk_exports;
void mmblk_session_put(struct mmblk_session *session);
/* Ends all sessions of an export that is no longer in the list, and waits for their last commands. */
void mmblk_sessions_end(struct mmblk_export *export);

/* mmblk_command.c */
/* Returns 0 if the command is in progress and will complete the message; else the status to complete it with. */
u32 mmblk_receive_command(struct mmblk_speer *peer, const struct neigh_msg *msg);
/* Sends data that waits for room. If the connection has ended, drops it. */
void mmblk_send_waiting(struct mmblk_speer *peer);
/* Answers a command, with its data if it has read some. Any context. */
void mmblk_answer(struct mmblk_req *req, u32 status);

/* mmblk_backend.c */
void mmblk_read_put(struct mmblk_read *read);
int mmblk_backend_open(struct mmblk_export *export);
void mmblk_backend_close(struct mmblk_export *export);
/* Serves a command. Process context. mmblk_answer() is called once, now or later. */
void mmblk_backend_run(struct mmblk_req *req);

#endif
