/* SPDX-License-Identifier: GPL-2.0 */
/* An end of a pair as the Linux module has it: what src/ffi.rs calls. */
#ifndef CW_RINGS_H
#define CW_RINGS_H

#include "core.h"

struct rings_message {
	u32 id;
	u32 note;
	u16 kind;
	u16 count;
	u64 bytes;
	struct neigh_part parts[CW_NB_MOST_PARTS];
};

struct rings;

/* Zeroed memory for a segment, with pages that can't be touched before and behind it. */
void *rings_segment(size_t bytes);
void rings_segment_free(void *segment);
/* extents: pairs of global start and last address of the peer's RAM. NULL when there is no memory. */
struct rings *rings_new(void *segment, u32 entries, u32 epoch, u32 own, u32 peer, u64 base, u64 stride, u32 slots,
			const u64 (*extents)[2], unsigned int count);
void rings_free(struct rings *rings);
/* A third VM whose window is mapped, and that the two have in common or not. */
bool rings_third(struct rings *rings, u32 slot, const u64 (*extents)[2], unsigned int count, bool common);
/* Uses of its window: 1 is its own connection's. */
int rings_third_uses(const struct rings *rings, u32 slot);
int rings_post(struct rings *rings, const struct neigh_part *parts, unsigned int count, u16 kind, u32 note, u64 cookie);
/* One poll: what came in and what came back is kept for rings_received() and rings_sent(). True when it sleeps now. */
bool rings_poll(struct rings *rings);
bool rings_received(struct rings *rings, struct rings_message *message);
bool rings_sent(struct rings *rings, u64 *cookie, u32 *status);
void rings_complete(struct rings *rings, u32 id, u32 status);
void rings_kick(struct rings *rings);
/* The connection is over: everything that was posted comes back. */
void rings_end(struct rings *rings);
/* Times that the peer was signalled. */
u32 rings_signals(const struct rings *rings);
/* Times that the module was told that there is room. */
u64 rings_rooms(const struct rings *rings);
/* What the peer did that it must not, or NULL. */
const char *rings_violation(const struct rings *rings);

#endif
