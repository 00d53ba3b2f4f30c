/* SPDX-License-Identifier: GPL-2.0 */
/* One end of a connection, run by the Linux module's ring code. src/ffi.rs declares these functions. */
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

/* Returns zeroed memory for a segment, between inaccessible guard pages. */
void *rings_segment(size_t bytes);
void rings_segment_free(void *segment);
/* extents: pairs of the first and the last global address of the peer's RAM. Returns NULL without memory. */
struct rings *rings_new(void *segment, u32 entries, u32 epoch, u32 own, u32 peer, u64 base, u64 stride, u32 slots,
			const u64 (*extents)[2], unsigned int count);
void rings_free(struct rings *rings);
/* Maps the window of a third VM; common: the peer may read it, too. Returns false if the slot is unusable or memory is short. */
bool rings_third(struct rings *rings, u32 slot, const u64 (*extents)[2], unsigned int count, bool common);
/* Returns the reference count of a third VM's window. Its own connection holds one reference. */
int rings_third_uses(const struct rings *rings, u32 slot);
int rings_post(struct rings *rings, const struct neigh_part *parts, unsigned int count, u16 kind, u32 note, u64 cookie);
/* Polls once; rings_received() and rings_sent() return the messages and completions. Returns true if the ring waits for a signal now. */
bool rings_poll(struct rings *rings);
bool rings_received(struct rings *rings, struct rings_message *message);
bool rings_sent(struct rings *rings, u64 *cookie, u32 *status);
void rings_complete(struct rings *rings, u32 id, u32 status);
void rings_kick(struct rings *rings);
/* Ends the connection: completes every posted message. */
void rings_end(struct rings *rings);
/* Returns the number of signals to the peer. */
u32 rings_signals(const struct rings *rings);
/* Returns the number of notifications that the ring has room. */
u64 rings_rooms(const struct rings *rings);
/* Returns the peer's violation of the protocol, or NULL. */
const char *rings_violation(const struct rings *rings);

#endif
