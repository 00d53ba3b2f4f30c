/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Neighbours: what the core (cw_neigh.ko) offers to its users (mmnet, mmblk).
 *
 * A *neighbour* is a peer of this VM. It is there from the first time its slot is offered until the device goes, whatever becomes
 * of the connection. A *link* is one connection, of one epoch: window, segment, rings. Everything of a pair goes through one
 * ring per direction; users share it by the high byte of a message's kind:
 *
 *	kind = protocol << 8 | the user's own byte	(NEIGH_KIND)
 *
 * The protocol says who *receives*: a message is handed to the user that is registered for it. Both ends of a user may post
 * any protocol. mmblk has two: requests (client to server) and replies (server to client), so that one VM may be both, to the same
 * peer too. Logical queues are the users' affair: put a queue or tag into the note.
 *
 *	sender					receiver
 *	neigh_post(parts, kind, note, cookie)	  -> ops->receive(msg)		softirq
 *	   the parts are the receiver's to read	     msg is only valid during the call, its memory until:
 *	ops->sent(cookie, status)		  <- neigh_complete(link, id, status)	any context, any order, exactly once
 *
 * Contexts: add, live, dead and remove are called in process context, one at a time for a neighbour. receive, sent and room are
 * called in softirq context, one at a time for a neighbour, but for sent() with NEIGH_DEAD, which comes in process context with
 * bottom halves off, when no other is running.
 *
 * Life of a link, as a user sees it:
 *
 *	add ── live ── (receive | sent | room)* ── sent(NEIGH_DEAD)* ── dead ── live ── ... ── remove
 *
 * Between live and dead neigh_post() works; before and after it says -ENOTCONN. When dead() is called, every message that was
 * posted has come back by sent(), and no receive() comes any more; messages that were received and not completed stay readable
 * (the window is kept), and must still be completed, which releases the window. Only then the peer is connected again. A peer
 * that hangs, dies, leaves or breaks the rules looks the same.
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

/* Statuses: 0 and what users agree on below 0xffff0000. */
#define NEIGH_OK		0u
#define NEIGH_DEAD		0xffff0001u	/* the link died first; never comes from a peer */
#define NEIGH_NOBODY		0xffff0002u	/* the peer has no user for this protocol */
#define NEIGH_UNREACHABLE	0xffff0003u	/* a part lies in a third VM's window, which the peer doesn't have: copy */
#define NEIGH_MALFORMED		0xffff0004u	/* the receiving user can't use it */

/* A buffer, or a part of one. Global addresses are the physical addresses of windows, in every VM. */
struct neigh_part {
	u64 address;
	u32 length;	/* bytes, not 0 */
};

/*
 * A received message: checked, and a private copy; every part is RAM in a window that this VM has mapped: the sender's, or a third
 * VM's when the sender passes on what it got from there. The *content* of the parts can change at any time (the sender can
 * write it): copy what you decide by. Never store to them: stores are discarded, at the price of an exit each.
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
	/* A neighbour, known from now on. Returns what the other operations get, or an ERR_PTR: it isn't called for it then. */
	void *(*add)(struct neigh *neigh);
	/* The neighbour or the user goes; dead() was called if live() had been. */
	void (*remove)(struct neigh *neigh, void *priv);
	/* Messages can be posted and come. The peer's users may not be there yet (NEIGH_NOBODY). */
	void (*live)(struct neigh *neigh, void *priv);
	void (*dead)(struct neigh *neigh, void *priv);
	/* To be completed once, now or later. */
	void (*receive)(struct neigh *neigh, void *priv, const struct neigh_msg *msg);
	/* A posted message came back. */
	void (*sent)(struct neigh *neigh, void *priv, void *cookie, u32 status);
	/* After a post of this user said -ENOSPC: it may be worth a try now. May be NULL. */
	void (*room)(struct neigh *neigh, void *priv);
	/* The end of a batch of receive() and sent() (a NAPI poll). May be NULL. */
	void (*batch_end)(struct neigh *neigh, void *priv);
};

/*
 * protocol: which messages it receives; 1 to NEIGH_PROTOCOLS - 1, one user each.
 * share: how much of a pair's ring it may have outstanding (posted, not come back), in sixteenths.
 */
struct neigh_user {
	const char *name;
	u8 protocol;
	u8 share;
	const struct neigh_user_ops *ops;
	struct module *owner;
};

/*
 * Registers a user, and calls add() (and live()) for all neighbours there are. -EBUSY when the protocol has a user. Process
 * context.
 */
int neigh_register_user(struct neigh_user *user);
/*
 * Calls dead() and remove() for all neighbours; what was posted comes back by sent(NEIGH_DEAD) first, though the peer may still
 * read it for a moment. Afterwards no operation is called. Messages it received may be completed later still (by a module that
 * holds no code of the user: see neigh_frags()); whoever completes them itself does so before. Process context.
 */
void neigh_unregister_user(struct neigh_user *user);

/*
 * Sends a message. cookie comes back by sent(). Any context but NMI. Nothing is signalled: call neigh_kick() after one or several.
 *	-ENOTCONN	no link
 *	-ENOSPC		ring full, or the user's share used up: room() will be called
 *	-EINVAL		parts: none, too many, or of length 0
 */
int neigh_post(struct neigh *neigh, const struct neigh_user *user, const struct neigh_part *parts,
	       unsigned int count, u16 kind, u32 note, void *cookie);
/* How many entries (parts of messages) can be posted now, at least; any context. */
unsigned int neigh_room(struct neigh *neigh, const struct neigh_user *user);
/* Signals the peer if it sleeps for what was posted or completed since. Any context. */
void neigh_kick(struct neigh *neigh);

/* Gives a received message back, and signals the peer if it sleeps for that. Any context; dead links too. */
void neigh_complete(struct neigh_link *link, u32 id, u32 status);
/* The same without the signal, for batches; neigh_kick() follows. */
void neigh_complete_quietly(struct neigh_link *link, u32 id, u32 status);

/*
 * The global address of own memory, or of a window's page (which it has already: its physical address). page and the length
 * from offset on are physically contiguous.
 */
u64 neigh_global(struct neigh *neigh, const struct page *page, unsigned int offset);
/* The same of memory in the direct map (kmalloc); not vmalloc, not a stack. */
u64 neigh_global_virt(struct neigh *neigh, const void *memory);
/* Whether a page is in a neighbour's window: read-only, and not reachable by devices that only know this VM's RAM. */
bool neigh_page_is_window(const struct page *page);

/* The first page of a part of a received message; following pages follow. */
static inline struct page *neigh_part_page(const struct neigh_part *part)
{
	return pfn_to_page(part->address >> PAGE_SHIFT);
}

static inline unsigned int neigh_part_offset(const struct neigh_part *part)
{
	return offset_in_page(part->address);
}

/* Copies length bytes from offset of a received message on; false when there are fewer. */
bool neigh_copy_from(const struct neigh_msg *msg, u64 offset, void *to, u32 length);

/*
 * Lets an skb refer to the pages of a message, from byte offset on, without a copy: page fragments, one per page, each with a
 * reference. When the last reference to the last of these pages goes, whoever holds it by then, the core completes the message
 * with NEIGH_OK. Softirq context, within receive(). Not 0 means that nothing was taken, and the message is still the
 * caller's to copy and complete: -E2BIG more pages than an skb has fragments, -EBUSY a page is just coming back or has too many
 * users, -EDQUOT too many messages of this link are held already.
 */
int neigh_frags(const struct neigh_msg *msg, u64 offset, struct sk_buff *skb);

/*
 * Ends the present link, as a violation of the rules does: for a user whose peer doesn't answer. why: a constant string. Any context;
 * dead() comes later, from another.
 */
void neigh_give_up(struct neigh *neigh, const char *why);

/* The slot in whose window a global address lies; all ones when it is in none. */
u32 neigh_slot_of(const struct neigh *neigh, u64 address);

/* About a neighbour. The name is the VM's, whole; it may change with the next link. */
u32 neigh_slot(const struct neigh *neigh);
const char *neigh_name(const struct neigh *neigh);
/* The Ethernet address that a device to it has: made of names, so that no other VM's is the same. It changes with the name. */
const u8 *neigh_mac(const struct neigh *neigh);
struct device *neigh_device(struct neigh *neigh);
/* Epoch of the link, 0 when there is none. */
u32 neigh_epoch(const struct neigh *neigh);
/* The poll that calls receive(), for napi_gro_receive(). */
struct napi_struct *neigh_napi(struct neigh *neigh);

/* What the core has counted for a neighbour, over all links. */
struct neigh_counts {
	u64 signals;	/* sent to the peer: an exit each */
	u64 wakeups;	/* polls after a sleep */
	u64 polls;
	u64 spins;	/* looks for more before sleeping, */
	u64 spins_won;	/* and those that found something */
};

void neigh_counts(const struct neigh *neigh, struct neigh_counts *counts);

#endif
