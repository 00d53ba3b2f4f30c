// SPDX-License-Identifier: GPL-2.0
/*
 * mmblk, client side: the life of a device. A device seeks its server by the VM's name, and requests the export by its name. From
 * its first session until it is disabled it is a disk, whatever happens to the server.
 *
 * When the connection ends, requests wait for up to wait_ms, and are sent again when the server returns. After that they fail
 * until it returns. If the export is volatile, writes that were completed and not flushed may be lost with the server: the next
 * flush then fails.
 */
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/xarray.h>

#include "mmblk_client.h"

/* Interval of attempts to attach, if the server refuses. */
#define MMBLK_SEEK_AGAIN	(HZ / 2)
/* Sizes beyond this are errors. */
#define MMBLK_MOST_DEVICE	BIT_ULL(60)

/* Protects devices, peers, and the states of both. Acquired after the core's own. */
DEFINE_MUTEX(mmblk_client_mutex);
static LIST_HEAD(mmblk_cpeers);
static LIST_HEAD(mmblk_devs);
static DEFINE_XARRAY_FLAGS(mmblk_numbers, XA_FLAGS_ALLOC | XA_FLAGS_LOCK_IRQ);

static struct mmblk_dev *mmblk_dev_get(u32 number)
{
	struct mmblk_dev *dev;
	unsigned long flags;

	xa_lock_irqsave(&mmblk_numbers, flags);
	dev = xa_load(&mmblk_numbers, number);
	if (dev)
		mmblk_users_get(&dev->users);
	xa_unlock_irqrestore(&mmblk_numbers, flags);
	return dev;
}

const char *mmblk_state_name(const struct mmblk_dev *dev)
{
	switch (READ_ONCE(dev->state)) {
	case MMBLK_SEEKING:
		return dev->disk ? "waiting" : "seeking";
	case MMBLK_LIVE:
		return "live";
	case MMBLK_FAILED:
		return "failed";
	default:
		return "going";
	}
}

/* Notifies user space (udev) of a change of the disk. */
static void mmblk_announce(struct mmblk_dev *dev)
{
	if (dev->added)
		kobject_uevent(&disk_to_dev(dev->disk)->kobj, KOBJ_CHANGE);
}

/* Lets requests continue: to the server, or to fail. */
static void mmblk_let_run(struct mmblk_dev *dev)
{
	if (!dev->disk)
		return;
	if (dev->quiesced)
		blk_mq_unquiesce_queue(dev->disk->queue);
	dev->quiesced = false;
	blk_mq_kick_requeue_list(dev->disk->queue);
}

/* Ends the session. Under the mutex, when no message of its connection arrives any more, or none that matters. */
static void mmblk_lose(struct mmblk_dev *dev, const char *why, bool dead)
{
	if (dev->state != MMBLK_LIVE) {
		if (dead && dev->disk) {
			mmblk_take_back(dev);
			blk_mq_kick_requeue_list(dev->disk->queue);
		}
		return;
	}
	WRITE_ONCE(dev->state, MMBLK_SEEKING);
	mmblk_count(&dev->counters, MMBLK_C_LOST, 1);
	pr_warn("mmblk%u: %s's %s is away: %s; requests wait %u ms\n", dev->number, dev->peer_name, dev->export,
		why, dev->wait_ms);
	blk_mq_quiesce_queue(dev->disk->queue);
	dev->quiesced = true;
	if (dead)
		mmblk_take_back(dev);
	mod_delayed_work(mmblk_wq, &dev->wait_work, msecs_to_jiffies(dev->wait_ms));
	mmblk_announce(dev);
}

static void mmblk_wait_work(struct work_struct *work)
{
	struct mmblk_dev *dev = container_of(to_delayed_work(work), struct mmblk_dev, wait_work);

	mutex_lock(&mmblk_client_mutex);
	if (dev->state == MMBLK_SEEKING && dev->disk) {
		pr_warn("mmblk%u: %s's %s isn't back after %u ms; requests fail\n", dev->number, dev->peer_name,
			dev->export, dev->wait_ms);
		WRITE_ONCE(dev->state, MMBLK_FAILED);
		mmblk_let_run(dev);
		mmblk_announce(dev);
	}
	mutex_unlock(&mmblk_client_mutex);
}

static void mmblk_timeout_work(struct work_struct *work)
{
	struct mmblk_dev *dev = container_of(work, struct mmblk_dev, timeout_work);

	mutex_lock(&mmblk_client_mutex);
	if ((dev->state == MMBLK_LIVE || dev->state == MMBLK_GOING) && dev->peer && dev->peer->live) {
		pr_warn("mmblk%u: %s hasn't answered a request for %u ms; the connection is given up\n",
			dev->number, dev->peer_name, dev->timeout_ms);
		neigh_give_up(dev->peer->neigh, "it doesn't answer a request");
	}
	mutex_unlock(&mmblk_client_mutex);
}

static void mmblk_ask_done(struct mmblk_post *post, u32 status)
{
	struct mmblk_ask *ask = container_of(post, struct mmblk_ask, post);
	struct mmblk_dev *dev = ask->dev;
	unsigned long flags;

	if (ask->kind == MMBLK_ATTACH) {
		spin_lock_irqsave(&dev->answer_lock, flags);
		dev->asking = false;
		if (status && status != NEIGH_DEAD && status != dev->last_refusal) {
			dev->last_refusal = status;
			pr_warn("mmblk%u: %s refuses to serve %s: %s\n", dev->number, dev->peer_name, dev->export,
				status == MMBLK_NOEXPORT ? "no export of that name for this VM" :
				status == MMBLK_BAD_VERSION ? "it has another version" :
				status == NEIGH_NOBODY ? "mmblk isn't loaded there" : "it is busy, or not well");
		}
		spin_unlock_irqrestore(&dev->answer_lock, flags);
		if (status && status != NEIGH_DEAD)
			mod_delayed_work(mmblk_wq, &dev->seek_work, MMBLK_SEEK_AGAIN);
	}
	kfree(ask);
	mmblk_users_put(&dev->users);
}

static int mmblk_ask(struct mmblk_dev *dev, struct mmblk_ask *ask, u8 kind, u32 note, u32 length)
{
	struct neigh_part part = {
		.address = neigh_global_virt(dev->peer->neigh, &ask->attach),
		.length = length,
	};
	int error;

	ask->post.done = mmblk_ask_done;
	ask->dev = dev;
	ask->kind = kind;
	mmblk_users_get(&dev->users);
	error = neigh_post(dev->peer->neigh, &mmblk_client_user, &part, 1,
			   NEIGH_KIND(NEIGH_PROTO_BLK_REQUEST, kind), note, &ask->post);
	if (error) {
		kfree(ask);
		mmblk_users_put(&dev->users);
	} else {
		neigh_kick(dev->peer->neigh);
	}
	return error;
}

/* Under the mutex. */
static bool mmblk_begin_asking(struct mmblk_dev *dev)
{
	bool was;

	spin_lock_irq(&dev->answer_lock);
	was = dev->asking;
	dev->asking = true;
	spin_unlock_irq(&dev->answer_lock);
	return !was;
}

static void mmblk_seek_work(struct work_struct *work)
{
	struct mmblk_dev *dev = container_of(to_delayed_work(work), struct mmblk_dev, seek_work);
	struct mmblk_cpeer *peer;
	struct mmblk_ask *ask;
	int error = 0;

	mutex_lock(&mmblk_client_mutex);
	if (dev->state == MMBLK_LIVE || dev->state == MMBLK_GOING)
		goto out;
	dev->peer = NULL;
	list_for_each_entry(peer, &mmblk_cpeers, node)
		if (peer->live && !strcmp(neigh_name(peer->neigh), dev->peer_name))
			dev->peer = peer;
	/* live() will schedule it again. */
	if (!dev->peer || !mmblk_begin_asking(dev))
		goto out;
	error = -ENOMEM;
	ask = kzalloc(sizeof(*ask), GFP_KERNEL);
	if (ask) {
		ask->attach.magic = cpu_to_le32(MMBLK_MAGIC);
		ask->attach.version = cpu_to_le16(MMBLK_VERSION);
		ask->attach.queues = cpu_to_le16(dev->queues);
		ask->attach.features = cpu_to_le64(MMBLK_FEAT_ALL);
		ask->attach.depth = cpu_to_le16(dev->depth);
		ask->attach.most_bytes = cpu_to_le32(MMBLK_MOST_BYTES);
		memcpy(ask->attach.export, dev->export, MMBLK_NAME);
		error = mmblk_ask(dev, ask, MMBLK_ATTACH, dev->number, sizeof(ask->attach));
	}
	if (error) {
		spin_lock_irq(&dev->answer_lock);
		dev->asking = false;
		spin_unlock_irq(&dev->answer_lock);
	}
out:
	mutex_unlock(&mmblk_client_mutex);
	if (error)
		mod_delayed_work(mmblk_wq, &dev->seek_work, MMBLK_SEEK_AGAIN);
}

/* Checks a server's terms for its export. Returns NULL, or the problem. */
static const char *mmblk_take_terms(const struct mmblk_dev *dev, const struct mmblk_attached *from, struct mmblk_terms *to)
{
	if (le32_to_cpu(from->magic) != MMBLK_MAGIC || le16_to_cpu(from->version) != MMBLK_VERSION ||
	    from->reserved || from->reserved2)
		return "magic, version or reserved fields";
	to->session = le32_to_cpu(from->session);
	to->flags = le32_to_cpu(from->flags);
	to->queues = le16_to_cpu(from->queues);
	to->depth = le16_to_cpu(from->depth);
	to->features = le64_to_cpu(from->features);
	to->bytes = le64_to_cpu(from->bytes);
	to->most_bytes = le32_to_cpu(from->most_bytes);
	to->logical_block = le32_to_cpu(from->logical_block);
	to->physical_block = le32_to_cpu(from->physical_block);
	to->io_min = le32_to_cpu(from->io_min);
	to->io_opt = le32_to_cpu(from->io_opt);
	to->most_discard = le32_to_cpu(from->most_discard);
	to->discard_granularity = le32_to_cpu(from->discard_granularity);
	to->most_zeroes = le32_to_cpu(from->most_zeroes);
	memcpy(to->instance, from->instance, sizeof(to->instance));

	if (to->flags & ~MMBLK_EXPORT_ALL || to->features & ~MMBLK_FEAT_ALL)
		return "flags or features";
	if (!to->queues || to->queues > dev->queues || !to->depth || to->depth > dev->depth)
		return "queues";
	if (!is_power_of_2(to->logical_block) || to->logical_block < SECTOR_SIZE || to->logical_block > PAGE_SIZE ||
	    !is_power_of_2(to->physical_block) || to->physical_block < to->logical_block ||
	    to->physical_block > MMBLK_MOST_BYTES)
		return "block sizes";
	if (!to->bytes || to->bytes > MMBLK_MOST_DEVICE || !IS_ALIGNED(to->bytes, to->logical_block))
		return "size";
	if (to->most_bytes < PAGE_SIZE || to->most_bytes > MMBLK_MOST_BYTES || !IS_ALIGNED(to->most_bytes, PAGE_SIZE))
		return "largest request";
	/* Hints: invalid ones are ignored. */
	if (to->io_min < to->physical_block || !IS_ALIGNED(to->io_min, to->physical_block))
		to->io_min = to->physical_block;
	if (!IS_ALIGNED(to->io_opt, to->io_min))
		to->io_opt = 0;
	to->most_discard = round_down(to->most_discard, to->logical_block);
	to->most_zeroes = round_down(to->most_zeroes, to->logical_block);
	if (!(to->features & MMBLK_FEAT_DISCARD) || !is_power_of_2(to->discard_granularity) ||
	    to->discard_granularity < to->logical_block)
		to->most_discard = 0;
	if (!(to->features & MMBLK_FEAT_ZEROES))
		to->most_zeroes = 0;
	return NULL;
}

/* Accepts a session. Under the mutex. Returns true if it made a disk that isn't visible yet. */
static bool mmblk_take_up(struct mmblk_dev *dev, const struct mmblk_attached *answer)
{
	struct mmblk_terms terms;
	const char *wrong = mmblk_take_terms(dev, answer, &terms);
	bool again = dev->disk;

	if (!wrong && again)
		wrong = mmblk_disk_differs(dev, &terms);
	if (wrong) {
		pr_err("mmblk%u: %s offers %s with wrong or other %s than before; not attached\n", dev->number,
		       dev->peer_name, dev->export, wrong);
		return false;
	}
	if (again && terms.flags & MMBLK_EXPORT_VOLATILE &&
	    memcmp(terms.instance, dev->terms.instance, sizeof(terms.instance)) &&
	    atomic_read(&dev->written) != atomic_read(&dev->flushed)) {
		pr_err("mmblk%u: %s may have lost writes that weren't flushed; the next flush fails\n", dev->number,
		       dev->peer_name);
		WRITE_ONCE(dev->lost_writes, true);
		atomic_set(&dev->flushed, atomic_read(&dev->written));
	}
	dev->terms = terms;
	dev->neigh = dev->peer->neigh;
	WRITE_ONCE(dev->copy_foreign, false);
	dev->last_refusal = 0;
	if (!again) {
		int error = mmblk_disk_make(dev);

		if (error) {
			pr_err("mmblk%u: a disk can't be made: error %d\n", dev->number, error);
			return false;
		}
	}
	mmblk_count(&dev->counters, MMBLK_C_ATTACHED, 1);
	WRITE_ONCE(dev->state, MMBLK_LIVE);
	pr_info("mmblk%u: %s of %s, %llu bytes, blocks of %u%s\n", dev->number, dev->export, dev->peer_name,
		terms.bytes, terms.logical_block, terms.flags & MMBLK_EXPORT_READONLY ? ", read-only" : "");
	if (again) {
		set_capacity_and_notify(dev->disk, terms.bytes >> SECTOR_SHIFT);
		mmblk_let_run(dev);
		mmblk_announce(dev);
	}
	return !again;
}

/* ATTACHED or ENDED has arrived, or a command reported the end of the session. */
static void mmblk_answer_work(struct work_struct *work)
{
	struct mmblk_dev *dev = container_of(work, struct mmblk_dev, answer_work);
	struct mmblk_attached answer;
	bool answered, ended;

	mutex_lock(&mmblk_client_mutex);
	spin_lock_irq(&dev->answer_lock);
	answer = dev->answer;
	answered = dev->answered;
	ended = dev->ended;
	dev->answered = false;
	dev->ended = false;
	spin_unlock_irq(&dev->answer_lock);
	if (ended) {
		mmblk_lose(dev, "the export is no longer served", false);
		mod_delayed_work(mmblk_wq, &dev->seek_work, MMBLK_SEEK_AGAIN);
	}
	/* An answer on a connection that has ended is ignored: the next connection attaches again. */
	if (answered && dev->peer && dev->peer->live &&
	    (dev->state == MMBLK_SEEKING || dev->state == MMBLK_FAILED) && mmblk_take_up(dev, &answer))
		queue_work(mmblk_wq, &dev->add_work);
	mutex_unlock(&mmblk_client_mutex);
}

static void mmblk_add_work(struct work_struct *work)
{
	struct mmblk_dev *dev = container_of(work, struct mmblk_dev, add_work);
	int error = mmblk_disk_add(dev);

	if (error)
		pr_err("mmblk%u: the disk can't be shown: error %d\n", dev->number, error);
}

void mmblk_session_over(struct mmblk_dev *dev)
{
	unsigned long flags;

	spin_lock_irqsave(&dev->answer_lock, flags);
	dev->ended = true;
	spin_unlock_irqrestore(&dev->answer_lock, flags);
	queue_work(mmblk_wq, &dev->answer_work);
}

static u32 mmblk_receive_attached(struct mmblk_dev *dev, const struct neigh_msg *msg)
{
	unsigned long flags;

	if (msg->bytes != sizeof(dev->answer))
		return MMBLK_PROTOCOL;
	spin_lock_irqsave(&dev->answer_lock, flags);
	neigh_copy_from(msg, 0, &dev->answer, sizeof(dev->answer));
	dev->answered = true;
	spin_unlock_irqrestore(&dev->answer_lock, flags);
	queue_work(mmblk_wq, &dev->answer_work);
	return MMBLK_OK;
}

static u32 mmblk_receive_ended(struct mmblk_dev *dev, const struct neigh_msg *msg)
{
	struct mmblk_ended ended;

	if (msg->bytes != sizeof(ended))
		return MMBLK_PROTOCOL;
	neigh_copy_from(msg, 0, &ended, sizeof(ended));
	if (le32_to_cpu(ended.magic) != MMBLK_MAGIC)
		return MMBLK_PROTOCOL;
	/* For the present session, not an earlier one. */
	if (le32_to_cpu(ended.session) == dev->terms.session)
		mmblk_session_over(dev);
	return MMBLK_OK;
}

static void mmblk_client_receive(struct neigh *neigh, void *priv, const struct neigh_msg *msg)
{
	struct mmblk_dev *dev = mmblk_dev_get(msg->note);
	struct mmblk_cpeer *peer = priv;
	u32 status = MMBLK_SESSION;

	/* Only a device's own server may send to it. */
	if (dev && READ_ONCE(dev->peer) == peer) {
		switch (NEIGH_KIND_OWN(msg->kind)) {
		case MMBLK_DATA:
			mmblk_receive_data(dev, msg);
			mmblk_users_put(&dev->users);
			return;
		case MMBLK_ATTACHED:
			status = mmblk_receive_attached(dev, msg);
			break;
		case MMBLK_ENDED:
			status = mmblk_receive_ended(dev, msg);
			break;
		default:
			status = MMBLK_UNSUPPORTED;
		}
		if (status)
			mmblk_count(&dev->counters, MMBLK_C_REFUSED, 1);
	}
	if (dev)
		mmblk_users_put(&dev->users);
	neigh_complete_quietly(msg->link, msg->id, status);
}

static void mmblk_client_sent(struct neigh *neigh, void *priv, void *cookie, u32 status)
{
	struct mmblk_post *post = cookie;

	post->done(post, status);
}

/* blk-mq also runs the queues of devices without room, within some milliseconds. */
static void mmblk_client_room(struct neigh *neigh, void *priv)
{
	struct mmblk_dev *dev;
	unsigned long at, flags;

	xa_lock_irqsave(&mmblk_numbers, flags);
	xa_for_each(&mmblk_numbers, at, dev)
		if (READ_ONCE(dev->state) == MMBLK_LIVE && dev->neigh == neigh)
			blk_mq_run_hw_queues(dev->disk->queue, true);
	xa_unlock_irqrestore(&mmblk_numbers, flags);
}

static void mmblk_client_batch_end(struct neigh *neigh, void *priv)
{
	neigh_kick(neigh);
}

static void *mmblk_client_add(struct neigh *neigh)
{
	struct mmblk_cpeer *peer = kzalloc(sizeof(*peer), GFP_KERNEL);

	if (!peer)
		return ERR_PTR(-ENOMEM);
	peer->neigh = neigh;
	mutex_lock(&mmblk_client_mutex);
	list_add_tail(&peer->node, &mmblk_cpeers);
	mutex_unlock(&mmblk_client_mutex);
	return peer;
}

static void mmblk_client_live(struct neigh *neigh, void *priv)
{
	struct mmblk_cpeer *peer = priv;
	struct mmblk_dev *dev;

	mutex_lock(&mmblk_client_mutex);
	peer->live = true;
	list_for_each_entry(dev, &mmblk_devs, node)
		if (!strcmp(neigh_name(neigh), dev->peer_name))
			mod_delayed_work(mmblk_wq, &dev->seek_work, 0);
	mutex_unlock(&mmblk_client_mutex);
}

static void mmblk_client_dead(struct neigh *neigh, void *priv)
{
	struct mmblk_cpeer *peer = priv;
	struct mmblk_dev *dev;

	mutex_lock(&mmblk_client_mutex);
	peer->live = false;
	list_for_each_entry(dev, &mmblk_devs, node)
		if (dev->peer == peer)
			mmblk_lose(dev, "its connection is over", true);
	mutex_unlock(&mmblk_client_mutex);
}

static void mmblk_client_remove(struct neigh *neigh, void *priv)
{
	struct mmblk_cpeer *peer = priv;
	struct mmblk_dev *dev;

	mutex_lock(&mmblk_client_mutex);
	list_del(&peer->node);
	list_for_each_entry(dev, &mmblk_devs, node)
		if (dev->peer == peer)
			dev->peer = NULL;
	mutex_unlock(&mmblk_client_mutex);
	/* Requests whose data is being copied are the last that may use the neighbour. */
	flush_workqueue(mmblk_copy_wq);
	kfree(peer);
}

static const struct neigh_user_ops mmblk_client_ops = {
	.add = mmblk_client_add,
	.remove = mmblk_client_remove,
	.live = mmblk_client_live,
	.dead = mmblk_client_dead,
	.receive = mmblk_client_receive,
	.sent = mmblk_client_sent,
	.room = mmblk_client_room,
	.batch_end = mmblk_client_batch_end,
};

struct neigh_user mmblk_client_user = {
	.name = "mmblk-client",
	.protocol = NEIGH_PROTO_BLK_REPLY,
	.share = 4,
	.ops = &mmblk_client_ops,
	.owner = THIS_MODULE,
};

/* The device's own lock is held, and the device isn't enabled. */
int mmblk_dev_start(struct mmblk_dev *dev)
{
	int error;

	dev->peer = NULL;
	dev->disk = NULL;
	dev->added = false;
	dev->asking = false;
	dev->answered = false;
	dev->ended = false;
	dev->quiesced = false;
	dev->lost_writes = false;
	dev->last_refusal = 0;
	dev->state = MMBLK_SEEKING;
	mmblk_users_init(&dev->users);
	atomic_set(&dev->written, 0);
	atomic_set(&dev->flushed, 0);
	spin_lock_init(&dev->answer_lock);
	INIT_WORK(&dev->answer_work, mmblk_answer_work);
	INIT_WORK(&dev->add_work, mmblk_add_work);
	INIT_WORK(&dev->timeout_work, mmblk_timeout_work);
	INIT_DELAYED_WORK(&dev->seek_work, mmblk_seek_work);
	INIT_DELAYED_WORK(&dev->wait_work, mmblk_wait_work);
	error = xa_alloc_irq(&mmblk_numbers, &dev->number, dev, XA_LIMIT(0, 255), GFP_KERNEL);
	if (error)
		return error;
	mutex_lock(&mmblk_client_mutex);
	list_add_tail(&dev->node, &mmblk_devs);
	mutex_unlock(&mmblk_client_mutex);
	mod_delayed_work(mmblk_wq, &dev->seek_work, 0);
	return 0;
}

void mmblk_dev_stop(struct mmblk_dev *dev)
{
	struct mmblk_ask *ask;
	bool was_live;

	mutex_lock(&mmblk_client_mutex);
	was_live = dev->state == MMBLK_LIVE;
	/* Requests that the server doesn't have yet fail. Others complete, or their connection ends. */
	WRITE_ONCE(dev->state, MMBLK_GOING);
	mmblk_let_run(dev);
	mutex_unlock(&mmblk_client_mutex);
	cancel_work_sync(&dev->answer_work);
	/* Its reads fail by now. */
	flush_work(&dev->add_work);
	if (dev->disk && dev->added)
		del_gendisk(dev->disk);
	mutex_lock(&mmblk_client_mutex);
	if (was_live && dev->peer && dev->peer->live) {
		ask = kzalloc(sizeof(*ask), GFP_KERNEL);
		if (ask) {
			ask->detach.magic = cpu_to_le32(MMBLK_MAGIC);
			ask->detach.session = cpu_to_le32(dev->terms.session);
			/* If this can't be sent, the next ATTACH of this number ends the old session. */
			mmblk_ask(dev, ask, MMBLK_DETACH, dev->terms.session, sizeof(ask->detach));
		}
	}
	list_del(&dev->node);
	mutex_unlock(&mmblk_client_mutex);
	xa_erase_irq(&mmblk_numbers, dev->number);
	/* The DETACH completes, or its connection ends. */
	while (!mmblk_users_wait(&dev->users, 10 * HZ))
		pr_warn("mmblk%u: waiting for %s\n", dev->number, dev->peer_name);
	cancel_delayed_work_sync(&dev->seek_work);
	cancel_delayed_work_sync(&dev->wait_work);
	cancel_work_sync(&dev->answer_work);
	cancel_work_sync(&dev->timeout_work);
	mmblk_disk_free(dev);
}

int mmblk_client_init(void)
{
	return neigh_register_user(&mmblk_client_user);
}

void mmblk_client_exit(void)
{
	neigh_unregister_user(&mmblk_client_user);
}
