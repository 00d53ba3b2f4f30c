// SPDX-License-Identifier: GPL-2.0
/*
 * mmblk, server side: access to the exported device. A write's bio names the window's pages, which go to a block device without a
 * copy. A read goes into pages of this VM, from which the client copies: this VM can't write the client's memory.
 *
 * A file is opened for direct I/O if its file system supports it, so that writes aren't copied there either.
 */
#include <linux/fs.h>
#include <linux/falloc.h>
#include <linux/file.h>
#include <linux/module.h>
#include <linux/uio.h>

#include "compat.h"
#include "mmblk_server.h"

/* Largest order of a read's pages: large pages need fewer parts in a message. */
#define MMBLK_READ_ORDER	3

static u32 mmblk_status(int error)
{
	switch (error) {
	case 0:
		return MMBLK_OK;
	case -ENOSPC:
		return MMBLK_NOSPC;
	case -EOPNOTSUPP:
		return MMBLK_UNSUPPORTED;
	case -EROFS:
	case -EPERM:
		return MMBLK_READONLY;
	case -ENODATA:
		return MMBLK_MEDIUM;
	case -ETIMEDOUT:
		return MMBLK_TIMEOUT;
	default:
		return MMBLK_IO;
	}
}

static void mmblk_limits_of_bdev(struct mmblk_export *export)
{
	struct block_device *bdev = export->bdev;

	export->bytes = (u64)bdev_nr_sectors(bdev) << SECTOR_SHIFT;
	export->logical_block = bdev_logical_block_size(bdev);
	export->physical_block = bdev_physical_block_size(bdev);
	export->io_min = bdev_io_min(bdev);
	export->io_opt = bdev_io_opt(bdev);
	export->features = MMBLK_FEAT_FLUSH;
	if (bdev_stable_writes(bdev))
		export->flags |= MMBLK_EXPORT_STABLE;
	if (!bdev_nonrot(bdev))
		export->flags |= MMBLK_EXPORT_ROTATES;
	if (bdev_max_discard_sectors(bdev)) {
		export->features |= MMBLK_FEAT_DISCARD;
		export->most_discard = min_t(u64, (u64)bdev_max_discard_sectors(bdev) << SECTOR_SHIFT,
					     1u << 30);
		export->discard_granularity = max(bdev_discard_granularity(bdev), export->logical_block);
	}
	if (bdev_write_zeroes_sectors(bdev)) {
		export->features |= MMBLK_FEAT_ZEROES;
		export->most_zeroes = min_t(u64, (u64)bdev_write_zeroes_sectors(bdev) << SECTOR_SHIFT,
					    1u << 30);
	}
}

static void mmblk_limits_of_file(struct mmblk_export *export)
{
	struct inode *inode = file_inode(export->file);

	export->bytes = round_down(i_size_read(inode), PAGE_SIZE);
	/* Direct I/O needs the block size of the device below. */
	export->logical_block = inode->i_sb->s_bdev && !export->buffered ?
		bdev_logical_block_size(inode->i_sb->s_bdev) : SECTOR_SIZE;
	export->physical_block = PAGE_SIZE;
	export->io_min = PAGE_SIZE;
	export->io_opt = 0;
	export->features = MMBLK_FEAT_FLUSH;
	if (export->buffered)
		export->flags |= MMBLK_EXPORT_VOLATILE;
	if (inode->i_sb->s_bdev && bdev_stable_writes(inode->i_sb->s_bdev) && !export->buffered)
		export->flags |= MMBLK_EXPORT_STABLE;
	if (export->file->f_op->fallocate && !export->readonly) {
		export->features |= MMBLK_FEAT_DISCARD | MMBLK_FEAT_ZEROES;
		export->most_discard = 1u << 30;
		export->most_zeroes = 1u << 30;
		export->discard_granularity = PAGE_SIZE;
	}
}

int mmblk_backend_open(struct mmblk_export *export)
{
	int flags = O_LARGEFILE | (export->readonly ? O_RDONLY : O_RDWR);
	struct inode *inode;
	struct file *file;
	int error;

	/* O_EXCL claims a block device: no other process can mount or serve it meanwhile. */
	file = filp_open(export->path, flags | O_DIRECT | O_EXCL, 0);
	export->buffered = false;
	if (PTR_ERR_OR_ZERO(file) == -EINVAL) {
		/* The file system doesn't support direct I/O. */
		file = filp_open(export->path, flags, 0);
		export->buffered = true;
	}
	if (IS_ERR(file)) {
		pr_warn("mmblk: %s can't be exported: opening %s: error %ld\n",
			config_item_name(&export->group.cg_item), export->path, PTR_ERR(file));
		return PTR_ERR(file);
	}
	export->file = file;
	export->bdev = NULL;
	export->flags = export->readonly ? MMBLK_EXPORT_READONLY : 0;
	export->features = 0;
	export->most_discard = 0;
	export->discard_granularity = 0;
	export->most_zeroes = 0;
	inode = file->f_mapping->host;
	error = -EINVAL;
	if (S_ISBLK(inode->i_mode)) {
		export->bdev = I_BDEV(inode);
		export->buffered = false;
		/* From now on nothing uses this VM's page cache of the device. */
		sync_blockdev(export->bdev);
		invalidate_bdev(export->bdev);
		mmblk_limits_of_bdev(export);
		if (bdev_dma_alignment(export->bdev) > MMBLK_ALIGN - 1) {
			pr_warn("mmblk: %s can't be exported: %s needs buffers aligned to more than %u bytes\n",
				config_item_name(&export->group.cg_item), export->path, MMBLK_ALIGN);
			goto close;
		}
		if (!export->readonly && bdev_read_only(export->bdev)) {
			pr_warn("mmblk: %s can't be exported: %s is read-only; write 1 to readonly\n",
				config_item_name(&export->group.cg_item), export->path);
			error = -EROFS;
			goto close;
		}
	} else if (S_ISREG(inode->i_mode)) {
		mmblk_limits_of_file(export);
	} else {
		pr_warn("mmblk: %s can't be exported: %s is neither a block device nor a file\n",
			config_item_name(&export->group.cg_item), export->path);
		goto close;
	}
	if (!export->bytes) {
		pr_warn("mmblk: %s can't be exported: %s is empty\n",
			config_item_name(&export->group.cg_item), export->path);
		goto close;
	}
	error = -ENOMEM;
	export->contexts = mempool_create_kmalloc_pool(2, sizeof(struct mmblk_read));
	if (!export->contexts)
		goto close;
	export->pages = mempool_create_page_pool(MMBLK_CHUNKS, 0);
	if (!export->pages)
		goto no_pages;
	export->wq = alloc_workqueue("mmblk-%s", WQ_MEM_RECLAIM | WQ_HIGHPRI | WQ_UNBOUND, 0,
				     config_item_name(&export->group.cg_item));
	if (!export->wq)
		goto no_wq;
	uuid_gen(&export->instance);
	return 0;

no_wq:
	mempool_destroy(export->pages);
no_pages:
	mempool_destroy(export->contexts);
close:
	fput(file);
	export->file = NULL;
	return error;
}

void mmblk_backend_close(struct mmblk_export *export)
{
	destroy_workqueue(export->wq);
	mempool_destroy(export->pages);
	mempool_destroy(export->contexts);
	if (!export->readonly)
		vfs_fsync(export->file, 1);
	fput(export->file);
	export->file = NULL;
	export->bdev = NULL;
}

/* Counts a write's bytes. */
static void mmblk_count_write(struct mmblk_req *req)
{
	struct mmblk_counters *counters = &req->session->export->counters;

	mmblk_count(counters, MMBLK_C_WRITTEN_BYTES, req->bytes);
	if (req->session->export->buffered) {
		mmblk_count(counters, MMBLK_C_COPIED, req->bytes);
		return;
	}
	mmblk_count(counters, MMBLK_C_BY_REFERENCE, req->bytes);
	mmblk_count(counters, MMBLK_C_FORWARDED, req->foreign);
}

static void mmblk_bio_end(struct bio *bio)
{
	struct mmblk_req *req = bio->bi_private;
	u32 status = mmblk_status(blk_status_to_errno(bio->bi_status));

	bio_put(bio);
	mmblk_answer(req, status);
}

static struct bio *mmblk_bio(struct mmblk_req *req, unsigned short vectors, blk_opf_t opf)
{
	struct bio *bio = bio_alloc(req->session->export->bdev, vectors, opf, GFP_NOIO);

	bio->bi_iter.bi_sector = req->offset >> SECTOR_SHIFT;
	bio->bi_private = req;
	bio->bi_end_io = mmblk_bio_end;
	return bio;
}

static void mmblk_write_bdev(struct mmblk_req *req)
{
	blk_opf_t opf = REQ_OP_WRITE | REQ_SYNC | REQ_IDLE;
	struct bio *bio;
	u16 i;

	if (req->flags & MMBLK_F_FUA)
		opf |= REQ_FUA;
	bio = mmblk_bio(req, req->count, opf);
	for (i = 0; i < req->count; i++) {
		const struct neigh_part *part = &req->parts[i];

		/* A part is contiguous, and so are the window's struct pages. */
		if (bio_add_page(bio, neigh_part_page(part), part->length, neigh_part_offset(part)) !=
		    part->length) {
			bio_io_error(bio);
			return;
		}
	}
	submit_bio(bio);
}

/* Reads or writes a file, with req->bytes from the start of the bvecs. Returns 0 or an error. */
static int mmblk_file_io(struct mmblk_req *req, struct bio_vec *vectors, unsigned int count, bool write)
{
	struct file *file = req->session->export->file;
	loff_t at = req->offset;
	struct iov_iter iter;
	ssize_t done;

	iov_iter_bvec(&iter, write ? WRITE : READ, vectors, count, req->bytes);
	while (iov_iter_count(&iter)) {
		if (write)
			done = compat_iter_write(file, &iter, &at, req->flags & MMBLK_F_FUA ? RWF_DSYNC : 0);
		else
			done = vfs_iter_read(file, &iter, &at, 0);
		if (done < 0)
			return done;
		if (!done)
			return -EIO;
	}
	return 0;
}

static void mmblk_write_file(struct mmblk_req *req)
{
	struct bio_vec vectors[MMBLK_DATA_PARTS];
	u16 i;

	for (i = 0; i < req->count; i++) {
		vectors[i].bv_page = neigh_part_page(&req->parts[i]);
		vectors[i].bv_len = req->parts[i].length;
		vectors[i].bv_offset = neigh_part_offset(&req->parts[i]);
	}
	mmblk_answer(req, mmblk_status(mmblk_file_io(req, vectors, req->count, true)));
}

/*
 * Allocates pages for a read. If memory is short, one read at a time uses the reserve, which is as large as the largest read.
 * That read always completes, since the client returns pages without allocating memory.
 */
static void mmblk_read_pages(struct mmblk_export *export, struct mmblk_read *read, u32 bytes)
{
	u32 left = bytes;

	read->chunks = 0;
	while (left) {
		unsigned int order = min_t(unsigned int, MMBLK_READ_ORDER, get_order(left));
		struct mmblk_chunk *chunk = &read->chunk[read->chunks];
		struct page *page = NULL;

		if (!read->holds_reserve) {
			gfp_t gfp = GFP_NOIO | __GFP_NOWARN | __GFP_NORETRY;

			page = alloc_pages(gfp, order);
			if (!page && order) {
				order = 0;
				page = alloc_pages(gfp, 0);
			}
			chunk->reserved = false;
			if (!page) {
				mutex_lock(&export->reserve);
				read->holds_reserve = true;
			}
		}
		if (!page) {
			order = 0;
			page = mempool_alloc(export->pages, GFP_NOIO);
			chunk->reserved = true;
		}
		chunk->page = page;
		chunk->order = order;
		chunk->length = min_t(u32, left, PAGE_SIZE << order);
		left -= chunk->length;
		read->chunks++;
	}
	if (read->holds_reserve) {
		/* The next read waits for pages that this one returns. */
		read->holds_reserve = false;
		mutex_unlock(&export->reserve);
	}
}

void mmblk_read_put(struct mmblk_read *read)
{
	struct mmblk_session *session = read->session;
	struct mmblk_export *export = session->export;
	u16 i;

	if (!atomic_dec_and_test(&read->pending))
		return;
	for (i = 0; i < read->chunks; i++) {
		if (read->chunk[i].reserved)
			mempool_free(read->chunk[i].page, export->pages);
		else
			__free_pages(read->chunk[i].page, read->chunk[i].order);
	}
	mempool_free(read, export->contexts);
	mmblk_session_put(session);
}

static void mmblk_read(struct mmblk_req *req)
{
	struct mmblk_session *session = req->session;
	struct mmblk_export *export = session->export;
	struct mmblk_read *read;
	struct bio *bio;
	u16 i;

	read = mempool_alloc(export->contexts, GFP_NOIO);
	read->session = session;
	refcount_inc(&session->refs);
	atomic_set(&read->pending, 1);
	read->holds_reserve = false;
	read->replies = 0;
	read->sent = 0;
	req->read = read;
	mmblk_read_pages(export, read, req->bytes);

	if (!export->bdev) {
		struct bio_vec *vectors = kmalloc_array(read->chunks, sizeof(*vectors), GFP_NOIO);
		int error = -ENOMEM;

		if (vectors) {
			for (i = 0; i < read->chunks; i++) {
				vectors[i].bv_page = read->chunk[i].page;
				vectors[i].bv_len = read->chunk[i].length;
				vectors[i].bv_offset = 0;
			}
			error = mmblk_file_io(req, vectors, read->chunks, false);
			kfree(vectors);
		}
		mmblk_answer(req, mmblk_status(error));
		return;
	}
	bio = mmblk_bio(req, read->chunks, REQ_OP_READ | REQ_SYNC | REQ_IDLE);
	for (i = 0; i < read->chunks; i++) {
		if (bio_add_page(bio, read->chunk[i].page, read->chunk[i].length, 0) !=
		    read->chunk[i].length) {
			bio_io_error(bio);
			return;
		}
	}
	submit_bio(bio);
}

static int mmblk_discard(struct mmblk_req *req, bool zeroes)
{
	struct mmblk_export *export = req->session->export;
	sector_t sector = req->offset >> SECTOR_SHIFT, count = req->bytes >> SECTOR_SHIFT;
	bool keep = req->flags & MMBLK_F_NOUNMAP;
	int error, mode;

	if (export->bdev && !zeroes)
		return blkdev_issue_discard(export->bdev, sector, count, GFP_NOIO);
	if (export->bdev) {
		error = blkdev_issue_zeroout(export->bdev, sector, count, GFP_NOIO,
					     keep ? BLKDEV_ZERO_NOUNMAP : 0);
	} else {
		mode = zeroes && keep ? FALLOC_FL_ZERO_RANGE : FALLOC_FL_PUNCH_HOLE;
		error = vfs_fallocate(export->file, mode | FALLOC_FL_KEEP_SIZE, req->offset, req->bytes);
	}
	if (!error && zeroes && req->flags & MMBLK_F_FUA)
		error = export->bdev ? blkdev_issue_flush(export->bdev) : vfs_fsync(export->file, 1);
	return error;
}

void mmblk_backend_run(struct mmblk_req *req)
{
	struct mmblk_export *export = req->session->export;
	struct mmblk_counters *counters = &export->counters;
	int error;

	switch (req->op) {
	case MMBLK_READ:
		mmblk_count(counters, MMBLK_C_READS, 1);
		mmblk_count(counters, MMBLK_C_READ_BYTES, req->bytes);
		mmblk_read(req);
		return;
	case MMBLK_WRITE:
		mmblk_count(counters, MMBLK_C_WRITES, 1);
		mmblk_count_write(req);
		if (export->bdev)
			mmblk_write_bdev(req);
		else
			mmblk_write_file(req);
		return;
	case MMBLK_FLUSH:
		mmblk_count(counters, MMBLK_C_FLUSHES, 1);
		error = export->bdev ? blkdev_issue_flush(export->bdev) : vfs_fsync(export->file, 1);
		break;
	case MMBLK_DISCARD:
		mmblk_count(counters, MMBLK_C_DISCARDS, 1);
		error = mmblk_discard(req, false);
		break;
	default:	/* MMBLK_ZEROES; the parser accepts nothing else. */
		mmblk_count(counters, MMBLK_C_ZEROES, 1);
		error = mmblk_discard(req, true);
		break;
	}
	mmblk_answer(req, mmblk_status(error));
}
