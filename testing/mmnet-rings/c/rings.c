// SPDX-License-Identifier: GPL-2.0
/* The rings of guest/mmnet in a process, with substitutes for the rest of the module and for Linux. */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "rings.h"

#define POLL_BUDGET 64
#define GUARD 4096

unsigned int neigh_spin_us;

struct sent {
	u64 cookie;
	u32 status;
};

struct rings {
	struct neigh neigh;
	struct neigh_dev dev;
	struct neigh_link link;
	struct neigh_user user;
	u32 doorbell;
	u64 rooms;
	u32 received, taken, returned, collected;
	struct rings_message *messages;
	struct sent *sent;
};

struct guard {
	size_t mapped;
};

/* The memory ends at the inaccessible page. A page of its own before the memory holds the size. */
void *shim_guarded(size_t bytes)
{
	size_t whole = (bytes + GUARD - 1) & ~(size_t)(GUARD - 1), mapped = whole + 3 * GUARD;
	char *memory = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		return NULL;
	((struct guard *)memory)->mapped = mapped;
	shim_must(!mprotect(memory + GUARD, GUARD, PROT_NONE));
	shim_must(!mprotect(memory + 2 * GUARD + whole, GUARD, PROT_NONE));
	return memory + 2 * GUARD + (whole - bytes) / 8 * 8;
}

void shim_guarded_free(void *memory)
{
	char *start;

	if (!memory)
		return;
	start = (char *)((uintptr_t)memory & ~(uintptr_t)(GUARD - 1)) - 2 * GUARD;
	shim_must(!munmap(start, ((struct guard *)start)->mapped));
}

void *rings_segment(size_t bytes)
{
	return shim_guarded(bytes);
}

void rings_segment_free(void *segment)
{
	shim_guarded_free(segment);
}

/* Substitutes for the module's other files. */

void neigh_queue(struct neigh *nb)
{
	/* The work item that ends the link reads the violation. */
	shim_must(nb->violation);
}

void neigh_link_put(struct neigh_link *link)
{
	/* Only rings_end() drops the connection's own reference. */
	shim_must(!refcount_dec_and_test(&link->users) || !link->open);
}

/* Substitute for the user of the connection. */

static void receive(struct neigh *nb, void *priv, const struct neigh_msg *msg)
{
	struct rings *rings = priv;
	struct rings_message *to;

	(void)nb;
	/* Each incomplete message holds an ID, and there are as many IDs as entries. */
	shim_must(rings->received - rings->taken < rings->link.entries);
	to = &rings->messages[rings->received++ & (rings->link.entries - 1)];
	to->id = msg->id;
	to->note = msg->note;
	to->kind = msg->kind;
	to->count = msg->count;
	to->bytes = msg->bytes;
	memcpy(to->parts, msg->parts, sizeof(to->parts));
}

static void sent(struct neigh *nb, void *priv, void *cookie, u32 status)
{
	struct rings *rings = priv;

	(void)nb;
	shim_must(rings->returned - rings->collected < rings->link.entries);
	rings->sent[rings->returned++ & (rings->link.entries - 1)] = (struct sent) { (uintptr_t)cookie, status };
}

static void room(struct neigh *nb, void *priv)
{
	struct rings *rings = priv;

	(void)nb;
	rings->rooms++;
}

static const struct neigh_user_ops ops = { .receive = receive, .sent = sent, .room = room };

static bool set_extents(struct neigh_link *link, const u64 (*extents)[2], unsigned int count)
{
	unsigned int i;

	if (count > CW_NB_MAX_EXTENTS)
		return false;
	link->extents = count;
	for (i = 0; i < count; i++)
		link->extent[i] = (struct range) { extents[i][0], extents[i][1] };
	return true;
}

struct rings *rings_new(void *segment, u32 entries, u32 epoch, u32 own, u32 peer, u64 base, u64 stride, u32 slots,
			const u64 (*extents)[2], unsigned int count)
{
	struct rings *rings = calloc(1, sizeof(*rings));
	struct neigh_attached *at;

	if (!rings)
		return NULL;
	rings->dev = (struct neigh_dev) { .own = own, .slots = slots, .entries = entries, .base = base, .stride = stride };
	rings->neigh.dev = &rings->dev;
	rings->neigh.slot = peer;
	rings->neigh.doorbell = &rings->doorbell;
	rings->dev.neighs[peer] = &rings->neigh;
	rings->link.neigh = &rings->neigh;
	rings->link.epoch = epoch;
	rings->link.entries = entries;
	rings->link.segment = segment;
	refcount_set(&rings->link.users, 1);
	rings->messages = shim_guarded(entries * sizeof(*rings->messages));
	rings->sent = shim_guarded(entries * sizeof(*rings->sent));
	if (!rings->messages || !rings->sent || !set_extents(&rings->link, extents, count) ||
	    neigh_rings_make(&rings->link, own, peer)) {
		rings_free(rings);
		return NULL;
	}
	rings->user = (struct neigh_user) { .name = "rings", .protocol = NEIGH_PROTO_NET, .share = 16, .ops = &ops };
	at = &rings->neigh.attached[NEIGH_PROTO_NET];
	at->user = &rings->user;
	at->priv = rings;
	at->live = true;
	at->share = entries;
	rings->link.open = true;
	rings->neigh.link = &rings->link;
	rings->neigh.sending = &rings->link;
	return rings;
}

void rings_free(struct rings *rings)
{
	u32 slot;

	for (slot = 0; slot < CW_NB_MAX_SLOTS; slot++) {
		struct neigh *nb = rings->dev.neighs[slot];

		if (nb && nb != &rings->neigh) {
			free(nb->link);
			free(nb);
		}
	}
	neigh_rings_free(&rings->link);
	shim_guarded_free(rings->messages);
	shim_guarded_free(rings->sent);
	free(rings);
}

bool rings_third(struct rings *rings, u32 slot, const u64 (*extents)[2], unsigned int count, bool common)
{
	struct neigh_link *link;
	struct neigh *nb;

	if (slot >= rings->dev.slots || slot == rings->dev.own || rings->dev.neighs[slot])
		return false;
	nb = calloc(1, sizeof(*nb));
	link = calloc(1, sizeof(*link));
	if (!nb || !link || !set_extents(link, extents, count)) {
		free(nb);
		free(link);
		return false;
	}
	nb->dev = &rings->dev;
	nb->slot = slot;
	nb->link = link;
	link->neigh = nb;
	link->open = true;
	refcount_set(&link->users, 1);
	rings->dev.neighs[slot] = nb;
	if (common)
		rings->neigh.common |= 1ULL << slot;
	return true;
}

int rings_third_uses(const struct rings *rings, u32 slot)
{
	return rings->dev.neighs[slot]->link->users.count;
}

int rings_post(struct rings *rings, const struct neigh_part *parts, unsigned int count, u16 kind, u32 note, u64 cookie)
{
	return neigh_post(&rings->neigh, &rings->user, parts, count, kind, note, (void *)(uintptr_t)cookie);
}

bool rings_poll(struct rings *rings)
{
	rings->neigh.room_timer.pending = false;
	return neigh_poll(&rings->neigh.napi, POLL_BUDGET) < POLL_BUDGET && !rings->neigh.violation;
}

bool rings_received(struct rings *rings, struct rings_message *message)
{
	if (rings->taken == rings->received)
		return false;
	*message = rings->messages[rings->taken++ & (rings->link.entries - 1)];
	return true;
}

bool rings_sent(struct rings *rings, u64 *cookie, u32 *status)
{
	struct sent *from;

	if (rings->collected == rings->returned)
		return false;
	from = &rings->sent[rings->collected++ & (rings->link.entries - 1)];
	*cookie = from->cookie;
	*status = from->status;
	return true;
}

void rings_complete(struct rings *rings, u32 id, u32 status)
{
	neigh_complete_quietly(&rings->link, id, status);
}

void rings_kick(struct rings *rings)
{
	neigh_kick(&rings->neigh);
}

void rings_end(struct rings *rings)
{
	rings->neigh.sending = NULL;
	rings->neigh.attached[NEIGH_PROTO_NET].live = false;
	rings->link.open = false;
	neigh_fail_sent(&rings->neigh, &rings->link, 0);
	neigh_link_put(&rings->link);
}

u32 rings_signals(const struct rings *rings)
{
	return rings->doorbell;
}

u64 rings_rooms(const struct rings *rings)
{
	return rings->rooms;
}

const char *rings_violation(const struct rings *rings)
{
	return rings->neigh.violation;
}
