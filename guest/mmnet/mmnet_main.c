// SPDX-License-Identifier: GPL-2.0
/*
 * mmnet: an Ethernet device per neighbour, like a cable to it. Frames stay in the sender's memory; the receiver's skbs refer to it.
 *
 *	kind	NEIGH_PROTO_NET << 8 | flags
 *	flags	MMNET_NEEDS_CHECKSUM: note has the checksum's start (high 16 bits), and its place from there (low)
 *		MMNET_CHECKED: the sender has verified the first checksum; not with MMNET_NEEDS_CHECKSUM
 *		neither: no device has verified it, and the receiver does
 *	parts	the frame from its Ethernet header on
 *
 * A checksum of the sender's own stack stays open, and the receiver's stack believes it. It is computed when the frame leaves
 * through a device that isn't a neighbour's. A frame that the sender only forwards, for example from a bridge, may have a wrong
 * checksum. The receiver's stack verifies it, unless the sender's device has.
 *
 * Receiving: headers (the first part if it is small, else 128 bytes) and small frames are copied; the rest isn't. A whole frame
 * is copied if its pages can't be referred to (see neigh_frags()), mainly if readers are slow, so that the sender gets its memory
 * back. It is also copied if IPsec may write to it (mmnet_leave.c). The sender keeps an skb until its message has completed.
 */
#include <linux/etherdevice.h>
#include <linux/ethtool.h>
#include <linux/if_vlan.h>
#include <linux/io.h>
#include <linux/module.h>
#include <linux/netdevice.h>
#include <linux/rtnetlink.h>
#include <linux/skbuff.h>
#include <linux/slab.h>

#include "mmnet.h"

#define MMNET_NEEDS_CHECKSUM	0x01
#define MMNET_CHECKED		0x02
#define MMNET_FLAGS		(MMNET_NEEDS_CHECKSUM | MMNET_CHECKED)

/* Multiple of 16 below the limit of an IP packet. */
#define MMNET_MTU		65520
#define MMNET_COPYBREAK		256
#define MMNET_HEADERS		128

enum mmnet_stat {
	RX_FRAMES, RX_BY_REFERENCE, RX_BYTES_BY_REFERENCE, RX_COPIED_SMALL, RX_COPIED_HELD, RX_COPIED_PAGES, RX_COPIED_BUSY,
	RX_COPIED_ASKED, RX_COPIED_XFRM, RX_BYTES_COPIED, RX_BAD, RX_NO_MEMORY, RX_DOWN, TX_FRAMES, TX_BYTES_BY_REFERENCE, TX_BYTES_COPIED,
	TX_RETURNED, TX_LOST, TX_UNREACHABLE, TX_FULL, MMNET_STATS,
};

static const char mmnet_stat_names[][ETH_GSTRING_LEN] = {
	[RX_FRAMES] = "rx_frames",
	[RX_BY_REFERENCE] = "rx_by_reference",			/* frames whose payload wasn't copied */
	[RX_BYTES_BY_REFERENCE] = "rx_bytes_by_reference",
	[RX_COPIED_SMALL] = "rx_copied_small",			/* up to the copybreak */
	[RX_COPIED_HELD] = "rx_copied_held",			/* slow readers hold too many */
	[RX_COPIED_PAGES] = "rx_copied_pages",			/* too many pieces */
	[RX_COPIED_BUSY] = "rx_copied_busy",			/* a page was just returning */
	[RX_COPIED_ASKED] = "rx_copied_asked",			/* rx-by-reference is off */
	[RX_COPIED_XFRM] = "rx_copied_xfrm",			/* IPsec might decrypt them in place */
	[RX_BYTES_COPIED] = "rx_bytes_copied",			/* headers included */
	[RX_BAD] = "rx_bad",
	[RX_NO_MEMORY] = "rx_no_memory",
	[RX_DOWN] = "rx_down",
	[TX_FRAMES] = "tx_frames",
	[TX_BYTES_BY_REFERENCE] = "tx_bytes_by_reference",
	[TX_BYTES_COPIED] = "tx_bytes_copied",
	[TX_RETURNED] = "tx_returned",
	[TX_LOST] = "tx_lost",					/* the connection ended first */
	[TX_UNREACHABLE] = "tx_unreachable",			/* a third VM's memory, which the peer can't read */
	[TX_FULL] = "tx_full",
};

static const char mmnet_core_names[][ETH_GSTRING_LEN] = {
	"signals", "wakeups", "polls", "spins", "spins_won",
};

static const char mmnet_flag_names[][ETH_GSTRING_LEN] = {
	"rx-by-reference",
};

struct mmnet {
	struct net_device *dev;
	struct neigh *neigh;
	bool by_reference;
	bool copy_foreign;		/* the peer can't read third VMs' memory */
	u32 copybreak;
	atomic64_t stats[MMNET_STATS];
};

static struct neigh_user mmnet_user;

static void count(struct mmnet *mm, enum mmnet_stat stat, u64 by)
{
	atomic64_add(by, &mm->stats[stat]);
}

/* Receiving */

/* Copies the whole frame. The first head bytes are in the linear part already, and the rest goes into pages. */
static struct sk_buff *mmnet_copy(struct mmnet *mm, const struct neigh_msg *msg, u32 head)
{
	u32 length = msg->bytes, at = 0, i;
	struct sk_buff *skb;
	int error;

	skb = alloc_skb_with_frags(NET_SKB_PAD + NET_IP_ALIGN + head, length - head, PAGE_ALLOC_COSTLY_ORDER, &error,
				   GFP_ATOMIC);
	if (!skb)
		return NULL;
	skb_reserve(skb, NET_SKB_PAD + NET_IP_ALIGN);
	skb_put(skb, head);
	skb->data_len = length - head;
	skb->len += length - head;
	for (i = 0; i < msg->count; i++) {
		const struct neigh_part *part = &msg->parts[i];

		if (skb_store_bits(skb, at, phys_to_virt(part->address), part->length)) {
			kfree_skb(skb);
			return NULL;
		}
		at += part->length;
	}
	skb->dev = mm->dev;
	count(mm, RX_BYTES_COPIED, length);
	return skb;
}

static enum mmnet_stat why_copied(int error)
{
	switch (error) {
	case -EDQUOT:
		return RX_COPIED_HELD;
	case -E2BIG:
		return RX_COPIED_PAGES;
	default:
		return RX_COPIED_BUSY;
	}
}

/* Makes an skb of a message. *kept: the message completes with the skb's pages. */
static struct sk_buff *mmnet_skb(struct mmnet *mm, const struct neigh_msg *msg, bool *kept)
{
	bool small = msg->bytes <= READ_ONCE(mm->copybreak);
	bool asked = !READ_ONCE(mm->by_reference), transforms = mmnet_transforms(dev_net(mm->dev));
	u32 head = MMNET_HEADERS;
	struct sk_buff *skb;
	int error;

	*kept = false;
	if (small)
		head = msg->bytes;
	else if (msg->parts[0].length >= ETH_HLEN && msg->parts[0].length <= 2 * MMNET_HEADERS)
		head = msg->parts[0].length;
	head = min_t(u64, head, msg->bytes);

	if (small || !(asked || transforms)) {
		skb = netdev_alloc_skb_ip_align(mm->dev, head);
		if (!skb || !neigh_copy_from(msg, 0, skb_put(skb, head), head)) {
			kfree_skb(skb);
			return NULL;
		}
		if (head == msg->bytes) {
			count(mm, RX_BYTES_COPIED, head);
			count(mm, RX_COPIED_SMALL, 1);
			return skb;
		}
		error = neigh_frags(msg, head, skb);
		if (!error) {
			count(mm, RX_BYTES_COPIED, head);
			count(mm, RX_BY_REFERENCE, 1);
			count(mm, RX_BYTES_BY_REFERENCE, msg->bytes - head);
			*kept = true;
			return skb;
		}
		kfree_skb(skb);
		count(mm, why_copied(error), 1);
	} else {
		count(mm, asked ? RX_COPIED_ASKED : RX_COPIED_XFRM, 1);
	}
	return mmnet_copy(mm, msg, head);
}

static void mmnet_receive(struct neigh *nb, void *priv, const struct neigh_msg *msg)
{
	u32 flags = msg->kind & 0xff;
	struct mmnet *mm = priv;
	struct sk_buff *skb;
	bool kept;

	if (msg->bytes < ETH_HLEN || msg->bytes > ETH_MAX_MTU + VLAN_ETH_HLEN || flags & ~MMNET_FLAGS ||
	    flags == MMNET_FLAGS) {
		count(mm, RX_BAD, 1);
		neigh_complete_quietly(msg->link, msg->id, NEIGH_MALFORMED);
		return;
	}
	if (!netif_running(mm->dev)) {
		count(mm, RX_DOWN, 1);
		neigh_complete_quietly(msg->link, msg->id, NEIGH_OK);
		return;
	}
	skb = mmnet_skb(mm, msg, &kept);
	if (!kept)
		neigh_complete_quietly(msg->link, msg->id, NEIGH_OK);
	if (!skb) {
		count(mm, RX_NO_MEMORY, 1);
		dev_core_stats_rx_dropped_inc(mm->dev);
		return;
	}
	if (flags & MMNET_CHECKED)
		skb->ip_summed = CHECKSUM_UNNECESSARY;
	if (flags & MMNET_NEEDS_CHECKSUM && !skb_partial_csum_set(skb, msg->note >> 16, msg->note & 0xffff)) {
		count(mm, RX_BAD, 1);
		kfree_skb(skb);
		return;
	}
	count(mm, RX_FRAMES, 1);
	dev_sw_netstats_rx_add(mm->dev, skb->len);
	skb->protocol = eth_type_trans(skb, mm->dev);
	napi_gro_receive(neigh_napi(nb), skb);
}

/* Sending */

/* Fills in the parts of an skb's memory. Returns their number, or less than 0 if it can't be sent as it is. */
static int mmnet_parts(struct mmnet *mm, struct sk_buff *skb, struct neigh_part *parts)
{
	int i, n = 0;

	if (skb_headlen(skb)) {
		if (!virt_addr_valid(skb->data))
			return -EFAULT;
		parts[n].address = neigh_global_virt(mm->neigh, skb->data);
		parts[n++].length = skb_headlen(skb);
	}
	for (i = 0; i < skb_shinfo(skb)->nr_frags; i++) {
		const skb_frag_t *frag = &skb_shinfo(skb)->frags[i];
		struct page *page = skb_frag_page(frag);

		if (!skb_frag_size(frag))
			continue;
		if (mm->copy_foreign && neigh_page_is_window(page))
			return -EXDEV;
		parts[n].address = neigh_global(mm->neigh, page, skb_frag_off(frag));
		parts[n].length = skb_frag_size(frag);
		if (n && parts[n].address == parts[n - 1].address + parts[n - 1].length &&
		    parts[n - 1].length < SZ_1M)
			parts[n - 1].length += parts[n].length;
		else
			n++;
	}
	return n;
}

static netdev_tx_t mmnet_xmit(struct sk_buff *skb, struct net_device *dev)
{
	struct neigh_part parts[CW_NB_MOST_PARTS];
	struct mmnet *mm = netdev_priv(dev);
	u32 length = skb->len, note = 0;
	u8 flags = 0;
	int n, ret;

	BUILD_BUG_ON(MAX_SKB_FRAGS + 1 > CW_NB_MOST_PARTS);
	n = mmnet_parts(mm, skb, parts);
	if (n == -EXDEV) {
		count(mm, TX_BYTES_COPIED, skb->data_len);
		n = skb_copy_ubufs(skb, GFP_ATOMIC);
		if (!n)
			n = mmnet_parts(mm, skb, parts);
	}
	if (n < 0)
		goto drop;
	if (skb->ip_summed == CHECKSUM_PARTIAL) {
		flags |= MMNET_NEEDS_CHECKSUM;
		note = (u32)skb_checksum_start_offset(skb) << 16 | skb->csum_offset;
	} else if (skb->ip_summed == CHECKSUM_UNNECESSARY) {
		flags |= MMNET_CHECKED;
	}
	skb_tx_timestamp(skb);
	/* The peer may hold the skb for long, so its conntrack reference goes. */
	nf_reset_ct(skb);
	ret = neigh_post(mm->neigh, &mmnet_user, parts, n, NEIGH_KIND(NEIGH_PROTO_NET, flags), note, skb);
	if (ret == -ENOSPC) {
		netif_stop_queue(dev);
		/* Room that comes after this attempt wakes the queue. */
		ret = neigh_post(mm->neigh, &mmnet_user, parts, n, NEIGH_KIND(NEIGH_PROTO_NET, flags), note, skb);
		if (ret == -ENOSPC) {
			count(mm, TX_FULL, 1);
			neigh_kick(mm->neigh);
			return NETDEV_TX_BUSY;
		}
		netif_wake_queue(dev);
	}
	if (ret)
		goto drop;
	count(mm, TX_FRAMES, 1);
	dev_sw_netstats_tx_add(dev, 1, length);
	if (!netdev_xmit_more() || netif_queue_stopped(dev))
		neigh_kick(mm->neigh);
	return NETDEV_TX_OK;
drop:
	dev_core_stats_tx_dropped_inc(dev);
	dev_kfree_skb_any(skb);
	if (!netdev_xmit_more())
		neigh_kick(mm->neigh);
	return NETDEV_TX_OK;
}

static void mmnet_sent(struct neigh *nb, void *priv, void *cookie, u32 status)
{
	struct sk_buff *skb = cookie;
	struct mmnet *mm = priv;

	switch (status) {
	case NEIGH_OK:
		count(mm, TX_RETURNED, 1);
		count(mm, TX_BYTES_BY_REFERENCE, skb->len);
		dev_consume_skb_any(skb);
		return;
	case NEIGH_UNREACHABLE:
		/* From now on such frames are copied. Protocols such as TCP retransmit this one. */
		WRITE_ONCE(mm->copy_foreign, true);
		count(mm, TX_UNREACHABLE, 1);
		break;
	default:
		count(mm, TX_LOST, 1);
		break;
	}
	dev_core_stats_tx_dropped_inc(mm->dev);
	dev_kfree_skb_any(skb);
}

static void mmnet_room(struct neigh *nb, void *priv)
{
	struct mmnet *mm = priv;

	if (netif_running(mm->dev))
		netif_wake_queue(mm->dev);
}

/* The device */

static int mmnet_open(struct net_device *dev)
{
	netif_start_queue(dev);
	return 0;
}

static int mmnet_stop(struct net_device *dev)
{
	netif_stop_queue(dev);
	return 0;
}

static const struct net_device_ops mmnet_ops = {
	.ndo_open = mmnet_open,
	.ndo_stop = mmnet_stop,
	.ndo_start_xmit = mmnet_xmit,
	.ndo_get_stats64 = dev_get_tstats64,
	.ndo_set_mac_address = eth_mac_addr,
	.ndo_validate_addr = eth_validate_addr,
};

bool mmnet_is(const struct net_device *dev)
{
	return dev->netdev_ops == &mmnet_ops;
}

static void mmnet_drvinfo(struct net_device *dev, struct ethtool_drvinfo *info)
{
	struct mmnet *mm = netdev_priv(dev);

	strscpy(info->driver, "mmnet", sizeof(info->driver));
	strscpy(info->bus_info, dev_name(neigh_device(mm->neigh)), sizeof(info->bus_info));
}

static int mmnet_sset_count(struct net_device *dev, int set)
{
	switch (set) {
	case ETH_SS_STATS:
		return MMNET_STATS + ARRAY_SIZE(mmnet_core_names);
	case ETH_SS_PRIV_FLAGS:
		return ARRAY_SIZE(mmnet_flag_names);
	default:
		return -EOPNOTSUPP;
	}
}

static void mmnet_strings(struct net_device *dev, u32 set, u8 *to)
{
	if (set == ETH_SS_STATS) {
		memcpy(to, mmnet_stat_names, sizeof(mmnet_stat_names));
		memcpy(to + sizeof(mmnet_stat_names), mmnet_core_names, sizeof(mmnet_core_names));
	} else if (set == ETH_SS_PRIV_FLAGS) {
		memcpy(to, mmnet_flag_names, sizeof(mmnet_flag_names));
	}
}

static void mmnet_stats(struct net_device *dev, struct ethtool_stats *stats, u64 *to)
{
	struct mmnet *mm = netdev_priv(dev);
	struct neigh_counts counts;
	int i;

	for (i = 0; i < MMNET_STATS; i++)
		to[i] = atomic64_read(&mm->stats[i]);
	neigh_counts(mm->neigh, &counts);
	to[i++] = counts.signals;
	to[i++] = counts.wakeups;
	to[i++] = counts.polls;
	to[i++] = counts.spins;
	to[i++] = counts.spins_won;
}

static u32 mmnet_get_flags(struct net_device *dev)
{
	struct mmnet *mm = netdev_priv(dev);

	return mm->by_reference ? BIT(0) : 0;
}

static int mmnet_set_flags(struct net_device *dev, u32 flags)
{
	struct mmnet *mm = netdev_priv(dev);

	WRITE_ONCE(mm->by_reference, flags & BIT(0));
	return 0;
}

static int mmnet_get_tunable(struct net_device *dev, const struct ethtool_tunable *tunable, void *data)
{
	struct mmnet *mm = netdev_priv(dev);

	if (tunable->id != ETHTOOL_RX_COPYBREAK)
		return -EOPNOTSUPP;
	*(u32 *)data = mm->copybreak;
	return 0;
}

static int mmnet_set_tunable(struct net_device *dev, const struct ethtool_tunable *tunable, const void *data)
{
	struct mmnet *mm = netdev_priv(dev);
	u32 value = *(const u32 *)data;

	if (tunable->id != ETHTOOL_RX_COPYBREAK)
		return -EOPNOTSUPP;
	if (value > PAGE_SIZE / 2)
		return -EINVAL;
	WRITE_ONCE(mm->copybreak, value);
	return 0;
}

static const struct ethtool_ops mmnet_ethtool_ops = {
	.get_drvinfo = mmnet_drvinfo,
	.get_link = ethtool_op_get_link,
	.get_sset_count = mmnet_sset_count,
	.get_strings = mmnet_strings,
	.get_ethtool_stats = mmnet_stats,
	.get_priv_flags = mmnet_get_flags,
	.set_priv_flags = mmnet_set_flags,
	.get_tunable = mmnet_get_tunable,
	.set_tunable = mmnet_set_tunable,
	.get_ts_info = ethtool_op_get_ts_info,
};

static void mmnet_free(struct net_device *dev)
{
	free_percpu(dev->tstats);
	dev->tstats = NULL;
}

static void mmnet_setup(struct net_device *dev)
{
	ether_setup(dev);
	dev->netdev_ops = &mmnet_ops;
	dev->ethtool_ops = &mmnet_ethtool_ops;
	dev->priv_destructor = mmnet_free;
	dev->needs_free_netdev = true;
	dev->mtu = MMNET_MTU;
	dev->min_mtu = ETH_MIN_MTU;
	dev->max_mtu = ETH_MAX_MTU;
	dev->hw_features = NETIF_F_SG | NETIF_F_HW_CSUM | NETIF_F_HIGHDMA;
	dev->features = dev->hw_features;
	dev->priv_flags |= IFF_LIVE_ADDR_CHANGE;
	dev->vlan_features = dev->features;
}

/* The slot may have another VM now. The address is the one for it, unless somebody has set another. */
static void mmnet_follow_mac(struct mmnet *mm)
{
	struct net_device *dev = mm->dev;
	struct sockaddr address = { .sa_family = dev->type };

	rtnl_lock();
	if (dev->addr_assign_type == NET_ADDR_PERM && !ether_addr_equal(dev->dev_addr, neigh_mac(mm->neigh))) {
		ether_addr_copy(address.sa_data, neigh_mac(mm->neigh));
		if (dev_set_mac_address(dev, &address, NULL))
			netdev_warn(dev, "its address %pM can't become %pM\n", dev->dev_addr, neigh_mac(mm->neigh));
		else
			dev->addr_assign_type = NET_ADDR_PERM;
	}
	rtnl_unlock();
}

static void *mmnet_add(struct neigh *nb)
{
	struct net_device *dev;
	struct mmnet *mm;
	int ret;

	dev = alloc_netdev(sizeof(*mm), "mm%d", NET_NAME_ENUM, mmnet_setup);
	if (!dev)
		return ERR_PTR(-ENOMEM);
	mm = netdev_priv(dev);
	mm->dev = dev;
	mm->neigh = nb;
	mm->by_reference = true;
	mm->copybreak = MMNET_COPYBREAK;
	dev->dev_port = neigh_slot(nb);
	eth_hw_addr_set(dev, neigh_mac(nb));
	SET_NETDEV_DEV(dev, neigh_device(nb));
	dev->tstats = netdev_alloc_pcpu_stats(struct pcpu_sw_netstats);
	if (!dev->tstats) {
		free_netdev(dev);
		return ERR_PTR(-ENOMEM);
	}
	netif_carrier_off(dev);
	dev_set_alias(dev, neigh_name(nb), strlen(neigh_name(nb)));
	ret = register_netdev(dev);
	if (ret) {
		/* Depending on the step that failed, the destructor has run or not. */
		mmnet_free(dev);
		free_netdev(dev);
		return ERR_PTR(ret);
	}
	return mm;
}

static void mmnet_remove(struct neigh *nb, void *priv)
{
	struct mmnet *mm = priv;

	unregister_netdev(mm->dev);
}

static void mmnet_live(struct neigh *nb, void *priv)
{
	struct mmnet *mm = priv;

	WRITE_ONCE(mm->copy_foreign, false);
	dev_set_alias(mm->dev, neigh_name(nb), strlen(neigh_name(nb)));
	mmnet_follow_mac(mm);
	netif_carrier_on(mm->dev);
	if (netif_running(mm->dev))
		netif_wake_queue(mm->dev);
}

static void mmnet_dead(struct neigh *nb, void *priv)
{
	struct mmnet *mm = priv;

	netif_carrier_off(mm->dev);
	/* Queued frames are to be dropped, not kept. */
	if (netif_running(mm->dev))
		netif_wake_queue(mm->dev);
}

static const struct neigh_user_ops mmnet_user_ops = {
	.add = mmnet_add,
	.remove = mmnet_remove,
	.live = mmnet_live,
	.dead = mmnet_dead,
	.receive = mmnet_receive,
	.sent = mmnet_sent,
	.room = mmnet_room,
};

static struct neigh_user mmnet_user = {
	.name = "mmnet",
	.protocol = NEIGH_PROTO_NET,
	.share = 8,
	.ops = &mmnet_user_ops,
	.owner = THIS_MODULE,
};

static int __init mmnet_init(void)
{
	int ret = mmnet_leave_init();

	if (ret)
		return ret;
	ret = neigh_register_user(&mmnet_user);
	if (ret)
		mmnet_leave_exit();
	return ret;
}

static void __exit mmnet_exit(void)
{
	neigh_unregister_user(&mmnet_user);
	/* Frames may still be in the stack. After the last was read there is nothing to copy. */
	mmnet_leave_exit();
}

module_init(mmnet_init);
module_exit(mmnet_exit);

MODULE_AUTHOR("Causeway");
MODULE_DESCRIPTION("Ethernet between VMs of one host, without copies");
MODULE_LICENSE("GPL");
MODULE_SOFTDEP("pre: cw_neigh");
