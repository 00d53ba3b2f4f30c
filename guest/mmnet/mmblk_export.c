// SPDX-License-Identifier: GPL-2.0
/* mmblk, server side: exports as directories in configfs. */
#include <linux/module.h>
#include <linux/slab.h>

#include "mmblk_server.h"

static struct mmblk_export *to_export(struct config_item *item)
{
	return container_of(to_config_group(item), struct mmblk_export, group);
}

static int mmblk_export_enable(struct mmblk_export *export)
{
	int error;

	if (!export->path[0] || !export->clients[0])
		return -EINVAL;
	error = mmblk_backend_open(export);
	if (error)
		return error;
	mutex_lock(&mmblk_server_mutex);
	list_add_tail(&export->node, &mmblk_exports);
	mutex_unlock(&mmblk_server_mutex);
	export->enabled = true;
	return 0;
}

static void mmblk_export_disable(struct mmblk_export *export)
{
	mutex_lock(&mmblk_server_mutex);
	list_del(&export->node);
	mutex_unlock(&mmblk_server_mutex);
	mmblk_sessions_end(export);
	mmblk_backend_close(export);
	export->enabled = false;
}

static ssize_t mmblk_export_path_show(struct config_item *item, char *page)
{
	return sysfs_emit(page, "%s\n", to_export(item)->path);
}

static ssize_t mmblk_export_path_store(struct config_item *item, const char *page, size_t count)
{
	struct mmblk_export *export = to_export(item);
	size_t length = count;
	ssize_t ret = count;

	if (length && page[length - 1] == '\n')
		length--;
	if (!length || length >= sizeof(export->path) || page[0] != '/')
		return -EINVAL;
	mutex_lock(&export->lock);
	if (export->enabled) {
		ret = -EBUSY;
	} else {
		memset(export->path, 0, sizeof(export->path));
		memcpy(export->path, page, length);
	}
	mutex_unlock(&export->lock);
	return ret;
}
CONFIGFS_ATTR(mmblk_export_, path);

static ssize_t mmblk_export_clients_show(struct config_item *item, char *page)
{
	return sysfs_emit(page, "%s\n", to_export(item)->clients);
}

/* Names of VMs, separated by spaces. */
static ssize_t mmblk_export_clients_store(struct config_item *item, const char *page, size_t count)
{
	struct mmblk_export *export = to_export(item);
	size_t at = 0, i;
	ssize_t ret = count;

	if (count > sizeof(export->clients) - 3)
		return -EINVAL;
	mutex_lock(&export->lock);
	if (export->enabled) {
		ret = -EBUSY;
	} else {
		memset(export->clients, 0, sizeof(export->clients));
		export->clients[at++] = ' ';
		for (i = 0; i < count; i++)
			if (page[i] > ' ' && page[i] <= '~')
				export->clients[at++] = page[i];
			else if (export->clients[at - 1] != ' ')
				export->clients[at++] = ' ';
		if (export->clients[at - 1] != ' ')
			export->clients[at++] = ' ';
		if (at == 1)
			export->clients[0] = 0;
	}
	mutex_unlock(&export->lock);
	return ret;
}
CONFIGFS_ATTR(mmblk_export_, clients);

static ssize_t mmblk_export_readonly_show(struct config_item *item, char *page)
{
	return sysfs_emit(page, "%d\n", to_export(item)->readonly);
}

static ssize_t mmblk_export_readonly_store(struct config_item *item, const char *page, size_t count)
{
	struct mmblk_export *export = to_export(item);
	ssize_t ret = count;
	bool value;

	if (kstrtobool(page, &value))
		return -EINVAL;
	mutex_lock(&export->lock);
	if (export->enabled)
		ret = -EBUSY;
	else
		export->readonly = value;
	mutex_unlock(&export->lock);
	return ret;
}
CONFIGFS_ATTR(mmblk_export_, readonly);

static ssize_t mmblk_export_enable_show(struct config_item *item, char *page)
{
	return sysfs_emit(page, "%d\n", to_export(item)->enabled);
}

static ssize_t mmblk_export_enable_store(struct config_item *item, const char *page, size_t count)
{
	struct mmblk_export *export = to_export(item);
	int error = 0;
	bool value;

	if (kstrtobool(page, &value))
		return -EINVAL;
	mutex_lock(&export->lock);
	if (value && !export->enabled)
		error = mmblk_export_enable(export);
	else if (!value && export->enabled)
		mmblk_export_disable(export);
	mutex_unlock(&export->lock);
	return error ?: count;
}
CONFIGFS_ATTR(mmblk_export_, enable);

static ssize_t mmblk_export_counters_show(struct config_item *item, char *page)
{
	return mmblk_show_counters(&to_export(item)->counters, page);
}
CONFIGFS_ATTR_RO(mmblk_export_, counters);

static ssize_t mmblk_export_status_show(struct config_item *item, char *page)
{
	struct mmblk_export *export = to_export(item);
	struct mmblk_session *session;
	int at = 0;

	mutex_lock(&export->lock);
	if (!export->enabled) {
		at = sysfs_emit(page, "not enabled\n");
	} else {
		at = sysfs_emit(page, "%s, %llu bytes, blocks of %u%s\n",
				export->bdev ? "block device" : export->buffered ? "file, through the page cache" :
				"file", export->bytes, export->logical_block,
				export->readonly ? ", read-only" : "");
		mutex_lock(&mmblk_server_mutex);
		list_for_each_entry(session, &export->sessions, node)
			if (!session->ended)
				at += sysfs_emit_at(page, at, "client %s, device %u, %u queues of %u\n",
					    neigh_name(session->peer->neigh), session->device,
						    session->queues, session->depth);
		mutex_unlock(&mmblk_server_mutex);
	}
	mutex_unlock(&export->lock);
	return at;
}
CONFIGFS_ATTR_RO(mmblk_export_, status);

static struct configfs_attribute *mmblk_export_attrs[] = {
	&mmblk_export_attr_path,
	&mmblk_export_attr_clients,
	&mmblk_export_attr_readonly,
	&mmblk_export_attr_enable,
	&mmblk_export_attr_counters,
	&mmblk_export_attr_status,
	NULL,
};

static void mmblk_export_release(struct config_item *item)
{
	kfree(to_export(item));
}

static struct configfs_item_operations mmblk_export_item_ops = {
	.release = mmblk_export_release,
};

static const struct config_item_type mmblk_export_type = {
	.ct_item_ops = &mmblk_export_item_ops,
	.ct_attrs = mmblk_export_attrs,
	.ct_owner = THIS_MODULE,
};

static struct config_group *mmblk_export_make(struct config_group *group, const char *name)
{
	struct mmblk_export *export;

	if (strlen(name) >= MMBLK_NAME)
		return ERR_PTR(-ENAMETOOLONG);
	export = kzalloc(sizeof(*export), GFP_KERNEL);
	if (!export)
		return ERR_PTR(-ENOMEM);
	mutex_init(&export->lock);
	mutex_init(&export->reserve);
	INIT_LIST_HEAD(&export->sessions);
	mmblk_users_init(&export->users);
	config_group_init_type_name(&export->group, name, &mmblk_export_type);
	return &export->group;
}

static void mmblk_export_drop(struct config_group *group, struct config_item *item)
{
	struct mmblk_export *export = to_export(item);

	mutex_lock(&export->lock);
	if (export->enabled)
		mmblk_export_disable(export);
	mutex_unlock(&export->lock);
	config_item_put(item);
}

static struct configfs_group_operations mmblk_exports_ops = {
	.make_group = mmblk_export_make,
	.drop_item = mmblk_export_drop,
};

static const struct config_item_type mmblk_exports_type = {
	.ct_group_ops = &mmblk_exports_ops,
	.ct_owner = THIS_MODULE,
};

struct config_group mmblk_exports_group;

void mmblk_exports_group_init(void)
{
	config_group_init_type_name(&mmblk_exports_group, "exports", &mmblk_exports_type);
}
