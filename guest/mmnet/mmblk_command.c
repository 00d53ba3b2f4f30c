// SPDX-License-Identifier: GPL-2.0
/*
 * mmblk, server side: commands. A command is parsed in softirq context, from copies. A valid one runs on a work queue, and any
 * context may answer it.
 *
 *	COMMAND  -> checked -> work: mmblk_backend_run() -> mmblk_answer(): DATA (for a read), and the COMMAND completes
 */
#include <linux/module.h>

#include "mmblk_server.h"

static struct mmblk_session *mmblk_session_get(struct mmblk_speer *peer, u32 id)
{
	struct mmblk_session *session;
	unsigned long flags;

	xa_lock_irqsave(&peer->sessions, flags);
	session = xa_load(&peer->sessions, id);
	if (session && !refcount_inc_not_zero(&session->refs))
		session = NULL;
	xa_unlock_irqrestore(&peer->sessions, flags);
	return session;
}

/* Whether a command and its data parts are valid. Reads copies only. */
static u32 mmblk_check(const struct mmblk_session *session, const struct neigh_msg *msg,
		       const struct mmblk_command *command)
{
	const struct mmblk_export *export = session->export;
	u64 offset = le64_to_cpu(command->offset), data = msg->bytes - sizeof(*command);
	u32 bytes = le32_to_cpu(command->bytes);
	u32 most = session->most_bytes;
	u8 flags = 0;
	u16 i;

	if (command->reserved || le16_to_cpu(command->queue) >= session->queues)
		return MMBLK_PROTOCOL;
	switch (command->op) {
	case MMBLK_WRITE:
		flags = MMBLK_F_FUA;
		fallthrough;
	case MMBLK_READ:
		break;
	case MMBLK_FLUSH:
		return command->flags || offset || bytes || data ? MMBLK_PROTOCOL : MMBLK_OK;
	case MMBLK_DISCARD:
		most = export->most_discard;
		if (!most)
			return MMBLK_UNSUPPORTED;
		break;
	case MMBLK_ZEROES:
		flags = MMBLK_F_FUA | MMBLK_F_NOUNMAP;
		most = export->most_zeroes;
		if (!most)
			return MMBLK_UNSUPPORTED;
		break;
	default:
		return MMBLK_UNSUPPORTED;
	}
	if (command->flags & ~flags || data != (command->op == MMBLK_WRITE ? bytes : 0))
		return MMBLK_PROTOCOL;
	if (!bytes || bytes > most || !IS_ALIGNED(offset | bytes, export->logical_block) ||
	    offset > export->bytes || bytes > export->bytes - offset)
		return MMBLK_RANGE;
	if (command->op != MMBLK_READ && export->readonly)
		return MMBLK_READONLY;
	for (i = 1; i < msg->count; i++)
		if (!IS_ALIGNED(msg->parts[i].address | msg->parts[i].length, MMBLK_ALIGN))
			return MMBLK_PROTOCOL;
	return MMBLK_OK;
}

static void mmblk_command_work(struct work_struct *work)
{
	mmblk_backend_run(container_of(work, struct mmblk_req, work));
}

u32 mmblk_receive_command(struct mmblk_speer *peer, const struct neigh_msg *msg)
{
	struct mmblk_session *session;
	struct mmblk_command command;
	struct mmblk_req *req;
	unsigned long flags;
	u32 status;
	u16 i;

	/* The structure is a part of its own. */
	if (msg->parts[0].length != sizeof(command))
		return MMBLK_PROTOCOL;
	neigh_copy_from(msg, 0, &command, sizeof(command));
	session = mmblk_session_get(peer, msg->note);
	if (!session)
		return MMBLK_SESSION;
	status = mmblk_check(session, msg, &command);
	if (status)
		goto refuse;
	spin_lock_irqsave(&session->lock, flags);
	req = list_first_entry_or_null(&session->free, struct mmblk_req, node);
	if (req)
		list_del(&req->node);
	spin_unlock_irqrestore(&session->lock, flags);
	if (!req) {
		/* An honest client has pages of earlier reads on their way back. */
		status = MMBLK_BUSY;
		goto put;
	}
	req->link = msg->link;
	req->id = msg->id;
	req->op = command.op;
	req->flags = command.flags;
	req->bytes = le32_to_cpu(command.bytes);
	req->offset = le64_to_cpu(command.offset);
	req->tag = command.tag;
	req->read = NULL;
	req->foreign = 0;
	req->count = msg->count - 1;
	memcpy(req->parts, msg->parts + 1, req->count * sizeof(*req->parts));
	for (i = 0; i < req->count; i++)
		if (neigh_slot_of(peer->neigh, req->parts[i].address) != neigh_slot(peer->neigh))
			req->foreign += req->parts[i].length;
	INIT_WORK(&req->work, mmblk_command_work);
	queue_work(session->export->wq, &req->work);
	return MMBLK_OK;

refuse:
	mmblk_count(&session->export->counters, MMBLK_C_REFUSED, 1);
put:
	mmblk_session_put(session);
	return status;
}

/* Returns the command's slot to its session. */
static void mmblk_req_done(struct mmblk_req *req, u32 status)
{
	struct mmblk_session *session = req->session;
	unsigned long flags;

	if (status)
		mmblk_count(&session->export->counters, MMBLK_C_ERRORS, 1);
	neigh_complete_quietly(req->link, req->id, status);
	neigh_kick(session->peer->neigh);
	if (req->read)
		mmblk_read_put(req->read);
	spin_lock_irqsave(&session->lock, flags);
	list_add(&req->node, &session->free);
	spin_unlock_irqrestore(&session->lock, flags);
	mmblk_session_put(session);
}

static void mmblk_reply_done(struct mmblk_post *post, u32 status)
{
	mmblk_read_put(container_of(post, struct mmblk_reply, post)->read);
}

/* Sends the unsent data of a read. Under the peer's lock. */
static int mmblk_send_data(struct mmblk_req *req)
{
	struct neigh *neigh = req->session->peer->neigh;
	struct mmblk_read *read = req->read;
	int error;

	while (read->sent < read->replies) {
		struct mmblk_reply *reply = &read->reply[read->sent];
		struct neigh_part parts[CW_NB_MOST_PARTS];
		u16 i;

		parts[0].address = neigh_global_virt(neigh, &reply->head);
		parts[0].length = sizeof(reply->head);
		for (i = 0; i < reply->count; i++) {
			struct mmblk_chunk *chunk = &read->chunk[reply->first + i];

			parts[i + 1].address = neigh_global(neigh, chunk->page, 0);
			parts[i + 1].length = chunk->length;
		}
		atomic_inc(&read->pending);
		error = neigh_post(neigh, &mmblk_server_user, parts, reply->count + 1,
				   NEIGH_KIND(NEIGH_PROTO_BLK_REPLY, MMBLK_DATA), req->session->device,
				   &reply->post);
		if (error) {
			atomic_dec(&read->pending);
			return error;
		}
		read->sent++;
	}
	return 0;
}

static void mmblk_make_replies(struct mmblk_req *req)
{
	struct mmblk_read *read = req->read;
	u32 offset = 0;
	u16 at = 0;

	while (at < read->chunks) {
		struct mmblk_reply *reply = &read->reply[read->replies++];
		u32 bytes = 0;
		u16 i;

		reply->read = read;
		reply->post.done = mmblk_reply_done;
		reply->first = at;
		reply->count = min_t(u16, read->chunks - at, MMBLK_DATA_PARTS);
		for (i = 0; i < reply->count; i++)
			bytes += read->chunk[at + i].length;
		reply->head.tag = req->tag;
		reply->head.offset = cpu_to_le32(offset);
		reply->head.bytes = cpu_to_le32(bytes);
		offset += bytes;
		at += reply->count;
	}
}

void mmblk_answer(struct mmblk_req *req, u32 status)
{
	struct mmblk_speer *peer = req->session->peer;
	unsigned long flags;
	int error = 0;

	if (!status && req->op == MMBLK_READ) {
		mmblk_make_replies(req);
		spin_lock_irqsave(&peer->lock, flags);
		error = list_empty(&peer->waiting) ? mmblk_send_data(req) : -ENOSPC;
		if (error == -ENOSPC)
			list_add_tail(&req->node, &peer->waiting);
		spin_unlock_irqrestore(&peer->lock, flags);
		if (error == -ENOSPC)
			return;
		if (!error)
			mmblk_count(&req->session->export->counters, MMBLK_C_BY_REFERENCE, req->bytes);
	}
	mmblk_req_done(req, error ? MMBLK_SESSION : status);
}

void mmblk_send_waiting(struct mmblk_speer *peer)
{
	struct mmblk_req *req, *next;
	unsigned long flags;
	LIST_HEAD(done);
	int error = 0;

	spin_lock_irqsave(&peer->lock, flags);
	list_for_each_entry_safe(req, next, &peer->waiting, node) {
		error = mmblk_send_data(req);
		if (error == -ENOSPC)
			break;
		list_move_tail(&req->node, &done);
	}
	spin_unlock_irqrestore(&peer->lock, flags);
	list_for_each_entry_safe(req, next, &done, node) {
		bool whole = req->read->sent == req->read->replies;

		list_del(&req->node);
		if (whole)
			mmblk_count(&req->session->export->counters, MMBLK_C_BY_REFERENCE, req->bytes);
		mmblk_req_done(req, whole ? MMBLK_OK : MMBLK_SESSION);
	}
	neigh_kick(peer->neigh);
}
