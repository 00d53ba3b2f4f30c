// SPDX-License-Identifier: GPL-2.0
/*
 * A broken neighbour. Beside the working modules, it corrupts this VM's ends of a pair's rings, or stores to a neighbour's
 * window. Only for tests. Write "SLOT NUMBER" to a parameter:
 *
 *	wild	one violation, of FAULT_WILD kinds by number; the peer must end this pair's connection, and no other
 *	store	NUMBER stores of 8 bytes to the window of that slot; each must be discarded
 */
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/random.h>
#include <linux/uaccess.h>

#include "causeway_neighbour.h"

#define FAULT_WILD 10

struct fault_pair {
	struct pci_dev *pdev;
	void __iomem *regs;
	void *segment;
	u32 slot, own, side, entries, epoch;
	u64 base, stride;
};

static void pair_close(struct fault_pair *pair)
{
	if (pair->segment)
		memunmap(pair->segment);
	if (pair->regs)
		iounmap(pair->regs);
	pci_dev_put(pair->pdev);
}

static int pair_open(struct fault_pair *pair, u32 slot)
{
	u32 stride;

	*pair = (struct fault_pair) { .slot = slot };
	pair->pdev = pci_get_device(CW_NB_VENDOR, CW_NB_DEVICE, NULL);
	if (!pair->pdev)
		return -ENODEV;
	pair->regs = ioremap(pci_resource_start(pair->pdev, CW_NB_BAR_REGISTERS), pci_resource_len(pair->pdev, CW_NB_BAR_REGISTERS));
	if (!pair->regs || slot >= readl(pair->regs + CW_NB_SLOTS))
		goto bad;
	pair->own = readl(pair->regs + CW_NB_OWN_SLOT);
	pair->side = pair->own > slot;
	pair->entries = readl(pair->regs + CW_NB_ENTRIES);
	pair->base = readl(pair->regs + CW_NB_BASE) | (u64)readl(pair->regs + CW_NB_BASE + 4) << 32;
	pair->stride = readl(pair->regs + CW_NB_STRIDE) | (u64)readl(pair->regs + CW_NB_STRIDE + 4) << 32;
	stride = readl(pair->regs + CW_NB_SEGMENT_STRIDE);
	if (readl(pair->regs + CW_NB_PEERS + slot * CW_NB_PEER_STRIDE + CW_NB_PEER_STATE) != CW_NB_PEER_OFFERED)
		goto bad;
	pair->segment = memremap(pci_resource_start(pair->pdev, CW_NB_BAR_SEGMENTS) + slot * stride, CW_NB_SEGMENT_SIZE(pair->entries),
				 MEMREMAP_WB);
	if (!pair->segment)
		goto bad;
	pair->epoch = le64_to_cpu(READ_ONCE(((struct cw_nb_header *)pair->segment)->epoch));
	return 0;
bad:
	pair_close(pair);
	return -ENXIO;
}

static void *direction(const struct fault_pair *pair, u32 sender)
{
	return pair->segment + CW_NB_DIRECTIONS + sender * CW_NB_DIRECTION_SIZE(pair->entries);
}

/* Number of entries of a ring that were written in this epoch: the highest number in a stamp. */
static u32 written(const struct fault_pair *pair, const void *stamps, size_t size)
{
	u32 i, most = 0;

	for (i = 0; i < pair->entries; i++) {
		u64 stamp = le64_to_cpu(READ_ONCE(*(const __le64 *)(stamps + i * size)));

		if (stamp >> 32 == pair->epoch)
			most = max(most, (u32)stamp);
	}
	return most;
}

/* Writes the next entries of the message ring, as a driver would, and signals. */
static void post(const struct fault_pair *pair, u64 address, u32 length, u32 flags, u32 id, u32 count)
{
	struct cw_nb_message *ring = direction(pair, pair->side) + CW_NB_MESSAGES;
	u32 next = written(pair, &ring->stamp, sizeof(*ring)), i;

	/* From the last to the first entry: the peer sees all or none. */
	for (i = count; i--;) {
		struct cw_nb_message *entry = &ring[(next + i) & (pair->entries - 1)];

		WRITE_ONCE(entry->address, cpu_to_le64(address));
		WRITE_ONCE(entry->length, cpu_to_le32(length));
		WRITE_ONCE(entry->flags, cpu_to_le16(flags));
		WRITE_ONCE(entry->kind, cpu_to_le16(0x0100));
		WRITE_ONCE(entry->id, cpu_to_le32(id));
		WRITE_ONCE(entry->note, 0);
		/* Pairs with the peer's acquiring load. */
		smp_store_release(&entry->stamp, cpu_to_le64(CW_NB_STAMP(pair->epoch, next + i)));
	}
}

static void give_back(const struct fault_pair *pair, u32 id)
{
	struct cw_nb_completion *ring = direction(pair, !pair->side) + CW_NB_MESSAGES + pair->entries * sizeof(struct cw_nb_message);
	u32 next = written(pair, &ring->stamp, sizeof(*ring));
	struct cw_nb_completion *entry = &ring[next & (pair->entries - 1)];

	WRITE_ONCE(entry->id, cpu_to_le32(id));
	WRITE_ONCE(entry->status, 0);
	/* Pairs with the peer's acquiring load. */
	smp_store_release(&entry->stamp, cpu_to_le64(CW_NB_STAMP(pair->epoch, next)));
}

/*
 * Writes random entries with valid stamps to both rings that this side writes. Only to a quarter of each ring: entries that the
 * peer hasn't read stay. Without them it would wait forever, as for a peer that is alive and silent.
 */
static void fill(const struct fault_pair *pair)
{
	struct cw_nb_message *ring = direction(pair, pair->side) + CW_NB_MESSAGES;
	u32 next = written(pair, &ring->stamp, sizeof(*ring)), i;

	for (i = pair->entries / 4; i--;) {
		struct cw_nb_message entry;

		get_random_bytes(&entry, sizeof(entry));
		/* Every second one is in the sender's window, so that later checks are tested, too. */
		if (i & 1)
			entry.address = cpu_to_le64(pair->base + pair->own * pair->stride + (get_random_u32() & 0x3fffffff));
		entry.flags &= cpu_to_le16(3);
		entry.stamp = cpu_to_le64(CW_NB_STAMP(pair->epoch, next + i));
		memcpy(&ring[(next + i) & (pair->entries - 1)], &entry, sizeof(entry));
	}
	give_back(pair, get_random_u32());
}

static int wild(struct fault_pair *pair, u32 number)
{
	u64 own = pair->base + pair->own * pair->stride;
	/* One of the last ids, which a driver uses last. */
	u32 id = pair->entries - 1;

	switch (number % FAULT_WILD) {
	case 0: /* no VM's memory */
		post(pair, 0x1000, 4096, 0, id, 1);
		break;
	case 1: /* in the own window, outside of RAM */
		post(pair, own + pair->stride - 4096, 4096, 0, id, 1);
		break;
	case 2: /* a length that leaves the window */
		post(pair, own + 0x100000, U32_MAX, 0, id, 1);
		break;
	case 3: /* an end that overflows */
		post(pair, U64_MAX - 100, 4096, 0, id, 1);
		break;
	case 4:
		post(pair, own + 0x100000, 0, 0, id, 1);
		break;
	case 5: /* unknown flags */
		post(pair, own + 0x100000, 4096, 0xfff0, id, 1);
		break;
	case 6: /* an unknown id */
		post(pair, own + 0x100000, 4096, 0, pair->entries + (get_random_u32() & 0x3ff), 1);
		break;
	case 7: /* a list without end */
		post(pair, own + 0x100000, 4096, CW_NB_FLAG_MORE, id, CW_NB_MOST_PARTS + 8);
		break;
	case 8: /* a completion of an id that isn't outstanding */
		give_back(pair, pair->entries + 5);
		break;
	case 9:
		fill(pair);
		break;
	}
	/* The doorbell: a 32-bit store of any value. */
	writel(1, pair->regs + CW_NB_DOORBELLS + pair->slot * CW_NB_DOORBELL_STRIDE);
	return 0;
}

/* Stores through the direct map, where the core has put the window's pages. A load detects a missing window. */
static int store(struct fault_pair *pair, u32 number)
{
	u64 value, *place;

	while (number--) {
		place = __va(pair->base + pair->slot * pair->stride + 0x100000 + 8 * (get_random_u32() & 0xfffff));
		if (copy_from_kernel_nofault(&value, place, sizeof(value)))
			return -EFAULT;
		WRITE_ONCE(*place, ~value);
	}
	return 0;
}

static int act(const char *text, int (*what)(struct fault_pair *pair, u32 number))
{
	struct fault_pair pair;
	u32 slot, number;
	int ret;

	if (sscanf(text, "%u %u", &slot, &number) != 2)
		return -EINVAL;
	ret = pair_open(&pair, slot);
	if (ret)
		return ret;
	ret = what(&pair, number);
	pair_close(&pair);
	return ret;
}

static int wild_set(const char *text, const struct kernel_param *param)
{
	return act(text, wild);
}

static int store_set(const char *text, const struct kernel_param *param)
{
	return act(text, store);
}

static const struct kernel_param_ops wild_ops = { .set = wild_set };
static const struct kernel_param_ops store_ops = { .set = store_set };
module_param_cb(wild, &wild_ops, NULL, 0200);
module_param_cb(store, &store_ops, NULL, 0200);

static int __init fault_init(void)
{
	return 0;
}

static void __exit fault_exit(void)
{
}

module_init(fault_init);
module_exit(fault_exit);
MODULE_DESCRIPTION("A broken neighbour, for tests");
MODULE_LICENSE("GPL");
