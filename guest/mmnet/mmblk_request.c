// SPDX-License-Identifier: GPL-2.0
/*
 * mmblk, client side: requests.
 *
 *	write	COMMAND {structure, the request's own pages} -> ; <- it completes when the server has written
 *	read	COMMAND {structure} -> ; <- DATA {structure, pages of the server}, copied here ; <- the COMMAND completes
 *
 * DATA and COMMAND may arrive in either order, so a read is complete when it has both. For one neighbour, sent(), receive() and
 * dead() never run concurrently: a request never ends while its data is being copied.
 */
#include <linux/highmem.h>
#include <linux/module.h>

#include "mmblk_client.h"

static void mmblk_command_done(struct mmblk_post *post, u32 status);

static blk_status_t mmblk_blk_status(u32 status)
{
	switch (status) {
	case MMBLK_OK:
		return BLK_STS_OK;
	case MMBLK_NOSPC:
		return BLK_STS_NOSPC;
	case MMBLK_UNSUPPORTED:
		return BLK_STS_NOTSUPP;
	case MMBLK_MEDIUM:
		return BLK_STS_MEDIUM;
	case MMBLK_TIMEOUT:
		return BLK_STS_TIMEOUT;
	default:
		return BLK_STS_IOERR;
	}
}

static void mmblk_copy_free(struct mmblk_rq *pdu)
{
	if (pdu->copy)
		free_pages((unsigned long)pdu->copy, pdu->copy_order);
	pdu->copy = NULL;
}

static void mmblk_end(struct request *rq, blk_status_t status)
{
	struct mmblk_dev *dev = rq->q->queuedata;
	struct mmblk_rq *pdu = blk_mq_rq_to_pdu(rq);

	mmblk_copy_free(pdu);
	if (status)
		mmblk_count(&dev->counters, MMBLK_C_ERRORS, 1);
	blk_mq_end_request(rq, status);
}

/* Sends the request again when there is a server, or lets it fail after the wait. */
static void mmblk_again(struct request *rq)
{
	struct mmblk_dev *dev = rq->q->queuedata;

	mmblk_copy_free(blk_mq_rq_to_pdu(rq));
	mmblk_count(&dev->counters, MMBLK_C_REQUEUED, 1);
	blk_mq_requeue_request(rq, false);
}

static unsigned int mmblk_add_part(struct neigh_part *parts, unsigned int count, u64 address, u32 length)
{
	/* The structure stays a part of its own. */
	if (count > 1 && parts[count - 1].address + parts[count - 1].length == address) {
		parts[count - 1].length += length;
		return count;
	}
	if (count < CW_NB_MOST_PARTS) {
		parts[count].address = address;
		parts[count].length = length;
	}
	return count + 1;
}

/* Names the pages of a write. Sets *foreign to the bytes in third VMs' memory. */
static unsigned int mmblk_write_parts(struct mmblk_dev *dev, struct request *rq, struct neigh_part *parts, u64 *foreign)
{
	struct mmblk_rq *pdu = blk_mq_rq_to_pdu(rq);
	unsigned int count = 1;
	struct req_iterator iter;
	struct bio_vec vector;

	*foreign = 0;
	if (pdu->copy)
		return mmblk_add_part(parts, count, neigh_global_virt(dev->neigh, pdu->copy), blk_rq_bytes(rq));
	rq_for_each_bvec(vector, rq, iter) {
		if (neigh_page_is_window(vector.bv_page))
			*foreign += vector.bv_len;
		count = mmblk_add_part(parts, count, neigh_global(dev->neigh, vector.bv_page, vector.bv_offset),
				       vector.bv_len);
	}
	return count;
}

/* Returns 0 or the error of neigh_post(). -E2BIG: too scattered or not reachable, to be copied first. */
static int mmblk_send(struct mmblk_dev *dev, struct request *rq)
{
	struct mmblk_rq *pdu = blk_mq_rq_to_pdu(rq);
	struct neigh_part parts[CW_NB_MOST_PARTS];
	unsigned int count = 1;
	u64 foreign = 0;
	int error;

	parts[0].address = neigh_global_virt(dev->neigh, &pdu->command);
	parts[0].length = sizeof(pdu->command);
	if (req_op(rq) == REQ_OP_WRITE) {
		count = mmblk_write_parts(dev, rq, parts, &foreign);
		if (count > CW_NB_MOST_PARTS || (foreign && READ_ONCE(dev->copy_foreign)))
			return -E2BIG;
	}
	pdu->left = req_op(rq) == REQ_OP_READ ? blk_rq_bytes(rq) : 0;
	pdu->waits = false;
	pdu->out = true;
	pdu->generation++;
	pdu->command.tag = cpu_to_le64((u64)pdu->generation << 32 | blk_mq_unique_tag(rq));
	error = neigh_post(dev->neigh, &mmblk_client_user, parts, count,
			   NEIGH_KIND(NEIGH_PROTO_BLK_REQUEST, MMBLK_COMMAND), dev->terms.session, &pdu->post);
	if (error) {
		pdu->out = false;
		return error;
	}
	/* The request may have completed by now, so it isn't accessed any more. */
	if (foreign)
		mmblk_count(&dev->counters, MMBLK_C_FORWARDED, foreign);
	return 0;
}

/*
 * Copies the data of a write that can't be named: a third VM's memory of which the server has no window, or more pieces than a
 * message has parts.
 */
static void mmblk_copy_work(struct work_struct *work)
{
	struct mmblk_rq *pdu = container_of(work, struct mmblk_rq, copy_work);
	struct request *rq = blk_mq_rq_from_pdu(pdu);
	struct mmblk_dev *dev = rq->q->queuedata;
	struct req_iterator iter;
	struct bio_vec vector;
	u32 at = 0;

	pdu->copy_order = get_order(blk_rq_bytes(rq));
	pdu->copy = (void *)__get_free_pages(GFP_NOIO | __GFP_NOWARN, pdu->copy_order);
	if (pdu->copy) {
		rq_for_each_segment(vector, rq, iter) {
			memcpy_from_bvec(pdu->copy + at, &vector);
			at += vector.bv_len;
		}
		mmblk_count(&dev->counters, MMBLK_C_COPIED, at);
		if (READ_ONCE(dev->state) == MMBLK_LIVE && !mmblk_send(dev, rq)) {
			neigh_kick(dev->neigh);
			return;
		}
	}
	mmblk_again(rq);
	blk_mq_delay_kick_requeue_list(rq->q, 5);
}

static bool mmblk_fill_command(struct mmblk_dev *dev, struct request *rq, unsigned int queue)
{
	struct mmblk_rq *pdu = blk_mq_rq_to_pdu(rq);
	struct mmblk_command *command = &pdu->command;

	memset(command, 0, sizeof(*command));
	command->queue = cpu_to_le16(queue);
	switch (req_op(rq)) {
	case REQ_OP_READ:
		command->op = MMBLK_READ;
		break;
	case REQ_OP_WRITE:
		command->op = MMBLK_WRITE;
		break;
	case REQ_OP_FLUSH:
		command->op = MMBLK_FLUSH;
		pdu->written = atomic_read(&dev->written);
		return true;
	case REQ_OP_DISCARD:
		command->op = MMBLK_DISCARD;
		break;
	case REQ_OP_WRITE_ZEROES:
		command->op = MMBLK_ZEROES;
		if (rq->cmd_flags & REQ_NOUNMAP)
			command->flags |= MMBLK_F_NOUNMAP;
		break;
	default:
		return false;
	}
	if (rq->cmd_flags & REQ_FUA && command->op != MMBLK_READ && command->op != MMBLK_DISCARD)
		command->flags |= MMBLK_F_FUA;
	command->offset = cpu_to_le64((u64)blk_rq_pos(rq) << SECTOR_SHIFT);
	command->bytes = cpu_to_le32(blk_rq_bytes(rq));
	return true;
}

static blk_status_t mmblk_queue_rq(struct blk_mq_hw_ctx *hctx, const struct blk_mq_queue_data *data)
{
	struct mmblk_dev *dev = hctx->queue->queuedata;
	struct request *rq = data->rq;
	struct mmblk_rq *pdu = blk_mq_rq_to_pdu(rq);
	int error;

	switch (READ_ONCE(dev->state)) {
	case MMBLK_LIVE:
		break;
	case MMBLK_SEEKING:
		return BLK_STS_RESOURCE;
	default:
		mmblk_count(&dev->counters, MMBLK_C_ERRORS, 1);
		return BLK_STS_IOERR;
	}
	if (READ_ONCE(dev->lost_writes) && (req_op(rq) == REQ_OP_FLUSH || rq->cmd_flags & REQ_FUA)) {
		WRITE_ONCE(dev->lost_writes, false);
		mmblk_count(&dev->counters, MMBLK_C_ERRORS, 1);
		return BLK_STS_IOERR;
	}
	/* A session may have fewer queues than the disk. */
	if (!mmblk_fill_command(dev, rq, hctx->queue_num % dev->terms.queues))
		return BLK_STS_NOTSUPP;
	blk_mq_start_request(rq);
	error = mmblk_send(dev, rq);
	if (error == -E2BIG) {
		queue_work(mmblk_copy_wq, &pdu->copy_work);
		return BLK_STS_OK;
	}
	/* Without a connection, dead() is about to stop the queues. Without room, blk-mq or room() runs them again. */
	if (error)
		return error == -EINVAL ? BLK_STS_IOERR : BLK_STS_RESOURCE;
	if (data->last)
		neigh_kick(dev->neigh);
	return BLK_STS_OK;
}

static void mmblk_commit_rqs(struct blk_mq_hw_ctx *hctx)
{
	struct mmblk_dev *dev = hctx->queue->queuedata;

	neigh_kick(dev->neigh);
}

static void mmblk_succeed(struct mmblk_dev *dev, struct request *rq)
{
	struct mmblk_counters *counters = &dev->counters;
	struct mmblk_rq *pdu = blk_mq_rq_to_pdu(rq);

	switch (req_op(rq)) {
	case REQ_OP_READ:
		mmblk_count(counters, MMBLK_C_READS, 1);
		mmblk_count(counters, MMBLK_C_READ_BYTES, blk_rq_bytes(rq));
		break;
	case REQ_OP_WRITE:
		mmblk_count(counters, MMBLK_C_WRITES, 1);
		mmblk_count(counters, MMBLK_C_WRITTEN_BYTES, blk_rq_bytes(rq));
		if (!pdu->copy)
			mmblk_count(counters, MMBLK_C_BY_REFERENCE, blk_rq_bytes(rq));
		atomic_inc(&dev->written);
		break;
	case REQ_OP_FLUSH:
		mmblk_count(counters, MMBLK_C_FLUSHES, 1);
		/* Flushes overlap. One that began earlier covers fewer writes. */
		if (pdu->written - atomic_read(&dev->flushed) > 0)
			atomic_set(&dev->flushed, pdu->written);
		break;
	case REQ_OP_DISCARD:
		mmblk_count(counters, MMBLK_C_DISCARDS, 1);
		atomic_inc(&dev->written);
		break;
	default:
		mmblk_count(counters, MMBLK_C_ZEROES, 1);
		atomic_inc(&dev->written);
	}
	mmblk_end(rq, BLK_STS_OK);
}

/* A command has completed. */
static void mmblk_command_done(struct mmblk_post *post, u32 status)
{
	struct mmblk_rq *pdu = container_of(post, struct mmblk_rq, post);
	struct request *rq = blk_mq_rq_from_pdu(pdu);
	struct mmblk_dev *dev = rq->q->queuedata;

	pdu->out = false;
	switch (status) {
	case MMBLK_OK:
		if (pdu->left) {
			pdu->waits = true;
			return;
		}
		mmblk_succeed(dev, rq);
		return;
	case NEIGH_DEAD:
		mmblk_again(rq);
		return;
	case NEIGH_NOBODY:
	case MMBLK_SESSION:
		mmblk_again(rq);
		mmblk_session_over(dev);
		return;
	case MMBLK_BUSY:
		mmblk_again(rq);
		blk_mq_delay_kick_requeue_list(rq->q, 2);
		return;
	case NEIGH_UNREACHABLE:
		if (req_op(rq) != REQ_OP_WRITE || pdu->copy)
			break;
		WRITE_ONCE(dev->copy_foreign, true);
		queue_work(mmblk_copy_wq, &pdu->copy_work);
		return;
	}
	mmblk_end(rq, mmblk_blk_status(status));
}

/* The request with a tag, if it is a read that waits for data. */
static struct request *mmblk_find(struct mmblk_dev *dev, __le64 wire_tag)
{
	u64 tag = le64_to_cpu(wire_tag);
	u16 queue = blk_mq_unique_tag_to_hwq((u32)tag);
	struct request *rq;
	struct mmblk_rq *pdu;

	if (!dev->disk || queue >= dev->set.nr_hw_queues)
		return NULL;
	rq = blk_mq_tag_to_rq(dev->set.tags[queue], blk_mq_unique_tag_to_tag((u32)tag));
	if (!rq || !blk_mq_request_started(rq) || req_op(rq) != REQ_OP_READ)
		return NULL;
	pdu = blk_mq_rq_to_pdu(rq);
	return pdu->command.tag == wire_tag && pdu->left && (pdu->out || pdu->waits) ? rq : NULL;
}

void mmblk_receive_data(struct mmblk_dev *dev, const struct neigh_msg *msg)
{
	struct req_iterator iter;
	struct mmblk_data head;
	struct mmblk_rq *pdu;
	struct bio_vec vector;
	struct request *rq;
	u32 status = MMBLK_PROTOCOL, at = 0, from, to;

	if (msg->parts[0].length != sizeof(head))
		goto out;
	neigh_copy_from(msg, 0, &head, sizeof(head));
	rq = mmblk_find(dev, head.tag);
	/* For example of an earlier connection: no request waits for it. */
	if (!rq)
		goto out;
	pdu = blk_mq_rq_to_pdu(rq);
	from = le32_to_cpu(head.offset);
	to = from + le32_to_cpu(head.bytes);
	/* In order, and no more than was requested. */
	if (to <= from || msg->bytes - sizeof(head) != to - from || from != blk_rq_bytes(rq) - pdu->left ||
	    to > blk_rq_bytes(rq))
		goto out;
	rq_for_each_segment(vector, rq, iter) {
		u32 begin = max(at, from), end = min(at + vector.bv_len, to);

		if (begin < end) {
			void *place = bvec_kmap_local(&vector);

			neigh_copy_from(msg, sizeof(head) + (begin - from), place + (begin - at), end - begin);
			kunmap_local(place);
		}
		at += vector.bv_len;
		if (at >= to)
			break;
	}
	mmblk_count(&dev->counters, MMBLK_C_COPIED, to - from);
	pdu->left -= to - from;
	status = MMBLK_OK;
	if (!pdu->left && pdu->waits) {
		pdu->waits = false;
		mmblk_succeed(dev, rq);
	}
out:
	if (status)
		mmblk_count(&dev->counters, MMBLK_C_REFUSED, 1);
	neigh_complete_quietly(msg->link, msg->id, status);
}

static bool mmblk_take_back_one(struct request *rq, void *data)
{
	struct mmblk_rq *pdu = blk_mq_rq_to_pdu(rq);

	if (blk_mq_request_started(rq) && pdu->waits) {
		pdu->waits = false;
		mmblk_again(rq);
	}
	return true;
}

void mmblk_take_back(struct mmblk_dev *dev)
{
	blk_mq_tagset_busy_iter(&dev->set, mmblk_take_back_one, dev);
}

static enum blk_eh_timer_return mmblk_timeout(struct request *rq)
{
	struct mmblk_dev *dev = rq->q->queuedata;

	/*
	 * The server may read the request's pages, so the request can't just end. The connection ends instead, which completes
	 * everything.
	 */
	mmblk_count(&dev->counters, MMBLK_C_TIMEOUTS, 1);
	queue_work(mmblk_wq, &dev->timeout_work);
	return BLK_EH_RESET_TIMER;
}

static int mmblk_init_request(struct blk_mq_tag_set *set, struct request *rq, unsigned int queue, unsigned int node)
{
	struct mmblk_rq *pdu = blk_mq_rq_to_pdu(rq);

	pdu->post.done = mmblk_command_done;
	pdu->generation = 0;
	pdu->copy = NULL;
	pdu->out = false;
	pdu->waits = false;
	INIT_WORK(&pdu->copy_work, mmblk_copy_work);
	return 0;
}

const struct blk_mq_ops mmblk_mq_ops = {
	.queue_rq = mmblk_queue_rq,
	.commit_rqs = mmblk_commit_rqs,
	.init_request = mmblk_init_request,
	.timeout = mmblk_timeout,
};
