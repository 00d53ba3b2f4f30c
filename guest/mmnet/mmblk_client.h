/* SPDX-License-Identifier: GPL-2.0 */
/* mmblk, client side: devices, their requests, the connection to a server. */
#ifndef MMBLK_CLIENT_H
#define MMBLK_CLIENT_H

#include "mmblk.h"

/*
 *	              ATTACHED               connection or session ends
 *	SEEKING -----------------> LIVE ------------------------------> SEEKING (requests wait)
 *	   |                        ^                                      | wait_ms
 *	   | enable 0               +------------- ATTACHED ----------- FAILED (requests fail)
 *	   v
 *	 GOING
 */
enum mmblk_state { MMBLK_SEEKING, MMBLK_LIVE, MMBLK_FAILED, MMBLK_GOING };

/* A neighbour in its role as a server of this VM. */
struct mmblk_cpeer {
	struct list_head node;		/* under the client's mutex, like the other fields */
	struct neigh *neigh;
	bool live;
};

/* The checked terms of an export. */
struct mmblk_terms {
	u32 session, flags;
	u16 queues, depth;
	u64 features, bytes;
	u32 most_bytes;
	u32 logical_block, physical_block, io_min, io_opt;
	u32 most_discard, discard_granularity, most_zeroes;
	u8 instance[16];
};

/* A posted ATTACH or DETACH. There is one ATTACH at most. */
struct mmblk_ask {
	struct mmblk_post post;
	struct mmblk_dev *dev;
	u8 kind;			/* MMBLK_ATTACH or MMBLK_DETACH */
	union {
		struct mmblk_attach attach;
		struct mmblk_detach detach;
	};
};

struct mmblk_dev {
	struct config_group group;
	struct mutex lock;		/* the configuration, which changes only while the device isn't enabled */
	char peer_name[CW_NB_PEER_NAME_SIZE + 1];
	char export[MMBLK_NAME];
	u32 queues, depth, wait_ms, timeout_ms;
	bool enabled;

	u32 number;
	struct list_head node;		/* under the client's mutex */
	struct mmblk_users users;	/* lookups by number, and posted asks */

	/* Under the client's mutex: */
	struct mmblk_cpeer *peer;	/* the server that it is attached to */
	bool asking, quiesced;
	u32 last_refusal;
	struct mmblk_terms terms;	/* the disk's terms, and the present session */
	struct gendisk *disk;
	struct blk_mq_tag_set set;
	bool added;			/* the disk is visible; set by the work only */

	/* Read by requests: */
	enum mmblk_state state;
	struct neigh *neigh;
	bool copy_foreign;		/* the server can't reach third VMs' memory */
	atomic_t written, flushed;	/* completed writes, and those of them that are durable */
	bool lost_writes;		/* the next flush reports it */

	spinlock_t answer_lock;		/* the fields up to ended, and asking */
	struct mmblk_attached answer;	/* the last answer, as received */
	bool answered, ended;
	struct work_struct answer_work;
	struct work_struct add_work;	/* makes the disk visible: reads it, which needs the other works */
	struct delayed_work seek_work;
	struct delayed_work wait_work;
	struct work_struct timeout_work;
	struct mmblk_counters counters;
};

/* A request. */
struct mmblk_rq {
	struct mmblk_command command;	/* the server reads it in place */
	struct mmblk_post post;
	struct work_struct copy_work;
	void *copy;			/* pages with a copy of a write's data, and their order */
	unsigned int copy_order;
	u32 generation;
	u32 left;			/* bytes of a read that haven't arrived */
	int written;			/* for a flush: dev->written when it was sent */
	bool out;			/* the server has the command */
	bool waits;			/* the command has completed, and data is missing */
};

extern struct mutex mmblk_client_mutex;

/* mmblk_request.c */
extern const struct blk_mq_ops mmblk_mq_ops;
void mmblk_receive_data(struct mmblk_dev *dev, const struct neigh_msg *msg);
/* Takes back requests whose command has completed and whose data won't arrive, since the connection has ended. */
void mmblk_take_back(struct mmblk_dev *dev);
/* A command reports that the session has ended. Softirq. */
void mmblk_session_over(struct mmblk_dev *dev);

/* mmblk_client.c */
int mmblk_dev_start(struct mmblk_dev *dev);
void mmblk_dev_stop(struct mmblk_dev *dev);
const char *mmblk_state_name(const struct mmblk_dev *dev);

/* mmblk_disk.c */
int mmblk_disk_make(struct mmblk_dev *dev);	/* mutex held; not visible yet */
int mmblk_disk_add(struct mmblk_dev *dev);	/* reads the partition table */
void mmblk_disk_free(struct mmblk_dev *dev);
/* Whether the disk can continue with an export of these terms. Returns NULL, or the difference. */
const char *mmblk_disk_differs(const struct mmblk_dev *dev, const struct mmblk_terms *terms);

#endif
