/* SPDX-License-Identifier: GPL-2.0 */
/* Differences between the kernels that this builds for: 6.1 and 6.12. */
#ifndef CW_NEIGH_COMPAT_H
#define CW_NEIGH_COMPAT_H

#include <linux/fs.h>
#include <linux/netdevice.h>
#include <linux/slab.h>
#include <linux/version.h>

#if KERNEL_VERSION(6, 12, 0) <= LINUX_VERSION_CODE
#include <linux/unaligned.h>
#else
#include <asm/unaligned.h>
#endif

/* vfs_iter_write() itself protects the file system against freezing during the write. Its caller must not. */
#define COMPAT_ITER_WRITE_STARTS	(KERNEL_VERSION(6, 8, 0) <= LINUX_VERSION_CODE)

static inline ssize_t compat_iter_write(struct file *file, struct iov_iter *iter, loff_t *at, rwf_t flags)
{
	ssize_t done;

	if (!COMPAT_ITER_WRITE_STARTS)
		file_start_write(file);
	done = vfs_iter_write(file, iter, at, flags);
	if (!COMPAT_ITER_WRITE_STARTS)
		file_end_write(file);
	return done;
}

/* A net device that only carries a NAPI. */
static inline struct net_device *compat_dummy_netdev(void)
{
#if KERNEL_VERSION(6, 10, 0) <= LINUX_VERSION_CODE
	return alloc_netdev_dummy(0);
#else
	struct net_device *dev = kzalloc(sizeof(*dev), GFP_KERNEL);

	if (dev)
		init_dummy_netdev(dev);
	return dev;
#endif
}

static inline void compat_dummy_netdev_free(struct net_device *dev)
{
#if KERNEL_VERSION(6, 10, 0) <= LINUX_VERSION_CODE
	free_netdev(dev);
#else
	kfree(dev);
#endif
}

#endif
