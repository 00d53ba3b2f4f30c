// SPDX-License-Identifier: GPL-2.0
/* The driver of the neighbours' PCI function: probe, interrupts, heartbeat, and users of the core. */
#include <linux/io.h>
#include <linux/io-64-nonatomic-lo-hi.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "compat.h"
#include "core.h"

/* Protects users, devices, neighbours and their states. */
DEFINE_MUTEX(neigh_mutex);
struct workqueue_struct *neigh_wq;
struct neigh_user *neigh_users[NEIGH_PROTOCOLS];
DECLARE_WAIT_QUEUE_HEAD(neigh_released);
static LIST_HEAD(neigh_devs);

unsigned int neigh_spin_us = 20;
module_param_named(spin_us, neigh_spin_us, uint, 0644);
MODULE_PARM_DESC(spin_us, "longest time to look for more before sleeping, microseconds; 0: never (default 20)");

/* Time that a device's removal waits for pages in use before each attempt to detach their windows. */
#define NEIGH_PATIENCE	(2 * HZ)

static irqreturn_t neigh_signalled(int irq, void *data)
{
	struct neigh *nb = data;

	if (READ_ONCE(nb->polling))
		napi_schedule(&nb->napi);
	else
		neigh_queue(nb);
	return IRQ_HANDLED;
}

static irqreturn_t neigh_changed(int irq, void *data)
{
	struct neigh_dev *dev = data;

	queue_work(neigh_wq, &dev->scan);
	return IRQ_HANDLED;
}

/* Users */

static void attach(struct neigh *nb, struct neigh_user *user)
{
	struct neigh_attached *at = &nb->attached[user->protocol];
	bool live = nb->state == NEIGH_LIVE;
	void *priv;

	priv = user->ops->add(nb);
	if (IS_ERR(priv)) {
		dev_warn(nb->parent, "neighbour %u (%s): %s doesn't take it (%ld)\n", nb->slot, nb->name, user->name,
			 PTR_ERR(priv));
		return;
	}
	if (live)
		napi_disable(&nb->napi);
	at->priv = priv;
	at->user = user;
	if (live) {
		neigh_user_live(nb, user);
		napi_enable(&nb->napi);
		local_bh_disable();
		napi_schedule(&nb->napi);
		local_bh_enable();
	}
}

static void detach(struct neigh *nb, struct neigh_user *user)
{
	struct neigh_attached *at = &nb->attached[user->protocol];
	struct neigh_link *link = rcu_dereference_protected(nb->link, lockdep_is_held(&neigh_mutex));
	bool live = nb->state == NEIGH_LIVE;

	if (at->user != user)
		return;
	if (live) {
		napi_disable(&nb->napi);
		neigh_user_dead(nb, user);
	}
	user->ops->remove(nb, at->priv);
	at->user = NULL;
	at->priv = NULL;
	/* The user's module doesn't hold this one any more, but skbs may refer to pages: page_free() must stay loaded. */
	if (link && !link->pinned && refcount_read(&link->users) > (nb->state == NEIGH_ENDED ? 0 : 1)) {
		__module_get(THIS_MODULE);
		WRITE_ONCE(link->pinned, true);
		/* The last page may have returned before that was set. */
		neigh_queue(nb);
	}
	if (live) {
		napi_enable(&nb->napi);
		local_bh_disable();
		napi_schedule(&nb->napi);
		local_bh_enable();
	}
}

int neigh_register_user(struct neigh_user *user)
{
	struct neigh_dev *dev;
	int ret = 0;
	u32 i;

	if (!user->protocol || user->protocol >= NEIGH_PROTOCOLS || !user->share || user->share > 16)
		return -EINVAL;
	mutex_lock(&neigh_mutex);
	if (neigh_users[user->protocol]) {
		ret = -EBUSY;
	} else {
		neigh_users[user->protocol] = user;
		list_for_each_entry(dev, &neigh_devs, list)
			for (i = 0; i < dev->slots; i++)
				if (dev->neighs[i])
					attach(dev->neighs[i], user);
	}
	mutex_unlock(&neigh_mutex);
	return ret;
}
EXPORT_SYMBOL_GPL(neigh_register_user);

void neigh_unregister_user(struct neigh_user *user)
{
	struct neigh_dev *dev;
	u32 i;

	mutex_lock(&neigh_mutex);
	if (neigh_users[user->protocol] == user) {
		list_for_each_entry(dev, &neigh_devs, list)
			for (i = 0; i < dev->slots; i++)
				if (dev->neighs[i])
					detach(dev->neighs[i], user);
		neigh_users[user->protocol] = NULL;
	}
	mutex_unlock(&neigh_mutex);
}
EXPORT_SYMBOL_GPL(neigh_unregister_user);

u32 neigh_slot(const struct neigh *nb)
{
	return nb->slot;
}
EXPORT_SYMBOL_GPL(neigh_slot);

const char *neigh_name(const struct neigh *nb)
{
	return nb->name;
}
EXPORT_SYMBOL_GPL(neigh_name);

const u8 *neigh_mac(const struct neigh *nb)
{
	return nb->mac;
}
EXPORT_SYMBOL_GPL(neigh_mac);

struct device *neigh_device(struct neigh *nb)
{
	return nb->parent;
}
EXPORT_SYMBOL_GPL(neigh_device);

u32 neigh_epoch(const struct neigh *nb)
{
	struct neigh_link *link;
	u32 epoch = 0;

	rcu_read_lock();
	link = rcu_dereference(nb->link);
	if (link && READ_ONCE(link->open))
		epoch = link->epoch;
	rcu_read_unlock();
	return epoch;
}
EXPORT_SYMBOL_GPL(neigh_epoch);

struct napi_struct *neigh_napi(struct neigh *nb)
{
	return &nb->napi;
}
EXPORT_SYMBOL_GPL(neigh_napi);

void neigh_counts(const struct neigh *nb, struct neigh_counts *counts)
{
	counts->signals = nb->signals;
	counts->wakeups = nb->wakeups;
	counts->polls = nb->polls;
	counts->spins = nb->spins;
	counts->spins_won = nb->spins_won;
}
EXPORT_SYMBOL_GPL(neigh_counts);

/* The device */

/* Creates the neighbour of a slot that is used for the first time. */
static struct neigh *neigh_new(struct neigh_dev *dev, u32 slot)
{
	struct neigh *nb = kzalloc(sizeof(*nb), GFP_KERNEL);
	int ret, i;

	if (!nb)
		return NULL;
	kref_init(&nb->ref);
	nb->dev = dev;
	nb->slot = slot;
	nb->own_start = dev->base + dev->own * dev->stride;
	nb->doorbell = dev->regs + CW_NB_DOORBELLS + slot * CW_NB_DOORBELL_STRIDE;
	neigh_read_name(nb);
	spin_lock_init(&nb->tx_lock);
	INIT_WORK(&nb->work, neigh_work);
	INIT_DELAYED_WORK(&nb->retry_release, neigh_retry_release);
	timer_setup(&nb->room_timer, neigh_room_timer, 0);
	nb->napi_dev = compat_dummy_netdev();
	nb->parent = get_device(&dev->pdev->dev);
	if (!nb->napi_dev) {
		kref_put(&nb->ref, neigh_free);
		return NULL;
	}
	netif_napi_add(nb->napi_dev, &nb->napi, neigh_poll);
	nb->irq = pci_irq_vector(dev->pdev, 1 + slot);
	snprintf(nb->irq_name, sizeof(nb->irq_name), "neighbour-%u", slot);
	ret = request_irq(nb->irq, neigh_signalled, 0, nb->irq_name, nb);
	if (ret) {
		dev_err(nb->parent, "neighbour %u: its interrupt can't be had (%d)\n", slot, ret);
		netif_napi_del(&nb->napi);
		compat_dummy_netdev_free(nb->napi_dev);
		kref_put(&nb->ref, neigh_free);
		return NULL;
	}
	dev->neighs[slot] = nb;
	for (i = 1; i < NEIGH_PROTOCOLS; i++)
		if (neigh_users[i])
			attach(nb, neigh_users[i]);
	return nb;
}

static void neigh_remove(struct neigh_dev *dev, u32 slot)
{
	struct neigh *nb = dev->neighs[slot];

	if (nb->irq)
		free_irq(nb->irq, nb);
	dev->neighs[slot] = NULL;
	netif_napi_del(&nb->napi);
	compat_dummy_netdev_free(nb->napi_dev);
	kref_put(&nb->ref, neigh_free);
}

static void neigh_scan(struct work_struct *work)
{
	struct neigh_dev *dev = container_of(work, struct neigh_dev, scan);
	u64 changed;
	u32 slot;

	mutex_lock(&neigh_mutex);
	changed = readq(dev->regs + CW_NB_CHANGED);
	/* Members that joined before this driver was loaded. */
	if (!dev->looked)
		changed = U64_MAX;
	dev->looked = true;
	if (readl(dev->regs + CW_NB_OWN_SLOT) != dev->own)
		dev_err_once(&dev->pdev->dev, "the host daemon gave this VM another slot; load the driver anew\n");
	for (slot = 0; slot < dev->slots && !dev->going; slot++) {
		struct neigh *nb = dev->neighs[slot];

		if (slot == dev->own || (!nb && !(changed & BIT_ULL(slot))))
			continue;
		if (!nb && readl(dev->regs + CW_NB_PEERS + slot * CW_NB_PEER_STRIDE) == CW_NB_PEER_OFFERED)
			nb = neigh_new(dev, slot);
		if (nb)
			neigh_look(nb);
	}
	mutex_unlock(&neigh_mutex);
}

static void neigh_beat(struct timer_list *timer)
{
	struct neigh_dev *dev = container_of(timer, struct neigh_dev, heartbeat);

	WRITE_ONCE(*dev->status, cpu_to_le64(++dev->beat));
	mod_timer(timer, jiffies + msecs_to_jiffies(dev->heartbeat_ms));
}

static int neigh_read(struct neigh_dev *dev)
{
	struct device *parent = &dev->pdev->dev;
	void __iomem *regs = dev->regs;

	if (readl(regs + CW_NB_REGISTER_MAGIC) != CW_NB_REGISTER_MAGIC_VALUE) {
		dev_err(parent, "not a neighbours' function: magic %#x\n", readl(regs + CW_NB_REGISTER_MAGIC));
		return -ENODEV;
	}
	if (readl(regs + CW_NB_REGISTER_VERSION) != CW_NB_REGISTER_VERSION_VALUE) {
		dev_err(parent, "its version is %u, and this driver knows %u; use the same of both\n",
			readl(regs + CW_NB_REGISTER_VERSION), (u32)CW_NB_REGISTER_VERSION_VALUE);
		return -ENODEV;
	}
	dev->own = readl(regs + CW_NB_OWN_SLOT);
	dev->slots = readl(regs + CW_NB_SLOTS);
	dev->entries = readl(regs + CW_NB_ENTRIES);
	dev->segment_stride = readl(regs + CW_NB_SEGMENT_STRIDE);
	dev->heartbeat_ms = readl(regs + CW_NB_HEARTBEAT_MS);
	dev->base = readq(regs + CW_NB_BASE);
	dev->stride = readq(regs + CW_NB_STRIDE);
	if (!dev->slots || dev->slots > CW_NB_MAX_SLOTS || dev->own >= dev->slots || !is_power_of_2(dev->entries) ||
	    dev->entries < CW_NB_LEAST_ENTRIES || dev->entries > CW_NB_MOST_ENTRIES || !is_power_of_2(dev->stride) ||
	    !IS_ALIGNED(dev->base, dev->stride) || dev->segment_stride < CW_NB_SEGMENT_SIZE(dev->entries) ||
	    (u64)dev->segment_stride * dev->slots > pci_resource_len(dev->pdev, CW_NB_BAR_SEGMENTS) ||
	    !dev->heartbeat_ms) {
		dev_err(parent, "its registers make no sense: slot %u of %u, %u entries, windows %#llx apart from %#llx on\n",
			dev->own, dev->slots, dev->entries, dev->stride, dev->base);
		return -ENODEV;
	}
	return 0;
}

static int neigh_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct neigh_dev *dev;
	int ret;

	dev = devm_kzalloc(&pdev->dev, sizeof(*dev), GFP_KERNEL);
	if (!dev)
		return -ENOMEM;
	dev->pdev = pdev;
	INIT_WORK(&dev->scan, neigh_scan);
	timer_setup(&dev->heartbeat, neigh_beat, 0);
	ret = pcim_enable_device(pdev);
	if (ret)
		return ret;
	ret = pcim_iomap_regions(pdev, BIT(CW_NB_BAR_REGISTERS), "neighbours");
	if (ret)
		return ret;
	dev->regs = pcim_iomap_table(pdev)[CW_NB_BAR_REGISTERS];
	dev->segments = pci_resource_start(pdev, CW_NB_BAR_SEGMENTS);
	ret = neigh_read(dev);
	if (ret)
		return ret;
	pci_set_master(pdev);
	pci_set_drvdata(pdev, dev);
	dev->status = devm_memremap(&pdev->dev, dev->segments + dev->own * dev->segment_stride, PAGE_SIZE, MEMREMAP_WB);
	if (IS_ERR(dev->status))
		return PTR_ERR(dev->status);
	ret = pci_alloc_irq_vectors(pdev, 1 + dev->slots, 1 + dev->slots, PCI_IRQ_MSIX);
	if (ret < 0) {
		dev_err(&pdev->dev, "%u interrupts can't be had (%d)\n", 1 + dev->slots, ret);
		return ret;
	}
	ret = request_irq(pci_irq_vector(pdev, 0), neigh_changed, 0, "neighbours", dev);
	if (ret) {
		pci_free_irq_vectors(pdev);
		return ret;
	}
	dev_info(&pdev->dev, "slot %u of %u, windows of %#llx bytes from %#llx on, %u entries per ring\n", dev->own,
		 dev->slots, dev->stride, dev->base, dev->entries);
	mutex_lock(&neigh_mutex);
	list_add_tail(&dev->list, &neigh_devs);
	mutex_unlock(&neigh_mutex);
	neigh_beat(&dev->heartbeat);
	writel(1, dev->regs + CW_NB_DRIVER);
	queue_work(neigh_wq, &dev->scan);
	return 0;
}

/* No neighbours are added any more, so no lock is needed. */
static bool all_released(struct neigh_dev *dev)
{
	u32 slot;

	for (slot = 0; slot < dev->slots; slot++)
		if (dev->neighs[slot] && rcu_access_pointer(dev->neighs[slot]->link))
			return false;
	return true;
}

static bool detach_all(struct neigh_dev *dev)
{
	bool all = true;
	u32 slot;

	mutex_lock(&neigh_mutex);
	for (slot = 0; slot < dev->slots; slot++)
		if (dev->neighs[slot] && dev->neighs[slot]->dev && !neigh_detach(dev->neighs[slot]))
			all = false;
	mutex_unlock(&neigh_mutex);
	return all;
}

static void neigh_pci_remove(struct pci_dev *pdev)
{
	struct neigh_dev *dev = pci_get_drvdata(pdev);
	u32 slot;
	int i;

	/* Accept nothing new. */
	mutex_lock(&neigh_mutex);
	dev->going = true;
	list_del(&dev->list);
	for (slot = 0; slot < dev->slots; slot++) {
		struct neigh *nb = dev->neighs[slot];

		if (!nb)
			continue;
		neigh_end(nb, "the driver goes");
		for (i = 1; i < NEIGH_PROTOCOLS; i++)
			if (nb->attached[i].user)
				detach(nb, nb->attached[i].user);
	}
	mutex_unlock(&neigh_mutex);
	free_irq(pci_irq_vector(pdev, 0), dev);
	for (slot = 0; slot < dev->slots; slot++) {
		struct neigh *nb = dev->neighs[slot];

		if (nb) {
			free_irq(nb->irq, nb);
			nb->irq = 0;
		}
	}
	cancel_work_sync(&dev->scan);
	wait_event_timeout(neigh_released, all_released(dev), NEIGH_PATIENCE);

	while (!detach_all(dev))
		wait_event_timeout(neigh_released, all_released(dev), NEIGH_PATIENCE);
	synchronize_rcu();
	for (slot = 0; slot < dev->slots; slot++)
		if (dev->neighs[slot])
			neigh_remove(dev, slot);
	pci_free_irq_vectors(pdev);
	/* The heartbeat continues until here, since a slow removal is no hang. */
	writel(0, dev->regs + CW_NB_DRIVER);
	del_timer_sync(&dev->heartbeat);
	pci_clear_master(pdev);
}

static const struct pci_device_id neigh_ids[] = {
	{ PCI_DEVICE_SUB(CW_NB_VENDOR, CW_NB_DEVICE, 0x1af4, 0x4357) },
	{ }
};
MODULE_DEVICE_TABLE(pci, neigh_ids);

static struct pci_driver neigh_driver = {
	.name = "cw_neigh",
	.id_table = neigh_ids,
	.probe = neigh_probe,
	.remove = neigh_pci_remove,
};

static int __init neigh_init(void)
{
	int ret;

	neigh_wq = alloc_workqueue("neighbours", WQ_UNBOUND, 0);
	if (!neigh_wq)
		return -ENOMEM;
	ret = pci_register_driver(&neigh_driver);
	if (ret)
		destroy_workqueue(neigh_wq);
	return ret;
}

static void __exit neigh_exit(void)
{
	pci_unregister_driver(&neigh_driver);
	/* Queued work, and freed links. */
	destroy_workqueue(neigh_wq);
	/* And page_free() of the last returned pages. */
	synchronize_rcu();
	rcu_barrier();
}

module_init(neigh_init);
module_exit(neigh_exit);

MODULE_AUTHOR("Causeway");
MODULE_DESCRIPTION("Neighbours: VMs of one host that read each other's memory (core)");
MODULE_LICENSE("GPL");
