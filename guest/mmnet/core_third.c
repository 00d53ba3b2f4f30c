// SPDX-License-Identifier: GPL-2.0
/*
 * Pipelines: memory that a message may name besides its sender's own (docs/design/neighbours.md).
 *
 * A VM may name memory that it may read itself. The registry reports to each of a pair the members that both may read. A third
 * VM's address is accepted only if that VM is one of these, and its window is mapped here. The message keeps that window, too,
 * until it is completed.
 */
#include <linux/io.h>
#include <linux/io-64-nonatomic-lo-hi.h>

#include "core.h"

/* Whether all bytes are RAM of the window's owner. Can't overflow. */
bool neigh_window_has(const struct neigh_link *link, u64 address, u32 length)
{
	unsigned int i;

	for (i = 0; i < link->extents; i++) {
		const struct range *extent = &link->extent[i];

		if (length && address >= extent->start && address <= extent->end &&
		    length - 1 <= extent->end - address)
			return true;
	}
	return false;
}

/* Reads the register again, whenever the function reports a change. neigh_mutex is held. */
void neigh_read_common(struct neigh *nb)
{
	if (nb->dev)
		WRITE_ONCE(nb->common, readq(nb->dev->regs + CW_NB_COMMON + nb->slot * CW_NB_COMMON_STRIDE));
}

bool neigh_in_common(const struct neigh *nb, u32 slot)
{
	return slot < CW_NB_MAX_SLOTS && READ_ONCE(nb->common) >> slot & 1;
}

u32 neigh_slot_of(const struct neigh *nb, u64 address)
{
	const struct neigh_dev *dev = READ_ONCE(nb->dev);

	if (!dev || address < dev->base || address - dev->base >= dev->slots * dev->stride)
		return U32_MAX;
	return (address - dev->base) / dev->stride;
}
EXPORT_SYMBOL_GPL(neigh_slot_of);

/* The core's work ends the link, as after a violation. Only the first reason counts. */
void neigh_give_up(struct neigh *nb, const char *why)
{
	neigh_violated(nb, why);
}
EXPORT_SYMBOL_GPL(neigh_give_up);
