// SPDX-License-Identifier: GPL-2.0
/* mmblk, client side: devices as directories in configfs. */
#include <linux/module.h>
#include <linux/slab.h>

#include "mmblk_client.h"

#define MMBLK_DEFAULT_DEPTH	64
#define MMBLK_DEFAULT_WAIT	10000
#define MMBLK_DEFAULT_TIMEOUT	30000

static struct mmblk_dev *to_dev(struct config_item *item)
{
	return container_of(to_config_group(item), struct mmblk_dev, group);
}

static ssize_t mmblk_device_peer_show(struct config_item *item, char *page)
{
	return sysfs_emit(page, "%s\n", to_dev(item)->peer_name);
}

static ssize_t mmblk_device_peer_store(struct config_item *item, const char *page, size_t count)
{
	struct mmblk_dev *dev = to_dev(item);
	ssize_t ret = -EBUSY;

	mutex_lock(&dev->lock);
	if (!dev->enabled)
		ret = mmblk_take_name(dev->peer_name, sizeof(dev->peer_name), page, count) ?: count;
	mutex_unlock(&dev->lock);
	return ret;
}
CONFIGFS_ATTR(mmblk_device_, peer);

static ssize_t mmblk_device_export_show(struct config_item *item, char *page)
{
	return sysfs_emit(page, "%s\n", to_dev(item)->export);
}

static ssize_t mmblk_device_export_store(struct config_item *item, const char *page, size_t count)
{
	struct mmblk_dev *dev = to_dev(item);
	ssize_t ret = -EBUSY;

	mutex_lock(&dev->lock);
	if (!dev->enabled)
		ret = mmblk_take_name(dev->export, sizeof(dev->export), page, count) ?: count;
	mutex_unlock(&dev->lock);
	return ret;
}
CONFIGFS_ATTR(mmblk_device_, export);

static ssize_t mmblk_device_number_store(struct mmblk_dev *dev, u32 *to, u32 least, u32 most, bool running,
					 const char *page, size_t count)
{
	ssize_t ret = count;
	u32 value;

	if (kstrtou32(page, 0, &value) || value < least || value > most)
		return -EINVAL;
	mutex_lock(&dev->lock);
	if (dev->enabled && !running)
		ret = -EBUSY;
	else
		WRITE_ONCE(*to, value);
	mutex_unlock(&dev->lock);
	return ret;
}

#define MMBLK_DEVICE_NUMBER(name, least, most, running)	\
static ssize_t mmblk_device_##name##_show(struct config_item *item, char *page) \
{ \
	return sysfs_emit(page, "%u\n", to_dev(item)->name); \
} \
static ssize_t mmblk_device_##name##_store(struct config_item *item, const char *page, size_t count) \
{ \
	struct mmblk_dev *dev = to_dev(item); \
	\
	return mmblk_device_number_store(dev, &dev->name, least, most, running, page, count); \
} \
CONFIGFS_ATTR(mmblk_device_, name)

MMBLK_DEVICE_NUMBER(queues, 1, MMBLK_MOST_QUEUES, false);
MMBLK_DEVICE_NUMBER(depth, 1, MMBLK_MOST_DEPTH, false);
/* Time that requests wait for a server that is gone, ms. 0: they fail at once. */
MMBLK_DEVICE_NUMBER(wait_ms, 0, 24 * 3600 * 1000, true);
MMBLK_DEVICE_NUMBER(timeout_ms, 100, 24 * 3600 * 1000, false);

static ssize_t mmblk_device_enable_show(struct config_item *item, char *page)
{
	return sysfs_emit(page, "%d\n", to_dev(item)->enabled);
}

static ssize_t mmblk_device_enable_store(struct config_item *item, const char *page, size_t count)
{
	struct mmblk_dev *dev = to_dev(item);
	ssize_t ret = count;
	bool value;

	if (kstrtobool(page, &value))
		return -EINVAL;
	mutex_lock(&dev->lock);
	if (value && !dev->enabled) {
		if (!dev->peer_name[0] || !dev->export[0])
			ret = -EINVAL;
		else
			ret = mmblk_dev_start(dev) ?: count;
		dev->enabled = ret > 0;
	} else if (!value && dev->enabled) {
		mmblk_dev_stop(dev);
		dev->enabled = false;
	}
	mutex_unlock(&dev->lock);
	return ret;
}
CONFIGFS_ATTR(mmblk_device_, enable);

/* The disk's name; empty before there is a disk. */
static ssize_t mmblk_device_disk_show(struct config_item *item, char *page)
{
	struct mmblk_dev *dev = to_dev(item);
	ssize_t ret;

	mutex_lock(&dev->lock);
	ret = dev->enabled && READ_ONCE(dev->added) ? sysfs_emit(page, "mmblk%u\n", dev->number) : 0;
	mutex_unlock(&dev->lock);
	return ret;
}
CONFIGFS_ATTR_RO(mmblk_device_, disk);

static ssize_t mmblk_device_state_show(struct config_item *item, char *page)
{
	struct mmblk_dev *dev = to_dev(item);
	ssize_t ret;

	mutex_lock(&dev->lock);
	ret = sysfs_emit(page, "%s\n", dev->enabled ? mmblk_state_name(dev) : "not enabled");
	mutex_unlock(&dev->lock);
	return ret;
}
CONFIGFS_ATTR_RO(mmblk_device_, state);

static ssize_t mmblk_device_counters_show(struct config_item *item, char *page)
{
	return mmblk_show_counters(&to_dev(item)->counters, page);
}
CONFIGFS_ATTR_RO(mmblk_device_, counters);

static struct configfs_attribute *mmblk_device_attrs[] = {
	&mmblk_device_attr_peer,
	&mmblk_device_attr_export,
	&mmblk_device_attr_queues,
	&mmblk_device_attr_depth,
	&mmblk_device_attr_wait_ms,
	&mmblk_device_attr_timeout_ms,
	&mmblk_device_attr_enable,
	&mmblk_device_attr_disk,
	&mmblk_device_attr_state,
	&mmblk_device_attr_counters,
	NULL,
};

static void mmblk_device_release(struct config_item *item)
{
	kfree(to_dev(item));
}

static struct configfs_item_operations mmblk_device_item_ops = {
	.release = mmblk_device_release,
};

static const struct config_item_type mmblk_device_type = {
	.ct_item_ops = &mmblk_device_item_ops,
	.ct_attrs = mmblk_device_attrs,
	.ct_owner = THIS_MODULE,
};

static struct config_group *mmblk_device_make(struct config_group *group, const char *name)
{
	struct mmblk_dev *dev = kzalloc(sizeof(*dev), GFP_KERNEL);

	if (!dev)
		return ERR_PTR(-ENOMEM);
	mutex_init(&dev->lock);
	dev->queues = min_t(u32, num_online_cpus(), MMBLK_MOST_QUEUES);
	dev->depth = MMBLK_DEFAULT_DEPTH;
	dev->wait_ms = MMBLK_DEFAULT_WAIT;
	dev->timeout_ms = MMBLK_DEFAULT_TIMEOUT;
	config_group_init_type_name(&dev->group, name, &mmblk_device_type);
	return &dev->group;
}

static void mmblk_device_drop(struct config_group *group, struct config_item *item)
{
	struct mmblk_dev *dev = to_dev(item);

	mutex_lock(&dev->lock);
	if (dev->enabled)
		mmblk_dev_stop(dev);
	dev->enabled = false;
	mutex_unlock(&dev->lock);
	config_item_put(item);
}

static struct configfs_group_operations mmblk_devices_ops = {
	.make_group = mmblk_device_make,
	.drop_item = mmblk_device_drop,
};

static const struct config_item_type mmblk_devices_type = {
	.ct_group_ops = &mmblk_devices_ops,
	.ct_owner = THIS_MODULE,
};

struct config_group mmblk_devices_group;

void mmblk_devices_group_init(void)
{
	config_group_init_type_name(&mmblk_devices_group, "devices", &mmblk_devices_type);
}
