/* SPDX-License-Identifier: GPL-2.0 */
/* Shared declarations of mmblk. */
#ifndef MMBLK_H
#define MMBLK_H

#include <linux/atomic.h>
#include <linux/bio.h>
#include <linux/blk-mq.h>
#include <linux/blkdev.h>
#include <linux/completion.h>
#include <linux/configfs.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/spinlock.h>
#include <linux/version.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "neigh.h"
#include "mmblk_wire.h"

/* A posted message, embedded in its owner. Its address is the core's cookie. */
struct mmblk_post {
	void (*done)(struct mmblk_post *post, u32 status);
};

/* Counters, shown in sysfs (devices) and configfs (exports). */
enum mmblk_counter {
	MMBLK_C_READS,
	MMBLK_C_WRITES,
	MMBLK_C_FLUSHES,
	MMBLK_C_DISCARDS,
	MMBLK_C_ZEROES,
	MMBLK_C_READ_BYTES,
	MMBLK_C_WRITTEN_BYTES,
	MMBLK_C_BY_REFERENCE,	/* bytes passed on without a copy here */
	MMBLK_C_COPIED,		/* bytes copied here */
	MMBLK_C_FORWARDED,	/* bytes by reference that are in a third VM's memory */
	MMBLK_C_ERRORS,
	MMBLK_C_REFUSED,	/* malformed messages of the peer */
	MMBLK_C_REQUEUED,	/* commands sent again after a connection ended, or that found no room */
	MMBLK_C_TIMEOUTS,
	MMBLK_C_ATTACHED,	/* sessions begun */
	MMBLK_C_LOST,		/* sessions ended by the other side */
	MMBLK_COUNTERS,
};

extern const char * const mmblk_counter_names[MMBLK_COUNTERS];

struct mmblk_counters {
	atomic64_t value[MMBLK_COUNTERS];
};

static inline void mmblk_count(struct mmblk_counters *counters, enum mmblk_counter which, u64 by)
{
	atomic64_add(by, &counters->value[which]);
}

ssize_t mmblk_show_counters(const struct mmblk_counters *counters, char *page);

/*
 * Counts the users of an object, which is freed after the last is gone. The last user doesn't access it after mmblk_users_put().
 */
struct mmblk_users {
	spinlock_t lock;		/* count */
	unsigned int count;
	wait_queue_head_t idle;
};

static inline void mmblk_users_init(struct mmblk_users *users)
{
	spin_lock_init(&users->lock);
	users->count = 0;
	init_waitqueue_head(&users->idle);
}

static inline void mmblk_users_get(struct mmblk_users *users)
{
	unsigned long flags;

	spin_lock_irqsave(&users->lock, flags);
	users->count++;
	spin_unlock_irqrestore(&users->lock, flags);
}

static inline void mmblk_users_put(struct mmblk_users *users)
{
	unsigned long flags;

	spin_lock_irqsave(&users->lock, flags);
	if (!--users->count)
		wake_up(&users->idle);
	spin_unlock_irqrestore(&users->lock, flags);
}

/* Waits up to jiffies for the last user. Returns whether there are none. */
static inline bool mmblk_users_wait(struct mmblk_users *users, long jiffies)
{
	bool none = wait_event_timeout(users->idle, !READ_ONCE(users->count), jiffies);

	/* The last user may still hold the lock. */
	spin_lock_irq(&users->lock);
	spin_unlock_irq(&users->lock);
	return none;
}

/* Work on the second queue never waits for a server. */
extern struct workqueue_struct *mmblk_wq, *mmblk_copy_wq;

/* Users of the core: the server receives requests, the client receives replies. */
extern struct neigh_user mmblk_server_user;
extern struct neigh_user mmblk_client_user;

int mmblk_client_init(void);
void mmblk_client_exit(void);
int mmblk_server_init(void);
void mmblk_server_exit(void);

/* configfs: groups of directories in devices/ and exports/. */
extern struct config_group mmblk_devices_group;
extern struct config_group mmblk_exports_group;
void mmblk_devices_group_init(void);
void mmblk_exports_group_init(void);

/* Copies a name, of less than limit printable characters without a slash, from a string that was written to an attribute. */
int mmblk_take_name(char *to, size_t limit, const char *from, size_t count);

#endif
