// SPDX-License-Identifier: GPL-2.0
/*
 * mmblk: block devices between neighbours. A VM is a client (mmblk_client.c: /dev/mmblkN), a server (mmblk_server.c: exports of
 * block devices and files), or both. configfs has the configuration:
 *
 *	/sys/kernel/config/mmblk/exports/NAME	path, readonly, clients, enable
 *	/sys/kernel/config/mmblk/devices/NAME	peer, export, queues, depth, wait_ms, timeout_ms, enable
 */
#include <linux/module.h>

#include "mmblk.h"

struct workqueue_struct *mmblk_wq, *mmblk_copy_wq;

const char * const mmblk_counter_names[MMBLK_COUNTERS] = {
	[MMBLK_C_READS] = "reads",
	[MMBLK_C_WRITES] = "writes",
	[MMBLK_C_FLUSHES] = "flushes",
	[MMBLK_C_DISCARDS] = "discards",
	[MMBLK_C_ZEROES] = "zeroes",
	[MMBLK_C_READ_BYTES] = "read_bytes",
	[MMBLK_C_WRITTEN_BYTES] = "written_bytes",
	[MMBLK_C_BY_REFERENCE] = "by_reference_bytes",
	[MMBLK_C_COPIED] = "copied_bytes",
	[MMBLK_C_FORWARDED] = "forwarded_bytes",
	[MMBLK_C_ERRORS] = "errors",
	[MMBLK_C_REFUSED] = "refused",
	[MMBLK_C_REQUEUED] = "requeued",
	[MMBLK_C_TIMEOUTS] = "timeouts",
	[MMBLK_C_ATTACHED] = "attached",
	[MMBLK_C_LOST] = "lost",
};

ssize_t mmblk_show_counters(const struct mmblk_counters *counters, char *page)
{
	int at = 0;
	int i;

	for (i = 0; i < MMBLK_COUNTERS; i++)
		at += scnprintf(page + at, PAGE_SIZE - at, "%s %llu\n", mmblk_counter_names[i],
				(u64)atomic64_read(&counters->value[i]));
	return at;
}

int mmblk_take_name(char *to, size_t limit, const char *from, size_t count)
{
	size_t i;

	if (count && from[count - 1] == '\n')
		count--;
	if (!count || count >= limit)
		return -EINVAL;
	for (i = 0; i < count; i++)
		if (from[i] <= ' ' || from[i] > '~' || from[i] == '/')
			return -EINVAL;
	memset(to, 0, limit);
	memcpy(to, from, count);
	return 0;
}

static const struct config_item_type mmblk_root_type = {
	.ct_owner = THIS_MODULE,
};

static struct configfs_subsystem mmblk_subsystem = {
	.su_group = {
		.cg_item = {
			.ci_namebuf = "mmblk",
			.ci_type = &mmblk_root_type,
		},
	},
};

static int __init mmblk_init(void)
{
	int error;

	mmblk_wq = alloc_workqueue("mmblk", WQ_MEM_RECLAIM | WQ_HIGHPRI | WQ_UNBOUND, 0);
	if (!mmblk_wq)
		return -ENOMEM;
	error = -ENOMEM;
	mmblk_copy_wq = alloc_workqueue("mmblk-copy", WQ_MEM_RECLAIM | WQ_UNBOUND, 0);
	if (!mmblk_copy_wq)
		goto no_copy_wq;
	error = mmblk_server_init();
	if (error)
		goto no_server;
	error = mmblk_client_init();
	if (error)
		goto no_client;

	config_group_init(&mmblk_subsystem.su_group);
	mutex_init(&mmblk_subsystem.su_mutex);
	mmblk_exports_group_init();
	mmblk_devices_group_init();
	configfs_add_default_group(&mmblk_exports_group, &mmblk_subsystem.su_group);
	configfs_add_default_group(&mmblk_devices_group, &mmblk_subsystem.su_group);
	error = configfs_register_subsystem(&mmblk_subsystem);
	if (error)
		goto no_configfs;
	return 0;

no_configfs:
	mmblk_client_exit();
no_client:
	mmblk_server_exit();
no_server:
	destroy_workqueue(mmblk_copy_wq);
no_copy_wq:
	destroy_workqueue(mmblk_wq);
	return error;
}

/* Directories in configfs hold the module. There are none by now, so there is no device and no export. */
static void __exit mmblk_exit(void)
{
	configfs_unregister_subsystem(&mmblk_subsystem);
	mmblk_client_exit();
	mmblk_server_exit();
	destroy_workqueue(mmblk_copy_wq);
	destroy_workqueue(mmblk_wq);
}

module_init(mmblk_init);
module_exit(mmblk_exit);
MODULE_DESCRIPTION("Block devices between neighbour VMs without copies");
MODULE_LICENSE("GPL");
