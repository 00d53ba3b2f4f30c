// SPDX-License-Identifier: GPL-2.0
/*
 * Rings and the poll. The protocol is that of the crate `neighbour` (devices/neighbour/src/channel.rs and ring.rs);
 * docs/design/specs/neighbours-abi.md has its tables.
 *
 * Everything that the peer writes is read once, into private memory, and checked there. A violation of the protocol ends the
 * link, with a sentence in the kernel's log. Barriers are the virt_ ones: the other side is another VM, whatever this kernel was
 * built for.
 *
 * One NAPI per neighbour processes completions and messages. If there are none, it may poll a little longer, adaptively. Then it
 * stores the stamp that it sleeps for, polls once more, and sleeps until the peer signals.
 */
#include <linux/ktime.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "core.h"

/* Sets up the own ends of both directions, in private memory only. */
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
		link->tx[i].next = i + 1 < link->entries ? i + 1 : NEIGH_NO_ID;
		link->rx[i].link = link;
	}
	link->free_id = 0;
	link->taken_word = mine + CW_NB_TAKEN;
	link->out.first = mine + CW_NB_MESSAGES;
	link->out.sleeps = mine + CW_NB_RECEIVER_SLEEPS;
	link->returned.first = mine + CW_NB_MESSAGES + link->entries * NEIGH_MESSAGE;
	link->returned.sleeps = mine + CW_NB_SENDER_SLEEPS;
	link->told_word = theirs + CW_NB_TAKEN;
	link->in.first = theirs + CW_NB_MESSAGES;
	link->in.sleeps = theirs + CW_NB_RECEIVER_SLEEPS;
	link->back.first = theirs + CW_NB_MESSAGES + link->entries * NEIGH_MESSAGE;
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
bool neigh_must_signal(struct neigh_link *link, struct neigh_ring *ring)
{
	u64 word;
	u32 behind;
	bool wanted;

	if (ring->unannounced == ring->next)
		return false;
	/* Writes the entries before it reads the consumer's word; pairs with the fence in arm(). */
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

void neigh_violated(struct neigh *nb, const char *what)
{
	/* Only the first violation counts. */
	cmpxchg(&nb->violation, NULL, what);
	neigh_queue(nb);
}

/* The poll */

static bool anything(struct neigh_link *link)
{
	return neigh_ready(link, &link->returned, link->returned.next, NEIGH_COMPLETION) ||
	       neigh_ready(link, &link->in, link->in.next, NEIGH_MESSAGE);
}

/* Stores the stamps that this side sleeps for. Returns true if it may sleep. */
static bool arm(struct neigh_link *link)
{
	neigh_tell_taken(link);
	neigh_store(link->in.sleeps, neigh_stamp(link->epoch, link->in.next));
	neigh_store(link->returned.sleeps, neigh_stamp(link->epoch, link->returned.next));
	/* Stores them before the last poll; pairs with the fence in the peer's neigh_must_signal(). */
	virt_mb();
	return !anything(link);
}

/* Whether to poll a little longer before a sleep. */
static bool spins(const struct neigh *nb)
{
	return nb->spin_ns && num_online_cpus() > 1;
}

/* Polls a little longer. Returns true if something arrived. */
static bool spin(struct neigh *nb, struct neigh_link *link)
{
	u64 start;

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

/* After a sleep, adapts the time of later spins: longer, if this sleep was shorter than a spin may be. */
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
	came = neigh_take_returned(nb, link, 256);
	if (came >= 0 && budget > got) {
		int ret = neigh_take_messages(nb, link, budget - got);

		if (ret < 0)
			came = ret;
		else
			got += ret;
	}
	neigh_give_room(nb, link);
	for (i = 1; i < NEIGH_PROTOCOLS; i++) {
		struct neigh_attached *at = &nb->attached[i];

		if (at->user && READ_ONCE(at->live) && at->user->ops->batch_end)
			at->user->ops->batch_end(nb, at->priv);
	}
	neigh_kick(nb);
	if (came < 0) {
		/* The work that ends the link is queued. */
		napi_complete_done(napi, min(got, budget - 1));
		rcu_read_unlock();
		return min(got, budget - 1);
	}
	/* Poll again. Received messages go up the stack first. */
	if (got >= budget || came == 256 || ++rounds > 8 || (got && spins(nb))) {
		rcu_read_unlock();
		return budget;
	}
	/* A signal between arm() and the end schedules the poll again. */
	if ((spins(nb) && spin(nb, link)) || !arm(link))
		goto again;
	nb->slept_at = ktime_get_ns();
	napi_complete_done(napi, got);
	rcu_read_unlock();
	return got;
}
