// SPDX-License-Identifier: GPL-2.0
/* mmblk, client side: the disk, its limits, and its attributes in sysfs. */
#include <linux/module.h>

#include "mmblk_client.h"

static struct mmblk_dev *mmblk_of(struct device *device)
{
	return dev_to_disk(device)->private_data;
}

static ssize_t counter_show(struct device *device, struct device_attribute *attr, char *page)
{
	struct dev_ext_attribute *which = container_of(attr, struct dev_ext_attribute, attr);
	const struct mmblk_counters *counters = &mmblk_of(device)->counters;

	return sysfs_emit(page, "%llu\n", (u64)atomic64_read(&counters->value[(uintptr_t)which->var]));
}

#define MMBLK_COUNTER(name, which) \
	static struct dev_ext_attribute mmblk_attr_##name = { \
		.attr = __ATTR(name, 0444, counter_show, NULL), \
		.var = (void *)(uintptr_t)(which), \
	}

MMBLK_COUNTER(reads, MMBLK_C_READS);
MMBLK_COUNTER(writes, MMBLK_C_WRITES);
MMBLK_COUNTER(flushes, MMBLK_C_FLUSHES);
MMBLK_COUNTER(discards, MMBLK_C_DISCARDS);
MMBLK_COUNTER(zeroes, MMBLK_C_ZEROES);
MMBLK_COUNTER(read_bytes, MMBLK_C_READ_BYTES);
MMBLK_COUNTER(written_bytes, MMBLK_C_WRITTEN_BYTES);
MMBLK_COUNTER(by_reference_bytes, MMBLK_C_BY_REFERENCE);
MMBLK_COUNTER(copied_bytes, MMBLK_C_COPIED);
MMBLK_COUNTER(forwarded_bytes, MMBLK_C_FORWARDED);
MMBLK_COUNTER(errors, MMBLK_C_ERRORS);
MMBLK_COUNTER(refused, MMBLK_C_REFUSED);
MMBLK_COUNTER(requeued, MMBLK_C_REQUEUED);
MMBLK_COUNTER(timeouts, MMBLK_C_TIMEOUTS);
MMBLK_COUNTER(attached, MMBLK_C_ATTACHED);
MMBLK_COUNTER(lost, MMBLK_C_LOST);

static ssize_t state_show(struct device *device, struct device_attribute *attr, char *page)
{
	return sysfs_emit(page, "%s\n", mmblk_state_name(mmblk_of(device)));
}
static DEVICE_ATTR_RO(state);

static ssize_t peer_show(struct device *device, struct device_attribute *attr, char *page)
{
	return sysfs_emit(page, "%s\n", mmblk_of(device)->peer_name);
}
static DEVICE_ATTR_RO(peer);

static ssize_t export_show(struct device *device, struct device_attribute *attr, char *page)
{
	return sysfs_emit(page, "%s\n", mmblk_of(device)->export);
}
static DEVICE_ATTR_RO(export);

static struct attribute *mmblk_disk_attrs[] = {
	&dev_attr_state.attr,
	&dev_attr_peer.attr,
	&dev_attr_export.attr,
	&mmblk_attr_reads.attr.attr,
	&mmblk_attr_writes.attr.attr,
	&mmblk_attr_flushes.attr.attr,
	&mmblk_attr_discards.attr.attr,
	&mmblk_attr_zeroes.attr.attr,
	&mmblk_attr_read_bytes.attr.attr,
	&mmblk_attr_written_bytes.attr.attr,
	&mmblk_attr_by_reference_bytes.attr.attr,
	&mmblk_attr_copied_bytes.attr.attr,
	&mmblk_attr_forwarded_bytes.attr.attr,
	&mmblk_attr_errors.attr.attr,
	&mmblk_attr_refused.attr.attr,
	&mmblk_attr_requeued.attr.attr,
	&mmblk_attr_timeouts.attr.attr,
	&mmblk_attr_attached.attr.attr,
	&mmblk_attr_lost.attr.attr,
	NULL,
};

/* /sys/block/mmblkN/mmblk/ */
static const struct attribute_group mmblk_disk_group = {
	.name = "mmblk",
	.attrs = mmblk_disk_attrs,
};

static const struct attribute_group *mmblk_disk_groups[] = { &mmblk_disk_group, NULL };

static const struct block_device_operations mmblk_disk_ops = {
	.owner = THIS_MODULE,
};

/* Since 6.11 all limits are set when the disk is made. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
static struct gendisk *mmblk_disk_alloc(struct mmblk_dev *dev)
{
	const struct mmblk_terms *terms = &dev->terms;
	struct queue_limits limits = {
		.logical_block_size = terms->logical_block,
		.physical_block_size = terms->physical_block,
		.io_min = terms->io_min,
		.io_opt = terms->io_opt,
		.max_hw_sectors = terms->most_bytes >> SECTOR_SHIFT,
		.max_segments = MMBLK_DATA_PARTS,
		.max_segment_size = terms->most_bytes,
		.dma_alignment = MMBLK_ALIGN - 1,
		.max_hw_discard_sectors = terms->most_discard >> SECTOR_SHIFT,
		.discard_granularity = terms->most_discard ? terms->discard_granularity : 0,
		.max_write_zeroes_sectors = terms->most_zeroes >> SECTOR_SHIFT,
	};

	if (terms->features & MMBLK_FEAT_FLUSH)
		limits.features |= BLK_FEAT_WRITE_CACHE | BLK_FEAT_FUA;
	if (terms->flags & MMBLK_EXPORT_STABLE)
		limits.features |= BLK_FEAT_STABLE_WRITES;
	if (terms->flags & MMBLK_EXPORT_ROTATES)
		limits.features |= BLK_FEAT_ROTATIONAL;
	return blk_mq_alloc_disk(&dev->set, &limits, dev);
}
#else
static struct gendisk *mmblk_disk_alloc(struct mmblk_dev *dev)
{
	const struct mmblk_terms *terms = &dev->terms;
	struct gendisk *disk = blk_mq_alloc_disk(&dev->set, dev);
	struct request_queue *queue;

	if (IS_ERR(disk))
		return disk;
	queue = disk->queue;
	blk_queue_logical_block_size(queue, terms->logical_block);
	blk_queue_physical_block_size(queue, terms->physical_block);
	blk_queue_io_min(queue, terms->io_min);
	blk_queue_io_opt(queue, terms->io_opt);
	blk_queue_max_hw_sectors(queue, terms->most_bytes >> SECTOR_SHIFT);
	blk_queue_max_segments(queue, MMBLK_DATA_PARTS);
	blk_queue_max_segment_size(queue, terms->most_bytes);
	blk_queue_dma_alignment(queue, MMBLK_ALIGN - 1);
	blk_queue_max_discard_sectors(queue, terms->most_discard >> SECTOR_SHIFT);
	queue->limits.discard_granularity = terms->most_discard ? terms->discard_granularity : 0;
	blk_queue_max_write_zeroes_sectors(queue, terms->most_zeroes >> SECTOR_SHIFT);
	if (terms->features & MMBLK_FEAT_FLUSH)
		blk_queue_write_cache(queue, true, true);
	if (terms->flags & MMBLK_EXPORT_STABLE)
		blk_queue_flag_set(QUEUE_FLAG_STABLE_WRITES, queue);
	if (!(terms->flags & MMBLK_EXPORT_ROTATES))
		blk_queue_flag_set(QUEUE_FLAG_NONROT, queue);
	return disk;
}
#endif

int mmblk_disk_make(struct mmblk_dev *dev)
{
	const struct mmblk_terms *terms = &dev->terms;
	struct gendisk *disk;
	int error;

	memset(&dev->set, 0, sizeof(dev->set));
	dev->set.ops = &mmblk_mq_ops;
	dev->set.nr_hw_queues = terms->queues;
	dev->set.queue_depth = terms->depth;
	dev->set.numa_node = NUMA_NO_NODE;
	dev->set.cmd_size = sizeof(struct mmblk_rq);
	dev->set.flags = BLK_MQ_F_SHOULD_MERGE;
	dev->set.timeout = msecs_to_jiffies(dev->timeout_ms);
	dev->set.driver_data = dev;
	error = blk_mq_alloc_tag_set(&dev->set);
	if (error)
		return error;
	disk = mmblk_disk_alloc(dev);
	if (IS_ERR(disk)) {
		blk_mq_free_tag_set(&dev->set);
		return PTR_ERR(disk);
	}
	disk->fops = &mmblk_disk_ops;
	disk->private_data = dev;
	snprintf(disk->disk_name, DISK_NAME_LEN, "mmblk%u", dev->number);
	set_disk_ro(disk, terms->flags & MMBLK_EXPORT_READONLY);
	set_capacity(disk, terms->bytes >> SECTOR_SHIFT);
	dev->disk = disk;
	return 0;
}

int mmblk_disk_add(struct mmblk_dev *dev)
{
	int error = device_add_disk(NULL, dev->disk, mmblk_disk_groups);

	dev->added = !error;
	return error;
}

void mmblk_disk_free(struct mmblk_dev *dev)
{
	if (!dev->disk)
		return;
	put_disk(dev->disk);
	blk_mq_free_tag_set(&dev->set);
	dev->disk = NULL;
}

const char *mmblk_disk_differs(const struct mmblk_dev *dev, const struct mmblk_terms *terms)
{
	const struct mmblk_terms *had = &dev->terms;

	if (terms->logical_block != had->logical_block || terms->physical_block != had->physical_block)
		return "block sizes";
	if (terms->most_bytes < had->most_bytes || terms->most_discard < had->most_discard ||
	    terms->most_zeroes < had->most_zeroes)
		return "limits";
	if ((terms->flags ^ had->flags) & (MMBLK_EXPORT_READONLY | MMBLK_EXPORT_STABLE) ||
	    terms->features != had->features)
		return "flags or features";
	if (terms->bytes < had->bytes)
		return "size";
	return NULL;
}
