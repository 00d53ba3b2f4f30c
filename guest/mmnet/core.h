/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Shared declarations of the neighbours' core. neigh.h is its interface to users, ../../docs/design/specs/neighbours-abi.md the
 * protocol.
 */
#ifndef CW_NEIGH_CORE_H
#define CW_NEIGH_CORE_H

#include <linux/if_ether.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/memremap.h>
#include <linux/netdevice.h>
#include <linux/pci.h>
#include <linux/refcount.h>
#include <linux/skbuff.h>
#include <linux/spinlock.h>
#include <linux/timer.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "neigh.h"

/* Limit of pages of one message that an skb can refer to. */
#define NEIGH_MOST_PAGES	MAX_SKB_FRAGS
/* Limit of messages that refer to one page at a time. The page returns with the last of them. */
#define NEIGH_MOST_SHARERS	32
/* Limit of third VMs' windows in one message. */
#define NEIGH_MOST_OTHERS	2

struct neigh_rx;

/* A message's reference to a page, in a list that hangs on the page. */
struct neigh_node {
	struct neigh_node *next;
	struct neigh_rx *rx;
	u32 depth;
};

/* A received message that isn't completed, by its id. */
struct neigh_rx {
	struct neigh_link *link;
	/* Third VMs' windows that the message refers to. */
	struct neigh_link *others[NEIGH_MOST_OTHERS];
	bool busy;
	/* Outstanding references to pages. */
	atomic_t pages;
	struct neigh_node nodes[NEIGH_MOST_PAGES];
};

/* A posted message, by its id. */
struct neigh_tx {
	void *cookie;
	u32 next;		/* next free id, if this one is free */
	u8 user;		/* protocol of the user that posted it; 0: the user is gone */
	bool outstanding;
};

/* One end of a ring, in private memory. The entries are in the segment. */
struct neigh_ring {
	void *first;		/* entry 0 */
	void *sleeps;		/* the word in which the consumer stores the stamp that it sleeps for */
	u32 next;		/* number of the next entry to write or read */
	u32 unannounced;	/* producers: entries from here on may have a sleeper that wasn't signaled */
};

enum neigh_state { NEIGH_WAITING, NEIGH_OFFERED, NEIGH_LIVE, NEIGH_ENDED };

/*
 * One connection. Its users are the connection itself, and each received message until it is completed (messages of other links,
 * too, if their parts are in this window). At 0 users the window is released.
 */
struct neigh_link {
	struct rcu_head rcu;
	struct neigh *neigh;		/* holds a reference */
	refcount_t users;
	u32 epoch;
	u32 entries;
	bool pinned;			/* keeps the module loaded: pages are outstanding, and the user is gone */

	/* The window: RAM extents, exact global addresses. */
	unsigned int extents;
	struct range extent[CW_NB_MAX_EXTENTS];
	unsigned int maps;
	struct dev_pagemap *map[CW_NB_MAX_EXTENTS];
	spinlock_t pages_lock;		/* the lists of nodes of pages; irqs off */

	void *segment;
	unsigned int side;

	/* Sending, under neigh->tx_lock. */
	struct neigh_ring out, returned;
	void *taken_word;
	u32 taken;
	u32 free_id;
	struct neigh_tx *tx;

	/* Receiving: in belongs to the poll; the rest is under rx_lock. */
	struct neigh_ring in;
	void *told_word;
	u32 told;
	spinlock_t rx_lock;		/* irqs off */
	struct neigh_ring back;
	bool open;			/* completions may be written */
	struct neigh_rx *rx;
	atomic_t held;			/* messages that skbs refer to */
};

struct neigh_attached {
	struct neigh_user *user;
	void *priv;
	bool live;			/* under tx_lock */
	bool wants_room;
	u32 outstanding;
	u32 share;
};

struct neigh_dev;

struct neigh {
	struct kref ref;
	struct rcu_head rcu;
	struct neigh_dev *dev;		/* NULL once the device is gone */
	struct device *parent;		/* holds a reference */
	u32 slot;
	char name[CW_NB_PEER_NAME_SIZE + 1];
	void __iomem *kept_block;	/* its registers, if the device is gone and pages are outstanding */
	u8 mac[ETH_ALEN];		/* of this VM's device for the neighbour */
	char irq_name[24];
	int irq;
	void __iomem *doorbell;

	/* Under neigh_mutex: */
	enum neigh_state state;
	u32 latest;
	struct work_struct work;
	struct delayed_work retry_release;

	struct neigh_link __rcu *link;
	u64 common;			/* slots of VMs that both this VM and the neighbour may read */
	spinlock_t tx_lock;		/* irqs off */
	struct neigh_link *sending;	/* the link while it is live; under tx_lock */
	u64 own_start;
	struct neigh_attached attached[NEIGH_PROTOCOLS];

	struct net_device *napi_dev;
	struct napi_struct napi;
	bool polling;			/* NAPI is enabled */
	const char *violation;		/* the peer's violation of the protocol */
	struct timer_list room_timer;
	u64 slept_at;
	u32 spin_ns;

	/* Statistics. */
	u64 signals, wakeups, polls, spins, spins_won;
};

struct neigh_dev {
	struct list_head list;
	struct pci_dev *pdev;
	void __iomem *regs;
	u32 own, slots, entries, segment_stride, heartbeat_ms;
	u64 base, stride;
	resource_size_t segments;
	__le64 *status;
	u64 beat;
	struct timer_list heartbeat;
	struct work_struct scan;
	bool going, looked;
	struct neigh *neighs[CW_NB_MAX_SLOTS];
};

extern struct mutex neigh_mutex;	/* users, devices, neighbours and their states; process context */
extern struct workqueue_struct *neigh_wq;
extern struct neigh_user *neigh_users[NEIGH_PROTOCOLS];
extern struct wait_queue_head neigh_released;
extern unsigned int neigh_spin_us;

/* core_link.c */
void neigh_read_name(struct neigh *nb);	/* and address, from the block of registers; neigh_mutex held */
void neigh_look(struct neigh *nb);		/* follows the block of registers; neigh_mutex held */
void neigh_end(struct neigh *nb, const char *why);	/* neigh_mutex held */
void neigh_work(struct work_struct *work);
void neigh_retry_release(struct work_struct *work);
void neigh_link_put(struct neigh_link *link);	/* within rcu_read_lock() or neigh_mutex */
void neigh_queue(struct neigh *nb);		/* queues neigh_look(); within rcu_read_lock() or neigh_mutex */
void neigh_user_live(struct neigh *nb, struct neigh_user *user);
void neigh_user_dead(struct neigh *nb, struct neigh_user *user);
bool neigh_detach(struct neigh *nb);		/* removes the device; false: not possible yet; neigh_mutex held */
void neigh_free(struct kref *ref);

/* core_window.c */
int neigh_window_map(struct neigh_link *link);
void neigh_window_unmap(struct neigh_link *link);
bool neigh_window_idle(struct neigh_link *link);

/* core_third.c */
bool neigh_window_has(const struct neigh_link *link, u64 address, u32 length);
void neigh_read_common(struct neigh *nb);
bool neigh_in_common(const struct neigh *nb, u32 slot);

/* core_ring.c */
int neigh_rings_make(struct neigh_link *link, u32 own, u32 peer);
void neigh_rings_free(struct neigh_link *link);
bool neigh_must_signal(struct neigh_link *link, struct neigh_ring *ring);
void neigh_signal(struct neigh *nb);
void neigh_violated(struct neigh *nb, const char *what);	/* ends the link soon */
int neigh_poll(struct napi_struct *napi, int budget);

/* core_send.c */
int neigh_take_returned(struct neigh *nb, struct neigh_link *link, int most);
void neigh_fail_sent(struct neigh *nb, struct neigh_link *link, u8 user);
void neigh_give_room(struct neigh *nb, struct neigh_link *link);
void neigh_room_timer(struct timer_list *timer);

/* core_receive.c */
int neigh_take_messages(struct neigh *nb, struct neigh_link *link, int most);
void neigh_tell_taken(struct neigh_link *link);

/* Words of the segment, which the peer writes, too. Each is read once. */
static inline u64 neigh_load(const void *word)
{
	return le64_to_cpu(READ_ONCE(*(const __le64 *)word));
}

static inline u64 neigh_load_acquire(const void *word)
{
	const __le64 *p = word;

	/* Later reads see what the writer wrote before this word. */
	return le64_to_cpu(virt_load_acquire(p));
}

static inline void neigh_store(void *word, u64 value)
{
	WRITE_ONCE(*(__le64 *)word, cpu_to_le64(value));
}

static inline void neigh_store_release(void *word, u64 value)
{
	__le64 *p = word;

	/* A reader of this word sees earlier writes. */
	virt_store_release(p, cpu_to_le64(value));
}

static inline u64 neigh_stamp(u32 epoch, u32 number)
{
	return (u64)epoch << 32 | (u32)(number + 1);
}

#define NEIGH_MESSAGE		sizeof(struct cw_nb_message)
#define NEIGH_COMPLETION	sizeof(struct cw_nb_completion)
#define NEIGH_NO_ID		U32_MAX

static inline void *neigh_entry(const struct neigh_link *link, const struct neigh_ring *ring, u32 number, size_t size)
{
	return ring->first + (number & (link->entries - 1)) * size;
}

/* Whether an entry is valid, by its stamp, the last word. */
static inline bool neigh_ready(const struct neigh_link *link, const struct neigh_ring *ring, u32 number, size_t size)
{
	return neigh_load_acquire(neigh_entry(link, ring, number, size) + size - 8) == neigh_stamp(link->epoch, number);
}

#endif
