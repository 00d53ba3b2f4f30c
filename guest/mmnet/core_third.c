// SPDX-License-Identifier: GPL-2.0
/*
 * Pipelines: whose memory a message may name besides its sender's own (docs/design/neighbours.md).
 *
 * A VM may name what it may read itself: the registry tells each of a pair whom they have in common, and a third VM's address
 * is taken only when the third is one of these and its window is mapped here. The message keeps that window, too, until it is
 * completed.
 */
#include <linux/io.h>
#include <linux/io-64-nonatomic-lo-hi.h>

#include "core.h"

/* Whether all of it is RAM of the window's owner; can't overflow. */
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

/* Read anew whenever the function says that something has changed. neigh_mutex is held. */
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

/* A work of the core ends the link, as it does after a violation; the first reason counts. */
void neigh_give_up(struct neigh *nb, const char *why)
{
	neigh_violated(nb, why);
}
EXPORT_SYMBOL_GPL(neigh_give_up);
