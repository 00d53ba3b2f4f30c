/* SPDX-License-Identifier: GPL-2.0 */
/* Shared declarations of mmnet. */
#ifndef CW_MMNET_H
#define CW_MMNET_H

#include <linux/netdevice.h>

#include "neigh.h"

/* Whether a net device is a neighbour's. */
bool mmnet_is(const struct net_device *dev);

/* Whether IPsec may decrypt packets of a namespace in place. */
bool mmnet_transforms(const struct net *net);

int mmnet_leave_init(void);
void mmnet_leave_exit(void);

#endif
