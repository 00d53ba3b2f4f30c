// SPDX-License-Identifier: GPL-2.0
/*
 * Rings: messages go out, come in, and are given back. The protocol is that of the crate `neighbour` (devices/neighbour/src/channel.rs
 * and ring.rs); docs/neighbours.md has its tables.
 *
 * All that the peer writes is read once, into private memory, and checked there; what breaks the rules ends the link, with a
 * sentence in the kernel's log. Barriers are the virt_ ones: the other side is another VM, whatever this kernel has been built for.
 *
 * One NAPI per neighbour takes completions and messages. When there is nothing it may look for a little longer (adaptively: only
 * where that has paid off lately), then it says what it sleeps for, looks once more, and sleeps until the peer signals.
 */
#include <linux/ktime.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "core.h"

#define MESSAGE		sizeof(struct cw_nb_message)
#define COMPLETION	sizeof(struct cw_nb_completion)
#define NO_ID		U32_MAX

static void *entry(const struct neigh_link *link, const struct neigh_ring *ring, u32 number, size_t size)
{
	return ring->first + (number & (link->entries - 1)) * size;
}

static bool ready(const struct neigh_link *link, const struct neigh_ring *ring, u32 number, size_t size)
{
	/* The stamp is the last word. */
	return neigh_load_acquire(entry(link, ring, number, size) + size - 8) == neigh_stamp(link->epoch, number);
}

/* Makes the own ends of both directions, in private memory only. */
int neigh_rings_make(struct neigh_link *link, u32 own, u32 peer)
{
	void *direction[2];
	void *mine, *theirs;
	u32 i;

	link->side = own < peer ? 0 : 1;
	direction[0] = link->segment + CW_NB_DIRECTIONS;
	direction[1] = direction[0] + CW_NB_DIRECTION_SIZE(link->entries);
	mine = direction[link->side];
	theirs = direction[!link->side];

	link->tx = kvcalloc(link->entries, sizeof(*link->tx), GFP_KERNEL);
	link->rx = kvcalloc(link->entries, sizeof(*link->rx), GFP_KERNEL);
	if (!link->tx || !link->rx) {
		neigh_rings_free(link);
		return -ENOMEM;
	}
	for (i = 0; i < link->entries; i++) {
		link->tx[i].next = i + 1 < link->entries ? i + 1 : NO_ID;
		link->rx[i].link = link;
	}
	link->free_id = 0;
	link->taken_word = mine + CW_NB_TAKEN;
	link->out.first = mine + CW_NB_MESSAGES;
	link->out.sleeps = mine + CW_NB_RECEIVER_SLEEPS;
	link->returned.first = mine + CW_NB_MESSAGES + link->entries * MESSAGE;
	link->returned.sleeps = mine + CW_NB_SENDER_SLEEPS;
	link->told_word = theirs + CW_NB_TAKEN;
	link->in.first = theirs + CW_NB_MESSAGES;
	link->in.sleeps = theirs + CW_NB_RECEIVER_SLEEPS;
	link->back.first = theirs + CW_NB_MESSAGES + link->entries * MESSAGE;
	link->back.sleeps = theirs + CW_NB_SENDER_SLEEPS;
	return 0;
}

void neigh_rings_free(struct neigh_link *link)
{
	kvfree(link->tx);
	kvfree(link->rx);
	link->tx = NULL;
	link->rx = NULL;
}

/* Whether the consumer sleeps for one of the entries written since the last call. */
static bool must_signal(struct neigh_link *link, struct neigh_ring *ring)
{
	u64 word;
	u32 behind;
	bool wanted;

	if (ring->unannounced == ring->next)
		return false;
	/* Entries before the look at who sleeps; pairs with the fence in arm(). */
	virt_mb();
	word = neigh_load(ring->sleeps);
	behind = (u32)word - 1 - ring->unannounced;
	wanted = word >> 32 == link->epoch && behind < ring->next - ring->unannounced;
	ring->unannounced = ring->next;
	return wanted;
}

void neigh_signal(struct neigh *nb)
{
	void __iomem *doorbell = READ_ONCE(nb->doorbell);

	if (doorbell) {
		nb->signals++;
		writel(1, doorbell);
	}
}

/* Sending */

static bool out_has_room(const struct neigh_link *link, u32 count)
{
	return link->out.next - link->taken <= link->entries - count;
}

/* False when the peer says what can't be. */
static bool read_taken(struct neigh_link *link)
{
	u64 word = neigh_load_acquire(link->taken_word);
	u32 says = word;

	if (word >> 32 != link->epoch)
		return true;	/* not said in this epoch yet */
	if (says - link->taken > link->out.next - link->taken)
		return false;
	link->taken = says;
	return true;
}

static void violated(struct neigh *nb, const char *what)
{
	/* The first counts. */
	cmpxchg(&nb->violation, NULL, what);
	neigh_queue(nb);
}

static bool has_room(struct neigh *nb, struct neigh_link *link, const struct neigh_attached *user, u32 count)
{
	if (user->outstanding >= user->share || link->free_id == NO_ID)
		return false;
	if (out_has_room(link, count))
		return true;
	if (!read_taken(link)) {
		violated(nb, "it says that it took messages which were never sent");
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
		/* Messages that were taken, and are kept by their readers, make room without a completion that would tell. */
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
	/* From the last to the first, so that the list is seen whole or not at all. */
	for (i = count - 1; i >= 0; i--) {
		u32 number = link->out.next + i;
		void *at = entry(link, &link->out, number, MESSAGE);
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
		signal = must_signal(link, &link->out);
	spin_unlock_irqrestore(&nb->tx_lock, flags);
	link = rcu_dereference(nb->link);
	if (link) {
		spin_lock_irqsave(&link->rx_lock, flags);
		if (link->open)
			signal |= must_signal(link, &link->back);
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

/* Takes what came back; the number, or less than 0 when the peer broke the rules. */
static int take_returned(struct neigh *nb, struct neigh_link *link, int most)
{
	int count = 0;

	while (count < most && ready(link, &link->returned, link->returned.next, COMPLETION)) {
		u64 word = neigh_load(entry(link, &link->returned, link->returned.next, COMPLETION));
		u32 id = word, status = word >> 32;
		struct neigh_tx *tx;
		void *cookie;
		u8 user;

		if (id >= link->entries || !READ_ONCE(link->tx[id].outstanding)) {
			violated(nb, "it gave back a message that is not outstanding");
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

			/* Only this side says that a link died. */
			at->user->ops->sent(nb, at->priv, cookie, status == NEIGH_DEAD ? NEIGH_MALFORMED : status);
		}
		count++;
	}
	return count;
}

/* Everything (user 0), or what one user has outstanding, comes back; bottom halves are off, and the poll doesn't run. */
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
		/* The id stays taken until the peer gives it back. */
		tx->user = 0;
		at->outstanding--;
		spin_unlock_irq(&nb->tx_lock);
		at->user->ops->sent(nb, at->priv, tx->cookie, NEIGH_DEAD);
	}
}

/* Receiving */

static void tell_taken(struct neigh_link *link)
{
	if (link->told != link->in.next) {
		link->told = link->in.next;
		neigh_store_release(link->told_word, (u64)link->epoch << 32 | link->told);
	}
}

/* Finds the window of a part; takes a reference to a third VM's. */
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
	/* Passed on back to where it came from: there is no window of the own memory. */
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
		/* One that is over may still be mapped, but is not named anew. */
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
 * Takes the next message, checked. 1: there is one; 0: there is none; -ENXIO: there is one that names memory which isn't mapped here;
 * -EPROTO: the peer broke the rules.
 */
static int take_message(struct neigh *nb, struct neigh_link *link, struct neigh_msg *msg)
{
	struct neigh_rx *rx = NULL;
	bool reachable = true;
	const char *what;
	u32 count = 0;

	for (;;) {
		u32 number = link->in.next + count;
		void *at = entry(link, &link->in, number, MESSAGE);
		u64 words[3];
		u16 flags;
		u32 id;
		int ret;

		if (!ready(link, &link->in, number, MESSAGE)) {
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
	/* A quarter of the ring at a time: the word moves to the sender's processor when it is read. */
	if (link->in.next - link->told >= link->entries / 4)
		tell_taken(link);
	return reachable ? 1 : -ENXIO;

broken:
	if (rx)
		drop_others(rx);
	violated(nb, what);
	return -EPROTO;
}

static void complete(struct neigh_link *link, u32 id, u32 status, bool announce)
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
		/* There is room: the sender has no more outstanding than the ring has entries, and no id is in it twice. */
		void *at = entry(link, &link->back, link->back.next, COMPLETION);

		neigh_store(at, (u64)status << 32 | id);
		neigh_store_release(at + 8, neigh_stamp(link->epoch, link->back.next));
		link->back.next++;
		if (announce)
			signal = must_signal(link, &link->back);
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
	complete(link, id, status, true);
}
EXPORT_SYMBOL_GPL(neigh_complete);

void neigh_complete_quietly(struct neigh_link *link, u32 id, u32 status)
{
	complete(link, id, status, false);
}
EXPORT_SYMBOL_GPL(neigh_complete_quietly);

/* Takes and hands out messages; the number, or less than 0. */
static int take_messages(struct neigh *nb, struct neigh_link *link, int most)
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
		/* The link has a reference of its own as long as this runs. */
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

/* The poll */

static bool anything(struct neigh_link *link)
{
	return ready(link, &link->returned, link->returned.next, COMPLETION) ||
	       ready(link, &link->in, link->in.next, MESSAGE);
}

/* Says what this side sleeps for. True: it may sleep. */
static bool arm(struct neigh_link *link)
{
	tell_taken(link);
	neigh_store(link->in.sleeps, neigh_stamp(link->epoch, link->in.next));
	neigh_store(link->returned.sleeps, neigh_stamp(link->epoch, link->returned.next));
	/* That before the last look; pairs with the fence in must_signal() of the peer. */
	virt_mb();
	return !anything(link);
}

/* Looks a little longer where that has paid off; true when something came. */
static bool spin(struct neigh *nb, struct neigh_link *link)
{
	u64 start;

	if (!nb->spin_ns || num_online_cpus() == 1)
		return false;
	nb->spins++;
	start = ktime_get_ns();
	while (ktime_get_ns() - start < nb->spin_ns) {
		if (anything(link)) {
			nb->spins_won++;
			return true;
		}
		if (need_resched())
			break;
		cpu_relax();
	}
	nb->spin_ns /= 2;
	if (nb->spin_ns < 1000)
		nb->spin_ns = 0;
	return false;
}

/* It slept: had it better looked a little longer? */
static void woken(struct neigh *nb)
{
	u32 most = READ_ONCE(neigh_spin_us) * NSEC_PER_USEC;

	if (!nb->slept_at)
		return;
	nb->wakeups++;
	if (ktime_get_ns() - nb->slept_at < most)
		nb->spin_ns = min(most, nb->spin_ns ? nb->spin_ns * 2 : most / 4);
	nb->slept_at = 0;
}

static void give_room(struct neigh *nb, struct neigh_link *link)
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

int neigh_poll(struct napi_struct *napi, int budget)
{
	struct neigh *nb = container_of(napi, struct neigh, napi);
	struct neigh_link *link;
	int came, got = 0, rounds = 0, i;

	rcu_read_lock();
	link = rcu_dereference(nb->link);
	if (!link || !READ_ONCE(link->open)) {
		napi_complete_done(napi, 0);
		rcu_read_unlock();
		return 0;
	}
	nb->polls++;
	woken(nb);
again:
	came = take_returned(nb, link, 256);
	if (came >= 0 && budget > got) {
		int ret = take_messages(nb, link, budget - got);

		if (ret < 0)
			came = ret;
		else
			got += ret;
	}
	give_room(nb, link);
	for (i = 1; i < NEIGH_PROTOCOLS; i++) {
		struct neigh_attached *at = &nb->attached[i];

		if (at->user && READ_ONCE(at->live) && at->user->ops->batch_end)
			at->user->ops->batch_end(nb, at->priv);
	}
	neigh_kick(nb);
	if (came < 0) {
		/* The work that ends the link has been asked for. */
		napi_complete_done(napi, min(got, budget - 1));
		rcu_read_unlock();
		return min(got, budget - 1);
	}
	if (got >= budget || came == 256 || ++rounds > 8) {
		rcu_read_unlock();
		return budget;
	}
	/* A signal that comes between arm() and the end schedules the poll anew. */
	if (spin(nb, link) || !arm(link))
		goto again;
	nb->slept_at = ktime_get_ns();
	napi_complete_done(napi, got);
	rcu_read_unlock();
	return got;
}
