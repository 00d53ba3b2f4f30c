// SPDX-License-Identifier: GPL-2.0
/*
 * Windows: a peer's RAM with struct pages, and references to them.
 *
 * An unused page has the one reference that the kernel gives it when the window is mapped. neigh_frags() passes that reference to
 * the first fragment, and acquires one more for each further one. So the kernel calls page_free() when the last reference goes,
 * wherever it was (a socket's queue, a pipe, a mapping). Nodes that hang on the page name the messages that used it. After
 * page_free() has returned, the kernel sets the count back to 1. So a page with count 0 isn't used, and a window is unmapped only
 * if all counts are 1.
 */
#include <linux/mm.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "core.h"

/* Granularity of memory hotplug. A window's end is rounded up to it, and nothing accesses the memory beyond the window. */
#define NEIGH_MAP_ALIGN		(2UL << 20)

static struct neigh_link *neigh_page_link(const struct page *page)
{
	return page->pgmap->owner;
}

static void neigh_page_free(struct page *page)
{
	struct neigh_link *link = neigh_page_link(page);
	struct neigh_node *node, *next;
	unsigned long flags;

	rcu_read_lock();
	spin_lock_irqsave(&link->pages_lock, flags);
	node = page->zone_device_data;
	page->zone_device_data = NULL;
	spin_unlock_irqrestore(&link->pages_lock, flags);
	for (; node; node = next) {
		struct neigh_rx *rx = node->rx;

		next = node->next;
		if (atomic_dec_and_test(&rx->pages)) {
			struct neigh_link *of = rx->link;

			atomic_dec(&of->held);
			neigh_complete(of, rx - of->rx, NEIGH_OK);
		}
	}
	rcu_read_unlock();
}

static const struct dev_pagemap_ops neigh_pagemap_ops = {
	.page_free = neigh_page_free,
};

static int neigh_page_take(struct page *page, struct neigh_node *node)
{
	struct neigh_link *link = neigh_page_link(page);
	struct neigh_node *head;
	unsigned long flags;
	int ret = -EBUSY;

	spin_lock_irqsave(&link->pages_lock, flags);
	head = page->zone_device_data;
	if (!head) {
		/* 0: page_free() was called, and the count isn't set back yet. */
		if (page_count(page) < 1)
			goto out;
		node->depth = 1;
	} else {
		/* 0: page_free() is about to be called, or waits for the lock. */
		if (head->depth >= NEIGH_MOST_SHARERS || !get_page_unless_zero(page))
			goto out;
		node->depth = head->depth + 1;
	}
	node->next = head;
	page->zone_device_data = node;
	ret = 0;
out:
	spin_unlock_irqrestore(&link->pages_lock, flags);
	return ret;
}

/* Undoes neigh_page_take(), before any other context has seen the reference. */
static void neigh_page_untake(struct page *page, struct neigh_node *node)
{
	struct neigh_link *link = neigh_page_link(page);
	struct neigh_node *head, *at;
	unsigned long flags;
	bool others = false;

	spin_lock_irqsave(&link->pages_lock, flags);
	head = page->zone_device_data;
	if (head == node) {
		page->zone_device_data = node->next;
		others = node->next;
	} else {
		for (at = head; at->next != node; at = at->next)
			;
		at->next = node->next;
		others = true;
	}
	spin_unlock_irqrestore(&link->pages_lock, flags);
	/* The last one leaves its reference as the page's own. */
	if (others)
		put_page(page);
}

/* The next piece of a message within one page. Returns false at the end. */
static bool neigh_next_piece(const struct neigh_msg *msg, unsigned int *part, u64 *at, u64 *address, u32 *length)
{
	while (*part < msg->count && *at >= msg->parts[*part].length) {
		*at -= msg->parts[*part].length;
		(*part)++;
	}
	if (*part >= msg->count)
		return false;
	*address = msg->parts[*part].address + *at;
	*length = min_t(u64, msg->parts[*part].length - *at, PAGE_SIZE - offset_in_page(*address));
	*at += *length;
	return true;
}

int neigh_frags(const struct neigh_msg *msg, u64 offset, struct sk_buff *skb)
{
	struct neigh_link *link = msg->link;
	struct neigh_rx *rx = &link->rx[msg->id];
	unsigned int part = 0, pieces = 0, i;
	u64 at = offset, address;
	u32 length;
	int ret;

	while (neigh_next_piece(msg, &part, &at, &address, &length))
		pieces++;
	if (!pieces)
		return -EINVAL;
	if (pieces + skb_shinfo(skb)->nr_frags > NEIGH_MOST_PAGES)
		return -E2BIG;
	/* The rest of the ring must stay free for readers that do read. */
	if (atomic_read(&link->held) >= link->entries / 4)
		return -EDQUOT;

	atomic_set(&rx->pages, pieces);
	part = 0;
	at = offset;
	for (i = 0; neigh_next_piece(msg, &part, &at, &address, &length); i++) {
		rx->nodes[i].rx = rx;
		ret = neigh_page_take(pfn_to_page(PHYS_PFN(address)), &rx->nodes[i]);
		if (ret)
			goto undo;
	}
	atomic_inc(&link->held);
	part = 0;
	at = offset;
	while (neigh_next_piece(msg, &part, &at, &address, &length)) {
		skb_fill_page_desc(skb, skb_shinfo(skb)->nr_frags, pfn_to_page(PHYS_PFN(address)),
				   offset_in_page(address), length);
		skb->len += length;
		skb->data_len += length;
		skb->truesize += length;
	}
	/* The sender may still write the page, and no reader here may. */
	skb_shinfo(skb)->flags |= SKBFL_SHARED_FRAG;
	return 0;
undo:
	pieces = i;
	part = 0;
	at = offset;
	for (i = 0; i < pieces && neigh_next_piece(msg, &part, &at, &address, &length); i++)
		neigh_page_untake(pfn_to_page(PHYS_PFN(address)), &rx->nodes[i]);
	return ret;
}
EXPORT_SYMBOL_GPL(neigh_frags);

bool neigh_copy_from(const struct neigh_msg *msg, u64 offset, void *to, u32 length)
{
	unsigned int part = 0;
	u64 at = offset, address;
	u32 piece;

	if (offset > msg->bytes || length > msg->bytes - offset)
		return false;
	while (length && neigh_next_piece(msg, &part, &at, &address, &piece)) {
		piece = min(piece, length);
		memcpy(to, __va(address), piece);
		to += piece;
		length -= piece;
	}
	return !length;
}
EXPORT_SYMBOL_GPL(neigh_copy_from);

bool neigh_page_is_window(const struct page *page)
{
	return is_zone_device_page(page) && page->pgmap->ops == &neigh_pagemap_ops;
}
EXPORT_SYMBOL_GPL(neigh_page_is_window);

u64 neigh_global(struct neigh *neigh, const struct page *page, unsigned int offset)
{
	u64 physical = page_to_phys(page) + offset;

	return neigh_page_is_window(page) ? physical : READ_ONCE(neigh->own_start) + physical;
}
EXPORT_SYMBOL_GPL(neigh_global);

u64 neigh_global_virt(struct neigh *neigh, const void *memory)
{
	return neigh_global(neigh, virt_to_page(memory), offset_in_page(memory));
}
EXPORT_SYMBOL_GPL(neigh_global_virt);

/* Gives the window struct pages. Extents within the same 2 MiB are mapped as one. */
int neigh_window_map(struct neigh_link *link)
{
	unsigned int i = 0;

	while (i < link->extents) {
		u64 start = round_down(link->extent[i].start, NEIGH_MAP_ALIGN);
		u64 end = round_up(link->extent[i].end + 1, NEIGH_MAP_ALIGN);
		struct dev_pagemap *map;
		void *at;

		for (i++; i < link->extents && link->extent[i].start < end; i++)
			end = round_up(link->extent[i].end + 1, NEIGH_MAP_ALIGN);
		map = kzalloc(sizeof(*map), GFP_KERNEL);
		if (!map)
			goto failed;
		map->type = MEMORY_DEVICE_GENERIC;
		map->ops = &neigh_pagemap_ops;
		map->owner = link;
		map->nr_range = 1;
		map->range.start = start;
		map->range.end = end - 1;
		at = memremap_pages(map, NUMA_NO_NODE);
		if (IS_ERR(at)) {
			kfree(map);
			neigh_window_unmap(link);
			return PTR_ERR(at);
		}
		link->map[link->maps++] = map;
	}
	return 0;
failed:
	neigh_window_unmap(link);
	return -ENOMEM;
}

void neigh_window_unmap(struct neigh_link *link)
{
	while (link->maps) {
		struct dev_pagemap *map = link->map[--link->maps];

		memunmap_pages(map);
		kfree(map);
	}
}

/* Whether every page has only its own reference. The window isn't used any more, so no new references are made. */
bool neigh_window_idle(struct neigh_link *link)
{
	unsigned int i;
	unsigned long pfn;

	for (i = 0; i < link->maps; i++) {
		for (pfn = PHYS_PFN(link->map[i]->range.start); pfn <= PHYS_PFN(link->map[i]->range.end); pfn++) {
			if (page_count(pfn_to_page(pfn)) != 1)
				return false;
			if (!(pfn & 0xffff))
				cond_resched();
		}
	}
	return true;
}
