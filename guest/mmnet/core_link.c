// SPDX-License-Identifier: GPL-2.0
/*
 * The life of a connection: offered, live, ended, released, and again.
 *
 *	the block is OFFERED	map window and segment, make rings, write the own ready word
 *	the peer's ready word	live: users may post, the poll runs
 *	GONE, or a violation	ended: fail posted messages, notify users; the window stays mapped
 *	no page is in use	unmap the window, write the release; the next offer is accepted then
 *
 * All of this happens in process context under neigh_mutex.
 */
#include <linux/io.h>
#include <linux/io-64-nonatomic-lo-hi.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "compat.h"
#include "core.h"

static void __iomem *block(struct neigh *nb)
{
	return nb->dev->regs + CW_NB_PEERS + nb->slot * CW_NB_PEER_STRIDE;
}

void neigh_read_name(struct neigh *nb)
{
	u64 mac = readq(block(nb) + CW_NB_PEER_MAC);
	int i;

	for (i = 0; i < CW_NB_PEER_NAME_SIZE; i += 4)
		put_unaligned_le32(readl(block(nb) + CW_NB_PEER_NAME + i), nb->name + i);
	for (i = 0; i < ETH_ALEN; i++)
		nb->mac[i] = mac >> 8 * i;
}

static struct neigh_link *link_of(struct neigh *nb)
{
	return rcu_dereference_protected(nb->link, lockdep_is_held(&neigh_mutex));
}

void neigh_free(struct kref *ref)
{
	struct neigh *nb = container_of(ref, struct neigh, ref);

	put_device(nb->parent);
	kfree_rcu(nb, rcu);
}

/* Queued work holds a reference. */
void neigh_queue(struct neigh *nb)
{
	if (kref_get_unless_zero(&nb->ref) && !queue_work(neigh_wq, &nb->work))
		kref_put(&nb->ref, neigh_free);
}

/* Drops one use. Any context. */
void neigh_link_put(struct neigh_link *link)
{
	struct neigh *nb = link->neigh;

	if (refcount_dec_and_test(&link->users) || (READ_ONCE(link->pinned) && refcount_read(&link->users) == 1))
		neigh_queue(nb);
}

static const char *gone_because(u32 reason)
{
	switch (reason) {
	case CW_NB_REASON_LEFT:
		return "its monitor has gone";
	case CW_NB_REASON_SILENT:
		return "its monitor doesn't report";
	case CW_NB_REASON_HUNG:
		return "it doesn't run";
	case CW_NB_REASON_OWN:
		return "this VM didn't run";
	case CW_NB_REASON_GIVEN_UP:
		return "it gave the connection up";
	case CW_NB_REASON_REGISTRY:
		return "the host daemon was replaced";
	default:
		return "nobody says why";
	}
}

static int read_extents(struct neigh *nb, struct neigh_link *link)
{
	struct neigh_dev *dev = nb->dev;
	void __iomem *at = block(nb);
	u64 start = dev->base + nb->slot * dev->stride, before = 0;
	u32 i;

	if (readq(at + CW_NB_PEER_WINDOW) != start)
		return -EINVAL;
	link->extents = readl(at + CW_NB_PEER_EXTENTS);
	if (!link->extents || link->extents > CW_NB_MAX_EXTENTS)
		return -EINVAL;
	for (i = 0; i < link->extents; i++) {
		u64 offset = readq(at + CW_NB_PEER_EXTENT + 16 * i);
		u64 size = readq(at + CW_NB_PEER_EXTENT + 16 * i + 8);

		if (!size || offset < before || offset >= dev->stride || size > dev->stride - offset ||
		    !PAGE_ALIGNED(offset | size))
			return -EINVAL;
		before = offset + size;
		link->extent[i].start = start + offset;
		link->extent[i].end = start + before - 1;
	}
	return 0;
}

static bool header_agrees(struct neigh *nb, const struct neigh_link *link)
{
	struct neigh_dev *dev = nb->dev;
	const void *at = link->segment;
	u32 low = min(dev->own, nb->slot), high = max(dev->own, nb->slot);

	return neigh_load_acquire(at) == CW_NB_MAGIC &&
	       neigh_load(at + 8) == ((u64)dev->entries << 32 | CW_NB_VERSION) &&
	       neigh_load(at + 16) == link->epoch && neigh_load(at + 24) == dev->base &&
	       neigh_load(at + 32) == dev->stride && neigh_load(at + 40) == ((u64)high << 32 | low) &&
	       neigh_load(at + 48) == CW_NB_SEGMENT_SIZE(dev->entries);
}

static void *ready_word(const struct neigh_link *link, unsigned int side)
{
	return link->segment + CW_NB_READY + side * CW_NB_READY_STRIDE;
}

static void link_unmap(struct neigh_link *link)
{
	if (link->segment)
		memunmap(link->segment);
	link->segment = NULL;
	neigh_window_unmap(link);
}

/* Accepts an offer. If that fails, the offer stays until the connection is gone: ending it would only cause the next offer. */
static int prepare(struct neigh *nb, u32 epoch)
{
	struct neigh_dev *dev = nb->dev;
	struct neigh_link *link;
	const char *what;
	int ret;

	nb->latest = epoch;
	link = kzalloc(sizeof(*link), GFP_KERNEL);
	if (!link)
		return -ENOMEM;
	link->neigh = nb;
	link->epoch = epoch;
	link->entries = dev->entries;
	refcount_set(&link->users, 1);
	spin_lock_init(&link->pages_lock);
	spin_lock_init(&link->rx_lock);

	what = "its block of registers makes no sense";
	ret = read_extents(nb, link);
	if (ret)
		goto failed;
	neigh_read_name(nb);
	what = "its segment can't be mapped";
	link->segment = memremap(dev->segments + nb->slot * dev->segment_stride, CW_NB_SEGMENT_SIZE(dev->entries),
				 MEMREMAP_WB);
	ret = -ENOMEM;
	if (!link->segment)
		goto failed;
	what = "its segment's header differs from the registers";
	ret = -EPROTO;
	if (!header_agrees(nb, link))
		goto failed;
	what = "its window can't be mapped";
	ret = neigh_window_map(link);
	if (ret)
		goto failed;
	what = "there is no memory for its rings";
	ret = neigh_rings_make(link, dev->own, nb->slot);
	if (ret)
		goto failed;
	/* The block may have changed meanwhile, and this may be a mixture. */
	what = "it changed meanwhile";
	ret = -EAGAIN;
	if (readl(block(nb) + CW_NB_PEER_EPOCH) != epoch)
		goto failed;

	kref_get(&nb->ref);
	rcu_assign_pointer(nb->link, link);
	nb->state = NEIGH_OFFERED;
	WRITE_ONCE(nb->violation, NULL);
	neigh_store_release(ready_word(link, link->side), epoch);
	/* Write the own ready word before reading the peer's, so that one of the two sides sees the other. */
	virt_mb();
	neigh_signal(nb);
	return 0;
failed:
	dev_warn(nb->parent, "neighbour %u (%s): connection %u can't be taken up (%d): %s\n", nb->slot, nb->name, epoch, ret,
		 what);
	neigh_rings_free(link);
	link_unmap(link);
	kfree(link);
	return ret;
}

/* From now on accepts posts of a user, and passes messages to it. */
void neigh_user_live(struct neigh *nb, struct neigh_user *user)
{
	struct neigh_attached *at = &nb->attached[user->protocol];

	at->outstanding = 0;
	at->wants_room = false;
	at->share = max_t(u32, nb->dev->entries * user->share / 16, 1);
	spin_lock_irq(&nb->tx_lock);
	at->live = true;
	spin_unlock_irq(&nb->tx_lock);
	if (user->ops->live)
		user->ops->live(nb, at->priv);
}

/* The poll must not run. */
void neigh_user_dead(struct neigh *nb, struct neigh_user *user)
{
	struct neigh_attached *at = &nb->attached[user->protocol];
	struct neigh_link *link = link_of(nb);

	if (!at->live)
		return;
	spin_lock_irq(&nb->tx_lock);
	at->live = false;
	spin_unlock_irq(&nb->tx_lock);
	local_bh_disable();
	neigh_fail_sent(nb, link, user->protocol);
	local_bh_enable();
	if (user->ops->dead)
		user->ops->dead(nb, at->priv);
}

static void begin(struct neigh *nb)
{
	struct neigh_link *link = link_of(nb);
	int i;

	nb->state = NEIGH_LIVE;
	nb->slept_at = 0;
	nb->spin_ns = 0;
	spin_lock_irq(&link->rx_lock);
	WRITE_ONCE(link->open, true);
	spin_unlock_irq(&link->rx_lock);
	spin_lock_irq(&nb->tx_lock);
	nb->sending = link;
	spin_unlock_irq(&nb->tx_lock);
	dev_info(nb->parent, "neighbour %u (%s): connection %u\n", nb->slot, nb->name, link->epoch);
	for (i = 1; i < NEIGH_PROTOCOLS; i++)
		if (nb->attached[i].user)
			neigh_user_live(nb, nb->attached[i].user);
	napi_enable(&nb->napi);
	WRITE_ONCE(nb->polling, true);
	/* Messages may be there already, without a signal. */
	local_bh_disable();
	napi_schedule(&nb->napi);
	local_bh_enable();
}

void neigh_end(struct neigh *nb, const char *why)
{
	struct neigh_link *link = link_of(nb);
	bool live = nb->state == NEIGH_LIVE;
	int i;

	if (nb->state != NEIGH_OFFERED && !live)
		return;
	dev_info(nb->parent, "neighbour %u (%s): connection %u is over: %s\n", nb->slot, nb->name, link->epoch, why);
	nb->state = NEIGH_ENDED;
	spin_lock_irq(&nb->tx_lock);
	nb->sending = NULL;
	spin_unlock_irq(&nb->tx_lock);
	spin_lock_irq(&link->rx_lock);
	WRITE_ONCE(link->open, false);
	spin_unlock_irq(&link->rx_lock);
	if (live) {
		WRITE_ONCE(nb->polling, false);
		napi_disable(&nb->napi);
		del_timer_sync(&nb->room_timer);
		for (i = 1; i < NEIGH_PROTOCOLS; i++)
			if (nb->attached[i].user)
				neigh_user_dead(nb, nb->attached[i].user);
	}
	/* All contexts that saw it open have finished with the segment and the doorbell. */
	synchronize_rcu();
	memunmap(link->segment);
	link->segment = NULL;
	/* The connection's own use. */
	neigh_link_put(link);
}

/* The device has no driver, or another one. The function still exists, unless it was removed from the bus. */
static void release_kept(struct neigh *nb, u32 epoch)
{
	if (!nb->kept_block)
		return;
	if (device_is_registered(nb->parent))
		writel(epoch, nb->kept_block + CW_NB_PEER_RELEASE);
	iounmap(nb->kept_block);
	nb->kept_block = NULL;
}

/* The link has no users any more: unmaps it, and notifies the registry. */
static void release(struct neigh *nb, struct neigh_link *link)
{
	bool pinned = link->pinned;

	/* The last reference to a page may still be returning; see core_window.c. */
	if (!neigh_window_idle(link)) {
		kref_get(&nb->ref);
		if (!queue_delayed_work(neigh_wq, &nb->retry_release, msecs_to_jiffies(10)))
			kref_put(&nb->ref, neigh_free);
		return;
	}
	rcu_assign_pointer(nb->link, NULL);
	synchronize_rcu();
	link_unmap(link);
	neigh_rings_free(link);
	nb->state = NEIGH_WAITING;
	if (nb->dev)
		writel(link->epoch, block(nb) + CW_NB_PEER_RELEASE);
	else
		release_kept(nb, link->epoch);
	kfree_rcu(link, rcu);
	wake_up_all(&neigh_released);
	kref_put(&nb->ref, neigh_free);
	if (pinned)
		module_put(THIS_MODULE);
}

/* Follows the registers, the segment, and violations found since. */
void neigh_look(struct neigh *nb)
{
	struct neigh_link *link = link_of(nb);
	const char *violation;
	u32 state, epoch;

	if (nb->state == NEIGH_ENDED && !refcount_read(&link->users)) {
		release(nb, link);
		link = link_of(nb);
	}
	if (link && link->pinned && nb->state != NEIGH_ENDED && refcount_read(&link->users) == 1) {
		link->pinned = false;
		module_put(THIS_MODULE);
	}
	if (!nb->dev || nb->dev->going)
		return;

	violation = READ_ONCE(nb->violation);
	if (violation && link)
		neigh_end(nb, violation);

	neigh_read_common(nb);
	epoch = readl(block(nb) + CW_NB_PEER_EPOCH);
	state = readl(block(nb) + CW_NB_PEER_STATE);
	if (link && (nb->state == NEIGH_OFFERED || nb->state == NEIGH_LIVE)) {
		if (state == CW_NB_PEER_NONE || epoch != link->epoch)
			neigh_end(nb, "there is another one");
		else if (state == CW_NB_PEER_GONE)
			neigh_end(nb, gone_because(readl(block(nb) + CW_NB_PEER_REASON)));
	} else if (!link && state == CW_NB_PEER_OFFERED && epoch > nb->latest) {
		if (prepare(nb, epoch) == -EAGAIN)
			neigh_queue(nb);
	} else if (!link && state == CW_NB_PEER_GONE) {
		writel(epoch, block(nb) + CW_NB_PEER_RELEASE);
	}
	link = link_of(nb);
	if (nb->state == NEIGH_OFFERED && neigh_load_acquire(ready_word(link, !link->side)) == link->epoch)
		begin(nb);
}

static void look_and_put(struct neigh *nb)
{
	mutex_lock(&neigh_mutex);
	neigh_look(nb);
	mutex_unlock(&neigh_mutex);
	kref_put(&nb->ref, neigh_free);
}

void neigh_work(struct work_struct *work)
{
	look_and_put(container_of(work, struct neigh, work));
}

void neigh_retry_release(struct work_struct *work)
{
	look_and_put(container_of(to_delayed_work(work), struct neigh, retry_release));
}

/*
 * Removes the device. A window with outstanding pages stays mapped until they return, without the device and with the module:
 * this asks the monitor to keep it, and release() ends that. Returns false if that isn't possible, for example if the module is
 * unloaded as well: the caller must then wait for the pages.
 */
bool neigh_detach(struct neigh *nb)
{
	struct pci_dev *pdev = nb->dev->pdev;
	struct neigh_link *link = link_of(nb);

	if (link) {
		dev_warn(nb->parent, "neighbour %u (%s): pages of it are still in use; its window stays until they are back\n",
			 nb->slot, nb->name);
		if (!nb->kept_block)
			nb->kept_block = ioremap(pci_resource_start(pdev, CW_NB_BAR_REGISTERS) + CW_NB_PEERS +
						 nb->slot * CW_NB_PEER_STRIDE, CW_NB_PEER_STRIDE);
		if (!nb->kept_block)
			return false;
		if (!link->pinned && !try_module_get(THIS_MODULE)) {
			iounmap(nb->kept_block);
			nb->kept_block = NULL;
			return false;
		}
		link->pinned = true;
		writel(link->epoch, nb->kept_block + CW_NB_PEER_KEEP);
	}
	nb->dev = NULL;
	WRITE_ONCE(nb->doorbell, NULL);
	return true;
}
