// SPDX-License-Identifier: GPL-2.0
/*
 * Receiving and completing messages. An entry is read once, into private memory, and checked there. Only the poll receives
 * messages. Any context completes them.
 */
#include "core.h"

void neigh_tell_taken(struct neigh_link *link)
{
	if (link->told != link->in.next) {
		link->told = link->in.next;
		neigh_store_release(link->told_word, (u64)link->epoch << 32 | link->told);
	}
}

/* Finds the window of a part. Acquires a reference to a third VM's. */
static int find_window(struct neigh *nb, struct neigh_link *link, struct neigh_rx *rx, const struct neigh_part *part)
{
	struct neigh_dev *dev = nb->dev;
	struct neigh_link *other;
	u64 slot;
	int i;

	if (neigh_window_has(link, part->address, part->length))
		return 0;
	if (!part->length || part->address < dev->base)
		return -EPROTO;
	slot = (part->address - dev->base) / dev->stride;
	if (slot >= dev->slots || slot == nb->slot)
		return -EPROTO;
	/* A part that crosses into the next window is no VM's memory. */
	if (part->length > dev->stride - ((part->address - dev->base) & (dev->stride - 1)))
		return -EPROTO;
	/* Passed back to its origin: there is no window of this VM's own memory. */
	if (slot == dev->own || !neigh_in_common(nb, slot))
		return -ENXIO;
	for (i = 0; i < NEIGH_MOST_OTHERS; i++) {
		if (rx->others[i]) {
			if (neigh_window_has(rx->others[i], part->address, part->length))
				return 0;
			continue;
		}
		if (!dev->neighs[slot])
			return -ENXIO;
		other = rcu_dereference(dev->neighs[slot]->link);
		/* A window of an ended link may still be mapped, but gets no new references. */
		if (!other || !READ_ONCE(other->open) || !neigh_window_has(other, part->address, part->length) ||
		    !refcount_inc_not_zero(&other->users))
			return -ENXIO;
		rx->others[i] = other;
		return 0;
	}
	return -ENXIO;
}

static void drop_others(struct neigh_rx *rx)
{
	int i;

	for (i = 0; i < NEIGH_MOST_OTHERS; i++) {
		if (rx->others[i])
			neigh_link_put(rx->others[i]);
		rx->others[i] = NULL;
	}
}

/*
 * Receives and checks the next message. 1: received; 0: none; -ENXIO: received, and it names memory that isn't mapped here;
 * -EPROTO: the peer violated the protocol.
 */
static int take_message(struct neigh *nb, struct neigh_link *link, struct neigh_msg *msg)
{
	struct neigh_rx *rx = NULL;
	bool reachable = true;
	const char *what;
	u32 count = 0;

	for (;;) {
		u32 number = link->in.next + count;
		void *at = neigh_entry(link, &link->in, number, NEIGH_MESSAGE);
		u64 words[3];
		u16 flags;
		u32 id;
		int ret;

		if (!neigh_ready(link, &link->in, number, NEIGH_MESSAGE)) {
			if (!count)
				return 0;
			what = "it sent a message without its later parts";
			goto broken;
		}
		words[0] = neigh_load(at);
		words[1] = neigh_load(at + 8);
		words[2] = neigh_load(at + 16);
		flags = words[1] >> 32;
		id = words[2];
		if (!count) {
			if (id >= link->entries || READ_ONCE(link->rx[id].busy)) {
				what = "it sent a message with an impossible id";
				goto broken;
			}
			rx = &link->rx[id];
			msg->id = id;
			msg->kind = words[1] >> 48;
			msg->note = words[2] >> 32;
			msg->bytes = 0;
		} else if (id != msg->id) {
			what = "it sent a message whose id changes";
			goto broken;
		}
		if (flags & ~CW_NB_FLAG_MORE) {
			what = "it sent a message with unknown flags";
			goto broken;
		}
		if (count >= CW_NB_MOST_PARTS || count >= link->entries) {
			what = "it sent a message with too many parts";
			goto broken;
		}
		msg->parts[count].address = words[0];
		msg->parts[count].length = words[1];
		ret = find_window(nb, link, rx, &msg->parts[count]);
		if (ret == -EPROTO) {
			what = "it sent an address that is not its memory";
			goto broken;
		}
		if (ret)
			reachable = false;
		msg->bytes += msg->parts[count].length;
		count++;
		if (!(flags & CW_NB_FLAG_MORE))
			break;
	}
	msg->count = count;
	link->in.next += count;
	/* Once per quarter of the ring: the sender's read transfers the word's cache line. */
	if (link->in.next - link->told >= link->entries / 4)
		neigh_tell_taken(link);
	return reachable ? 1 : -ENXIO;

broken:
	if (rx)
		drop_others(rx);
	neigh_violated(nb, what);
	return -EPROTO;
}

static void give_back(struct neigh_link *link, u32 id, u32 status, bool announce)
{
	struct neigh_link *others[NEIGH_MOST_OTHERS];
	struct neigh_rx *rx = &link->rx[id];
	struct neigh *nb = link->neigh;
	bool signal = false;
	unsigned long flags;
	int i;

	rcu_read_lock();
	spin_lock_irqsave(&link->rx_lock, flags);
	if (WARN_ON_ONCE(!rx->busy)) {
		spin_unlock_irqrestore(&link->rx_lock, flags);
		rcu_read_unlock();
		return;
	}
	memcpy(others, rx->others, sizeof(others));
	memset(rx->others, 0, sizeof(rx->others));
	WRITE_ONCE(rx->busy, false);
	if (link->open) {
		/* There is room: the sender has at most as many outstanding as the ring has entries, and each id occurs once. */
		void *at = neigh_entry(link, &link->back, link->back.next, NEIGH_COMPLETION);

		neigh_store(at, (u64)status << 32 | id);
		neigh_store_release(at + 8, neigh_stamp(link->epoch, link->back.next));
		link->back.next++;
		if (announce)
			signal = neigh_must_signal(link, &link->back);
	}
	spin_unlock_irqrestore(&link->rx_lock, flags);
	if (signal)
		neigh_signal(nb);
	for (i = 0; i < NEIGH_MOST_OTHERS; i++)
		if (others[i])
			neigh_link_put(others[i]);
	neigh_link_put(link);
	rcu_read_unlock();
}

void neigh_complete(struct neigh_link *link, u32 id, u32 status)
{
	give_back(link, id, status, true);
}
EXPORT_SYMBOL_GPL(neigh_complete);

void neigh_complete_quietly(struct neigh_link *link, u32 id, u32 status)
{
	give_back(link, id, status, false);
}
EXPORT_SYMBOL_GPL(neigh_complete_quietly);

/* Receives messages and passes them to users. Returns their number, or less than 0. */
int neigh_take_messages(struct neigh *nb, struct neigh_link *link, int most)
{
	struct neigh_msg msg;
	int count = 0;

	msg.neigh = nb;
	msg.link = link;
	while (count < most) {
		int ret = take_message(nb, link, &msg);
		struct neigh_attached *at;
		u8 protocol;

		if (ret == 0)
			break;
		if (ret == -EPROTO)
			return ret;
		count++;
		/* The link has a reference of its own while this runs. */
		refcount_inc(&link->users);
		WRITE_ONCE(link->rx[msg.id].busy, true);
		protocol = msg.kind >> 8;
		at = protocol < NEIGH_PROTOCOLS ? &nb->attached[protocol] : NULL;
		if (ret == -ENXIO)
			neigh_complete_quietly(link, msg.id, NEIGH_UNREACHABLE);
		else if (!at || !at->user || !READ_ONCE(at->live))
			neigh_complete_quietly(link, msg.id, NEIGH_NOBODY);
		else
			at->user->ops->receive(nb, at->priv, &msg);
	}
	return count;
}

