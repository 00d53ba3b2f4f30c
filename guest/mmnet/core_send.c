// SPDX-License-Identifier: GPL-2.0
/*
 * Posting messages, and processing their completions. All is under tx_lock, except the ring of completions, which the poll reads.
 */
#include <linux/jiffies.h>

#include "core.h"

static bool out_has_room(const struct neigh_link *link, u32 count)
{
	return link->out.next - link->taken <= link->entries - count;
}

/* Returns false if the peer's count is impossible. */
static bool read_taken(struct neigh_link *link)
{
	u64 word = neigh_load_acquire(link->taken_word);
	u32 says = word;

	if (word >> 32 != link->epoch)
		return true;	/* not written in this epoch yet */
	if (says - link->taken > link->out.next - link->taken)
		return false;
	link->taken = says;
	return true;
}

static bool has_room(struct neigh *nb, struct neigh_link *link, const struct neigh_attached *user, u32 count)
{
	if (user->outstanding >= user->share || link->free_id == NEIGH_NO_ID)
		return false;
	if (out_has_room(link, count))
		return true;
	if (!read_taken(link)) {
		neigh_violated(nb, "it says that it took messages which were never sent");
		return false;
	}
	return out_has_room(link, count);
}

int neigh_post(struct neigh *nb, const struct neigh_user *of, const struct neigh_part *parts, unsigned int count, u16 kind,
	       u32 note, void *cookie)
{
	struct neigh_attached *user = &nb->attached[of->protocol];
	struct neigh_link *link;
	unsigned long flags;
	int ret = 0, i;
	u32 id;

	if (!count || count > CW_NB_MOST_PARTS)
		return -EINVAL;
	for (i = 0; i < count; i++)
		if (!parts[i].length)
			return -EINVAL;

	spin_lock_irqsave(&nb->tx_lock, flags);
	link = nb->sending;
	if (!link || !user->live) {
		ret = -ENOTCONN;
		goto out;
	}
	if (count > link->entries) {
		ret = -EINVAL;
		goto out;
	}
	if (!has_room(nb, link, user, count)) {
		user->wants_room = true;
		/*
		 * A receiver that keeps messages makes room by taking entries, without a completion to signal it: so a timer
		 * checks.
		 */
		if (!timer_pending(&nb->room_timer))
			mod_timer(&nb->room_timer, jiffies + 1);
		ret = -ENOSPC;
		goto out;
	}
	id = link->free_id;
	link->free_id = link->tx[id].next;
	link->tx[id].cookie = cookie;
	link->tx[id].user = of->protocol;
	link->tx[id].outstanding = true;
	user->outstanding++;
	/* From the last to the first entry, so that the receiver sees all of the list or none. */
	for (i = count - 1; i >= 0; i--) {
		u32 number = link->out.next + i;
		void *at = neigh_entry(link, &link->out, number, NEIGH_MESSAGE);
		u64 more = i + 1 < count ? CW_NB_FLAG_MORE : 0;

		neigh_store(at, parts[i].address);
		neigh_store(at + 8, (u64)kind << 48 | more << 32 | parts[i].length);
		neigh_store(at + 16, (u64)note << 32 | id);
		neigh_store_release(at + 24, neigh_stamp(link->epoch, number));
	}
	link->out.next += count;
out:
	spin_unlock_irqrestore(&nb->tx_lock, flags);
	return ret;
}
EXPORT_SYMBOL_GPL(neigh_post);

unsigned int neigh_room(struct neigh *nb, const struct neigh_user *of)
{
	struct neigh_attached *user = &nb->attached[of->protocol];
	struct neigh_link *link;
	unsigned long flags;
	unsigned int room = 0;

	spin_lock_irqsave(&nb->tx_lock, flags);
	link = nb->sending;
	if (link && user->live && has_room(nb, link, user, CW_NB_MOST_PARTS))
		room = link->entries - (link->out.next - link->taken);
	spin_unlock_irqrestore(&nb->tx_lock, flags);
	return room;
}
EXPORT_SYMBOL_GPL(neigh_room);

void neigh_kick(struct neigh *nb)
{
	struct neigh_link *link;
	unsigned long flags;
	bool signal = false;

	rcu_read_lock();
	spin_lock_irqsave(&nb->tx_lock, flags);
	link = nb->sending;
	if (link)
		signal = neigh_must_signal(link, &link->out);
	spin_unlock_irqrestore(&nb->tx_lock, flags);
	link = rcu_dereference(nb->link);
	if (link) {
		spin_lock_irqsave(&link->rx_lock, flags);
		if (link->open)
			signal |= neigh_must_signal(link, &link->back);
		spin_unlock_irqrestore(&link->rx_lock, flags);
	}
	if (signal)
		neigh_signal(nb);
	rcu_read_unlock();
}
EXPORT_SYMBOL_GPL(neigh_kick);

void neigh_room_timer(struct timer_list *timer)
{
	struct neigh *nb = container_of(timer, struct neigh, room_timer);

	napi_schedule(&nb->napi);
}

/* Processes completions. Returns their number, or less than 0 if the peer violated the protocol. */
int neigh_take_returned(struct neigh *nb, struct neigh_link *link, int most)
{
	int count = 0;

	while (count < most && neigh_ready(link, &link->returned, link->returned.next, NEIGH_COMPLETION)) {
		u64 word = neigh_load(neigh_entry(link, &link->returned, link->returned.next, NEIGH_COMPLETION));
		u32 id = word, status = word >> 32;
		struct neigh_tx *tx;
		void *cookie;
		u8 user;

		if (id >= link->entries || !READ_ONCE(link->tx[id].outstanding)) {
			neigh_violated(nb, "it gave back a message that is not outstanding");
			return -EPROTO;
		}
		link->returned.next++;
		tx = &link->tx[id];
		spin_lock_irq(&nb->tx_lock);
		user = tx->user;
		cookie = tx->cookie;
		tx->outstanding = false;
		tx->next = link->free_id;
		link->free_id = id;
		if (user)
			nb->attached[user].outstanding--;
		spin_unlock_irq(&nb->tx_lock);
		if (user) {
			struct neigh_attached *at = &nb->attached[user];

			/* Only this side may report that a link died. */
			at->user->ops->sent(nb, at->priv, cookie, status == NEIGH_DEAD ? NEIGH_MALFORMED : status);
		}
		count++;
	}
	return count;
}

/* Fails all outstanding messages (user 0), or those of one user. Bottom halves are off, and the poll doesn't run. */
void neigh_fail_sent(struct neigh *nb, struct neigh_link *link, u8 only)
{
	u32 id;

	for (id = 0; id < link->entries; id++) {
		struct neigh_tx *tx = &link->tx[id];
		struct neigh_attached *at;

		if (!tx->outstanding || !tx->user || (only && tx->user != only))
			continue;
		at = &nb->attached[tx->user];
		spin_lock_irq(&nb->tx_lock);
		/* The id stays in use until the peer completes it. */
		tx->user = 0;
		at->outstanding--;
		spin_unlock_irq(&nb->tx_lock);
		at->user->ops->sent(nb, at->priv, tx->cookie, NEIGH_DEAD);
	}
}

void neigh_give_room(struct neigh *nb, struct neigh_link *link)
{
	int i;

	for (i = 1; i < NEIGH_PROTOCOLS; i++) {
		struct neigh_attached *at = &nb->attached[i];
		bool room;

		if (!READ_ONCE(at->wants_room))
			continue;
		spin_lock_irq(&nb->tx_lock);
		room = at->live && has_room(nb, link, at, CW_NB_MOST_PARTS);
		if (room)
			at->wants_room = false;
		else if (at->live && !timer_pending(&nb->room_timer))
			mod_timer(&nb->room_timer, jiffies + 1);
		spin_unlock_irq(&nb->tx_lock);
		if (room && at->user->ops->room)
			at->user->ops->room(nb, at->priv);
	}
}

