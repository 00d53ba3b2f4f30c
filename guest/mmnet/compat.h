/* SPDX-License-Identifier: GPL-2.0 */
/* What differs between the kernels that this builds for: 6.1 and 6.12. */
#ifndef CW_NEIGH_COMPAT_H
#define CW_NEIGH_COMPAT_H

#include <linux/netdevice.h>
#include <linux/slab.h>
#include <linux/version.h>

#if KERNEL_VERSION(6, 12, 0) <= LINUX_VERSION_CODE
#include <linux/unaligned.h>
#else
#include <asm/unaligned.h>
#endif

/* A device that only carries a NAPI. */
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
