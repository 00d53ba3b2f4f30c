/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Neighbours: the interface of the core (cw_neigh.ko) to its users (mmnet, mmblk).
 *
 * A *neighbour* is a peer of this VM. It exists from the first offer of its slot until the device is removed, whatever happens to
 * the connection. A *link* is one connection, of one epoch: window, segment, rings. All messages of a pair use one ring per
 * direction. The high byte of a message's kind names the protocol:
 *
 *	kind = protocol << 8 | the user's own byte	(NEIGH_KIND)
 *
 * The protocol selects the user that *receives*: a message goes to the user that is registered for it. A user at either end may
 * post any protocol. mmblk has two: requests (client to server) and replies (server to client), so that one VM may be both, even
 * to the same peer. Users implement logical queues themselves, with a queue or tag in the note.
 *
 *	sender					receiver
 *	neigh_post(parts, kind, note, cookie)	  -> ops->receive(msg)		softirq
 *	   the receiver may read the parts	     msg is only valid during the call, its memory until:
 *	ops->sent(cookie, status)		  <- neigh_complete(link, id, status)	any context, any order, exactly once
 *
 * Contexts: add, live, dead and remove are called in process context, never concurrently for a neighbour. receive, sent and room
 * are called in softirq context, never concurrently for a neighbour. sent() with NEIGH_DEAD is called in process context with
 * bottom halves off, while no other operation runs.
 *
 * Life of a link, for a user:
 *
 *	add ── live ── (receive | sent | room)* ── sent(NEIGH_DEAD)* ── dead ── live ── ... ── remove
 *
 * neigh_post() works between live and dead; otherwise it returns -ENOTCONN. When dead() is called, sent() was called for every
 * posted message, and receive() isn't called any more. Messages that were received and not completed stay readable (the window is
 * kept). They must still be completed, which releases the window. Only then the peer is connected again. This is the same for a
 * peer that hangs, dies, leaves or violates the protocol.
 */
#ifndef CW_NEIGH_H
#define CW_NEIGH_H

#include <linux/mm.h>
#include <linux/types.h>

#include "causeway_neighbour.h"

struct device;
struct neigh;
struct neigh_link;
struct napi_struct;
struct sk_buff;

/* Protocols: the high byte of a kind. */
#define NEIGH_PROTO_NET		1	/* frames of mmnet */
#define NEIGH_PROTO_BLK_REQUEST	2	/* mmblk: client to server; received by the server */
#define NEIGH_PROTO_BLK_REPLY	3	/* mmblk: server to client; received by the client */
#define NEIGH_PROTOCOLS		8

#define NEIGH_KIND(protocol, own)	((u16)((protocol) << 8 | (own)))
#define NEIGH_KIND_OWN(kind)		((u8)(kind))

/* Statuses: 0, and values that users define, below 0xffff0000. */
#define NEIGH_OK		0u
#define NEIGH_DEAD		0xffff0001u	/* the link died first; never sent by a peer */
#define NEIGH_NOBODY		0xffff0002u	/* the peer has no user for this protocol */
#define NEIGH_UNREACHABLE	0xffff0003u	/* a part is in a third VM's window, which the peer doesn't have: copy */
#define NEIGH_MALFORMED		0xffff0004u	/* the receiving user can't use it */

/* A buffer, or a part of one. Global addresses are the physical addresses of windows, the same in every VM. */
struct neigh_part {
	u64 address;
	u32 length;	/* bytes, not 0 */
};

/*
 * A received message: checked, and a private copy. Every part is RAM in a window that this VM has mapped: the sender's, or a
 * third VM's if the sender forwards memory that it got from there. The *content* of the parts can change at any time, since the
 * sender can write it: copy content before deciding by it. Never store to it: stores are discarded, and each exits.
 */
struct neigh_msg {
	struct neigh *neigh;
	struct neigh_link *link;	/* for neigh_complete() */
	u32 id;				/* for neigh_complete() */
	u32 note;
	u16 kind;
	u16 count;			/* parts, 1 to CW_NB_MOST_PARTS */
	u64 bytes;			/* of all parts */
	struct neigh_part parts[CW_NB_MOST_PARTS];
};

struct neigh_user;

struct neigh_user_ops {
	/* A new neighbour. Returns priv for the other operations, or an ERR_PTR: they aren't called for it then. */
	void *(*add)(struct neigh *neigh);
	/* The neighbour or the user is removed. If live() was called, dead() was, too. */
	void (*remove)(struct neigh *neigh, void *priv);
	/* Messages can be posted and received. The peer may have no user yet (NEIGH_NOBODY). */
	void (*live)(struct neigh *neigh, void *priv);
	void (*dead)(struct neigh *neigh, void *priv);
	/* Must be completed once, now or later. */
	void (*receive)(struct neigh *neigh, void *priv, const struct neigh_msg *msg);
	/* A posted message has completed. */
	void (*sent)(struct neigh *neigh, void *priv, void *cookie, u32 status);
	/* After a post of this user returned -ENOSPC, there may be room now. May be NULL. */
	void (*room)(struct neigh *neigh, void *priv);
	/* The end of a batch of receive() and sent() (a NAPI poll). May be NULL. */
	void (*batch_end)(struct neigh *neigh, void *priv);
};

/*
 * protocol: the messages that it receives; 1 to NEIGH_PROTOCOLS - 1, with one user each.
 * share: limit of its outstanding messages (posted, not completed) in a pair's ring, in sixteenths.
 */
struct neigh_user {
	const char *name;
	u8 protocol;
	u8 share;
	const struct neigh_user_ops *ops;
	struct module *owner;
};

/*
 * Registers a user, and calls add() (and live()) for all neighbours. Returns -EBUSY if the protocol has a user. Process context.
 */
int neigh_register_user(struct neigh_user *user);
/*
 * Calls dead() and remove() for all neighbours. Before, sent(NEIGH_DEAD) is called for outstanding messages, although the peer
 * may still read them for a moment. Afterwards no operation is called. The core may complete messages that the user received even
 * later (see neigh_frags()). A user completes its others before. Process context.
 */
void neigh_unregister_user(struct neigh_user *user);

/*
 * Posts a message. sent() will get cookie. Any context but NMI. Doesn't signal: call neigh_kick() after one or several posts.
 *	-ENOTCONN	no link
 *	-ENOSPC		the ring is full, or the user's share is in use: room() will be called
 *	-EINVAL		parts: none, too many, or of length 0
 */
int neigh_post(struct neigh *neigh, const struct neigh_user *user, const struct neigh_part *parts,
	       unsigned int count, u16 kind, u32 note, void *cookie);
/* Lower bound of entries (parts of messages) that can be posted now. Any context. */
unsigned int neigh_room(struct neigh *neigh, const struct neigh_user *user);
/* Signals the peer if it sleeps for messages that were posted or completed since. Any context. */
void neigh_kick(struct neigh *neigh);

/* Completes a received message, and signals the peer if it sleeps for that. Any context, dead links included. */
void neigh_complete(struct neigh_link *link, u32 id, u32 status);
/* The same without the signal, for batches. Call neigh_kick() afterwards. */
void neigh_complete_quietly(struct neigh_link *link, u32 id, u32 status);

/*
 * The global address of own memory, or of a window's page (which is its physical address). The memory from offset on must be
 * physically contiguous.
 */
u64 neigh_global(struct neigh *neigh, const struct page *page, unsigned int offset);
/* The same for memory in the direct map (kmalloc); not for vmalloc memory or a stack. */
u64 neigh_global_virt(struct neigh *neigh, const void *memory);
/* Whether a page is in a neighbour's window: read-only, and not reachable by devices that know only this VM's RAM. */
bool neigh_page_is_window(const struct page *page);

/* The first page of a part of a received message. Its other pages follow. */
static inline struct page *neigh_part_page(const struct neigh_part *part)
{
	return pfn_to_page(part->address >> PAGE_SHIFT);
}

static inline unsigned int neigh_part_offset(const struct neigh_part *part)
{
	return offset_in_page(part->address);
}

/* Copies length bytes of a received message, from offset on. Returns false if there are fewer. */
bool neigh_copy_from(const struct neigh_msg *msg, u64 offset, void *to, u32 length);

/*
 * Makes an skb refer to the pages of a message, from byte offset on, without a copy: one page fragment with a reference per page.
 * When the last reference to the last of these pages goes, wherever it is, the core completes the message with NEIGH_OK. Softirq
 * context, within receive(). On an error nothing was used, and the caller must copy and complete the message: -E2BIG: more pages
 * than an skb has fragments; -EBUSY: a page is just returning or has too many users; -EDQUOT: too many messages of this link are
 * held already.
 */
int neigh_frags(const struct neigh_msg *msg, u64 offset, struct sk_buff *skb);

/*
 * Ends the present link, as a violation of the protocol does: for a user whose peer doesn't answer. why: a constant string. Any
 * context; dead() is called later, in another.
 */
void neigh_give_up(struct neigh *neigh, const char *why);

/* The slot whose window contains a global address; all ones if there is none. */
u32 neigh_slot_of(const struct neigh *neigh, u64 address);

/* Properties of a neighbour. The name is the VM's complete one. It may change with the next link. */
u32 neigh_slot(const struct neigh *neigh);
const char *neigh_name(const struct neigh *neigh);
/*
 * The Ethernet address of a device for the neighbour. It is derived from names, so that it is unique, and changes with the name.
 */
const u8 *neigh_mac(const struct neigh *neigh);
struct device *neigh_device(struct neigh *neigh);
/* Epoch of the link; 0 without a link. */
u32 neigh_epoch(const struct neigh *neigh);
/* The NAPI that calls receive(), for napi_gro_receive(). */
struct napi_struct *neigh_napi(struct neigh *neigh);

/* Counters of a neighbour, over all links. */
struct neigh_counts {
	u64 signals;	/* sent to the peer; each exits */
	u64 wakeups;	/* polls after a sleep */
	u64 polls;
	u64 spins;	/* polls for more before a sleep, */
	u64 spins_won;	/* and those that found something */
};

void neigh_counts(const struct neigh *neigh, struct neigh_counts *counts);

#endif
