// SPDX-License-Identifier: GPL-2.0
/*
 * mmblk, server side: clients and their sessions. A message is parsed in softirq context, from copies. A valid one runs on a work
 * queue.
 *
 *	ATTACH   -> work: finds the export, makes a session -> ATTACHED, and the ATTACH completes
 *	COMMAND  -> mmblk_command.c
 *	DETACH   -> the session ends; its last commands finish
 *
 * A session is kept by each of its commands and by the pages of its reads; an export by its sessions. The end of a connection
 * waits for nothing: commands finish on the export, and their messages are completed. Only then the core releases the window, and
 * the client can connect again. So no write of an earlier connection comes after one of a later.
 */
#include <linux/module.h>
#include <linux/slab.h>

#include "mmblk_server.h"

#define MMBLK_MOST_SESSIONS	64
/* Spare slots: a read's slot is free after its answer, and a client may reuse it a little earlier. */
#define MMBLK_SPARE		4
/* A client that doesn't return a read's pages within this time is broken. */
#define MMBLK_PATIENCE		(10 * HZ)

/* Protects enabled exports, sessions, and whether peers are live. Acquired after the core's own. */
DEFINE_MUTEX(mmblk_server_mutex);
LIST_HEAD(mmblk_exports);

/* An ATTACH or DETACH on its way to process context. */
struct mmblk_control {
	struct work_struct work;
	struct mmblk_speer *peer;
	struct neigh_link *link;
	u32 id;
	u32 note;
	u32 epoch;
	bool attaches;			/* an ATTACH; else a DETACH of the session in note */
	struct mmblk_attach attach;
};

/* A message that answers a control message. */
struct mmblk_notice {
	struct mmblk_post post;
	union {
		struct mmblk_attached attached;
		struct mmblk_ended ended;
	};
};

/* Any context may drop the last reference. Freeing vmalloc'ed memory needs process context. */
static void mmblk_session_reap(struct work_struct *work)
{
	struct mmblk_session *session = container_of(work, struct mmblk_session, reap);
	struct mmblk_export *export = session->export;
	struct mmblk_speer *peer = session->peer;

	mutex_lock(&mmblk_server_mutex);
	list_del(&session->node);
	mutex_unlock(&mmblk_server_mutex);
	kvfree(session->reqs);
	kfree(session);
	mmblk_users_put(&peer->users);
	mmblk_users_put(&export->users);
}

void mmblk_session_put(struct mmblk_session *session)
{
	if (refcount_dec_and_test(&session->refs))
		queue_work(mmblk_wq, &session->reap);
}

/* Under the mutex. */
static void mmblk_session_end(struct mmblk_session *session)
{
	xa_erase_irq(&session->peer->sessions, session->id);
	session->ended = true;
	mmblk_session_put(session);
}

static void mmblk_notice_done(struct mmblk_post *post, u32 status)
{
	kfree(container_of(post, struct mmblk_notice, post));
}

static int mmblk_notice_post(struct mmblk_speer *peer, struct mmblk_notice *notice, u8 kind, u32 device, u32 length)
{
	struct neigh_part part = {
		.address = neigh_global_virt(peer->neigh, &notice->attached),
		.length = length,
	};
	int error;

	notice->post.done = mmblk_notice_done;
	error = neigh_post(peer->neigh, &mmblk_server_user, &part, 1,
			   NEIGH_KIND(NEIGH_PROTO_BLK_REPLY, kind), device, &notice->post);
	if (error)
		kfree(notice);
	else
		neigh_kick(peer->neigh);
	return error;
}

void mmblk_sessions_end(struct mmblk_export *export)
{
	struct mmblk_session *session;

	mutex_lock(&mmblk_server_mutex);
	list_for_each_entry(session, &export->sessions, node) {
		struct mmblk_notice *notice;

		if (session->ended)
			continue;
		notice = kzalloc(sizeof(*notice), GFP_KERNEL);
		/* Without it, the client learns of the end by its next command. */
		if (notice) {
			notice->ended.magic = cpu_to_le32(MMBLK_MAGIC);
			notice->ended.session = cpu_to_le32(session->id);
			mmblk_notice_post(session->peer, notice, MMBLK_ENDED, session->device,
					  sizeof(notice->ended));
		}
		mmblk_session_end(session);
	}
	mutex_unlock(&mmblk_server_mutex);
	while (!mmblk_users_wait(&export->users, MMBLK_PATIENCE)) {
		/* Either the device is slow, or a client keeps the pages of reads. */
		pr_warn("mmblk: %s waits for %u sessions; their connections are given up\n",
			config_item_name(&export->group.cg_item), READ_ONCE(export->users.count));
		mutex_lock(&mmblk_server_mutex);
		list_for_each_entry(session, &export->sessions, node)
			neigh_give_up(session->peer->neigh, "it keeps what it has read");
		mutex_unlock(&mmblk_server_mutex);
	}
}

/* Under the mutex. */
static struct mmblk_export *mmblk_export_find(const struct mmblk_speer *peer, const u8 *name)
{
	struct mmblk_export *export;
	char who[CW_NB_PEER_NAME_SIZE + 3];

	snprintf(who, sizeof(who), " %s ", neigh_name(peer->neigh));
	list_for_each_entry(export, &mmblk_exports, node)
		if (!strncmp(config_item_name(&export->group.cg_item), name, MMBLK_NAME) &&
		    strstr(export->clients, who))
			return export;
	return NULL;
}

static void mmblk_fill_attached(struct mmblk_attached *to, const struct mmblk_session *session, u64 features)
{
	const struct mmblk_export *export = session->export;

	to->magic = cpu_to_le32(MMBLK_MAGIC);
	to->version = cpu_to_le16(MMBLK_VERSION);
	to->queues = cpu_to_le16(session->queues);
	to->features = cpu_to_le64(export->features & features);
	to->depth = cpu_to_le16(session->depth);
	to->most_bytes = cpu_to_le32(session->most_bytes);
	to->session = cpu_to_le32(session->id);
	to->flags = cpu_to_le32(export->flags);
	to->bytes = cpu_to_le64(export->bytes);
	memcpy(to->instance, &export->instance, sizeof(to->instance));
	to->logical_block = cpu_to_le32(export->logical_block);
	to->physical_block = cpu_to_le32(export->physical_block);
	to->io_min = cpu_to_le32(export->io_min);
	to->io_opt = cpu_to_le32(export->io_opt);
	to->most_discard = cpu_to_le32(export->most_discard);
	to->discard_granularity = cpu_to_le32(export->discard_granularity);
	to->most_zeroes = cpu_to_le32(export->most_zeroes);
}

static struct mmblk_session *mmblk_session_make(struct mmblk_speer *peer, struct mmblk_export *export,
						u32 device, u16 queues, u16 depth, u32 most_bytes)
{
	struct mmblk_session *session = kzalloc(sizeof(*session), GFP_KERNEL);
	u32 commands = (u32)queues * depth * 5 / 4 + MMBLK_SPARE, i;

	if (!session)
		return NULL;
	session->reqs = kvcalloc(commands, sizeof(*session->reqs), GFP_KERNEL);
	if (!session->reqs) {
		kfree(session);
		return NULL;
	}
	session->device = device;
	session->export = export;
	session->peer = peer;
	session->queues = queues;
	session->depth = depth;
	session->most_bytes = most_bytes;
	INIT_WORK(&session->reap, mmblk_session_reap);
	refcount_set(&session->refs, 1);
	spin_lock_init(&session->lock);
	INIT_LIST_HEAD(&session->free);
	for (i = 0; i < commands; i++) {
		session->reqs[i].session = session;
		list_add_tail(&session->reqs[i].node, &session->free);
	}
	return session;
}

/* Grants what the client requests, within the export's limits. Under the mutex. */
static u32 mmblk_attach(struct mmblk_control *control)
{
	const struct mmblk_attach *ask = &control->attach;
	struct mmblk_speer *peer = control->peer;
	struct mmblk_session *session, *old;
	u16 queues = le16_to_cpu(ask->queues), depth = le16_to_cpu(ask->depth);
	u32 most_bytes = le32_to_cpu(ask->most_bytes);
	struct mmblk_notice *notice;
	struct mmblk_export *export;
	unsigned long at;

	if (le32_to_cpu(ask->magic) != MMBLK_MAGIC || ask->reserved || ask->reserved2 ||
	    strnlen(ask->export, MMBLK_NAME) == MMBLK_NAME)
		return MMBLK_PROTOCOL;
	if (le16_to_cpu(ask->version) != MMBLK_VERSION)
		return MMBLK_BAD_VERSION;
	if (!queues || queues > MMBLK_MOST_QUEUES || !depth || depth > MMBLK_MOST_DEPTH || most_bytes < PAGE_SIZE)
		return MMBLK_PROTOCOL;
	export = mmblk_export_find(peer, ask->export);
	if (!export)
		return MMBLK_NOEXPORT;
	/* The same device attaches again, without an end of the connection in between. */
	xa_for_each(&peer->sessions, at, old)
		if (old->device == control->note) {
			mmblk_session_end(old);
			break;
		}
	queues = min_t(u16, queues, num_online_cpus());
	most_bytes = min_t(u32, round_down(most_bytes, PAGE_SIZE), MMBLK_MOST_BYTES);
	session = mmblk_session_make(peer, export, control->note, queues, depth, most_bytes);
	if (!session)
		return MMBLK_BUSY;
	notice = kzalloc(sizeof(*notice), GFP_KERNEL);
	if (!notice)
		goto busy;
	if (xa_alloc_irq(&peer->sessions, &session->id, session, XA_LIMIT(1, MMBLK_MOST_SESSIONS), GFP_KERNEL))
		goto busy_notice;
	list_add(&session->node, &export->sessions);
	mmblk_users_get(&export->users);
	mmblk_users_get(&peer->users);
	mmblk_fill_attached(&notice->attached, session, le64_to_cpu(ask->features));
	if (mmblk_notice_post(peer, notice, MMBLK_ATTACHED, control->note, sizeof(notice->attached))) {
		mmblk_session_end(session);
		return MMBLK_BUSY;
	}
	mmblk_count(&export->counters, MMBLK_C_ATTACHED, 1);
	return MMBLK_OK;

busy_notice:
	kfree(notice);
busy:
	kvfree(session->reqs);
	kfree(session);
	return MMBLK_BUSY;
}

static void mmblk_control_work(struct work_struct *work)
{
	struct mmblk_control *control = container_of(work, struct mmblk_control, work);
	struct mmblk_speer *peer = control->peer;
	struct mmblk_session *session;
	u32 status = MMBLK_SESSION;

	mutex_lock(&mmblk_server_mutex);
	/* Only for the present connection: its end may be about to be reported. */
	if (peer->live && neigh_epoch(peer->neigh) == control->epoch) {
		if (control->attaches) {
			status = mmblk_attach(control);
		} else {
			session = xa_load(&peer->sessions, control->note);
			if (session) {
				mmblk_session_end(session);
				status = MMBLK_OK;
			}
		}
	}
	mutex_unlock(&mmblk_server_mutex);
	neigh_complete(control->link, control->id, status);
	kfree(control);
	mmblk_users_put(&peer->users);
}

static u32 mmblk_receive_control(struct mmblk_speer *peer, const struct neigh_msg *msg, bool attach)
{
	struct mmblk_control *control;
	struct mmblk_detach detach;

	if (msg->bytes != (attach ? sizeof(control->attach) : sizeof(detach)))
		return MMBLK_PROTOCOL;
	control = kzalloc(sizeof(*control), GFP_ATOMIC);
	if (!control)
		return MMBLK_BUSY;
	if (attach) {
		neigh_copy_from(msg, 0, &control->attach, sizeof(control->attach));
	} else {
		neigh_copy_from(msg, 0, &detach, sizeof(detach));
		if (le32_to_cpu(detach.magic) != MMBLK_MAGIC || le32_to_cpu(detach.session) != msg->note)
			goto wrong;
	}
	mmblk_users_get(&peer->users);
	control->peer = peer;
	control->link = msg->link;
	control->id = msg->id;
	control->note = msg->note;
	control->attaches = attach;
	control->epoch = neigh_epoch(peer->neigh);
	INIT_WORK(&control->work, mmblk_control_work);
	queue_work(mmblk_wq, &control->work);
	return MMBLK_OK;

wrong:
	kfree(control);
	return MMBLK_PROTOCOL;
}

static void *mmblk_server_add(struct neigh *neigh)
{
	struct mmblk_speer *peer = kzalloc(sizeof(*peer), GFP_KERNEL);

	if (!peer)
		return ERR_PTR(-ENOMEM);
	peer->neigh = neigh;
	xa_init_flags(&peer->sessions, XA_FLAGS_ALLOC1 | XA_FLAGS_LOCK_IRQ);
	spin_lock_init(&peer->lock);
	INIT_LIST_HEAD(&peer->waiting);
	mmblk_users_init(&peer->users);
	return peer;
}

static void mmblk_server_live(struct neigh *neigh, void *priv)
{
	struct mmblk_speer *peer = priv;

	mutex_lock(&mmblk_server_mutex);
	peer->live = true;
	mutex_unlock(&mmblk_server_mutex);
}

static void mmblk_server_dead(struct neigh *neigh, void *priv)
{
	struct mmblk_speer *peer = priv;
	struct mmblk_session *session;
	unsigned long at;

	mutex_lock(&mmblk_server_mutex);
	peer->live = false;
	xa_for_each(&peer->sessions, at, session) {
		mmblk_count(&session->export->counters, MMBLK_C_LOST, 1);
		mmblk_session_end(session);
	}
	mutex_unlock(&mmblk_server_mutex);
	mmblk_send_waiting(peer);
}

/* Commands use the neighbour until they have answered. Those that waited for room were dropped when the connection ended. */
static void mmblk_server_remove(struct neigh *neigh, void *priv)
{
	struct mmblk_speer *peer = priv;

	while (!mmblk_users_wait(&peer->users, MMBLK_PATIENCE))
		pr_warn("mmblk: waiting for commands of %s that aren't done\n", neigh_name(neigh));
	xa_destroy(&peer->sessions);
	kfree(peer);
}

static void mmblk_server_receive(struct neigh *neigh, void *priv, const struct neigh_msg *msg)
{
	u32 status;

	switch (NEIGH_KIND_OWN(msg->kind)) {
	case MMBLK_COMMAND:
		status = mmblk_receive_command(priv, msg);
		break;
	case MMBLK_ATTACH:
		status = mmblk_receive_control(priv, msg, true);
		break;
	case MMBLK_DETACH:
		status = mmblk_receive_control(priv, msg, false);
		break;
	default:
		status = MMBLK_UNSUPPORTED;
	}
	/* Otherwise the message is in progress, and is completed later. */
	if (status)
		neigh_complete_quietly(msg->link, msg->id, status);
}

static void mmblk_server_sent(struct neigh *neigh, void *priv, void *cookie, u32 status)
{
	struct mmblk_post *post = cookie;

	post->done(post, status);
}

static void mmblk_server_room(struct neigh *neigh, void *priv)
{
	mmblk_send_waiting(priv);
}

static void mmblk_server_batch_end(struct neigh *neigh, void *priv)
{
	neigh_kick(neigh);
}

static const struct neigh_user_ops mmblk_server_ops = {
	.add = mmblk_server_add,
	.remove = mmblk_server_remove,
	.live = mmblk_server_live,
	.dead = mmblk_server_dead,
	.receive = mmblk_server_receive,
	.sent = mmblk_server_sent,
	.room = mmblk_server_room,
	.batch_end = mmblk_server_batch_end,
};

struct neigh_user mmblk_server_user = {
	.name = "mmblk-server",
	.protocol = NEIGH_PROTO_BLK_REQUEST,
	.share = 4,
	.ops = &mmblk_server_ops,
	.owner = THIS_MODULE,
};

int mmblk_server_init(void)
{
	return neigh_register_user(&mmblk_server_user);
}

void mmblk_server_exit(void)
{
	neigh_unregister_user(&mmblk_server_user);
}
