// SPDX-License-Identifier: GPL-2.0
/*
 * Copies of frames that leave through another device. A device that is emulated outside this VM, or uses DMA, knows only this
 * VM's RAM, and can't read a neighbour's window. So a frame that is routed or bridged from a neighbour to such a device gets a
 * copy of its payload, at the last hook before the device. Frames to another neighbour aren't copied.
 *
 * These hooks don't see frames that packet sockets, XDP or traffic control redirect. For those: ethtool --set-priv-flags mmN
 * rx-by-reference off.
 *
 * Packets that IPsec may decrypt are copied, too. Kernels before Linux commit f4c50a4034e6 let ESP decrypt an skb's pages in
 * place although they were marked SKBFL_SHARED_FRAG. Stores to a window have no effect, so the stack would get ciphertext. If the
 * device's own namespace has xfrm states, frames are copied on arrival (mmnet_main.c), since GRO passes them to ESP as well. In
 * other namespaces, where a device on top of this one may be, they are copied at the last hook before the protocol.
 */
#include <linux/netdevice.h>
#include <linux/netfilter.h>
#include <linux/netfilter_bridge.h>
#include <linux/netfilter_ipv4.h>
#include <linux/netfilter_ipv6.h>
#include <linux/skbuff.h>
#include <net/net_namespace.h>

#include "mmnet.h"

static bool refers_to_window(const struct sk_buff *skb)
{
	const struct sk_buff *more;
	int i;

	for (i = 0; i < skb_shinfo(skb)->nr_frags; i++)
		if (neigh_page_is_window(skb_frag_page(&skb_shinfo(skb)->frags[i])))
			return true;
	skb_walk_frags(skb, more)
		if (refers_to_window(more))
			return true;
	return false;
}

/* Gives an skb pages of its own. */
static int own_pages(struct sk_buff *skb)
{
	/* An skb with a frag list, made by GRO, can't be copied in pieces. */
	return skb_has_frag_list(skb) ? skb_linearize(skb) : skb_copy_ubufs(skb, GFP_ATOMIC);
}

bool mmnet_transforms(const struct net *net)
{
#ifdef CONFIG_XFRM
	return READ_ONCE(net->xfrm.state_num);
#else
	return false;
#endif
}

static unsigned int mmnet_arrives(void *priv, struct sk_buff *skb, const struct nf_hook_state *state)
{
	if (!skb_is_nonlinear(skb) || !mmnet_transforms(state->net) || !refers_to_window(skb))
		return NF_ACCEPT;
	return own_pages(skb) ? NF_DROP : NF_ACCEPT;
}

static unsigned int mmnet_leaves(void *priv, struct sk_buff *skb, const struct nf_hook_state *state)
{
	const struct net_device *out = state->out;

	if (!skb_is_nonlinear(skb) || !out || out->flags & IFF_LOOPBACK || mmnet_is(out) || !refers_to_window(skb))
		return NF_ACCEPT;
	return own_pages(skb) ? NF_DROP : NF_ACCEPT;
}

static const struct nf_hook_ops mmnet_hooks[] = {
	{
		.hook = mmnet_arrives,
		.pf = NFPROTO_IPV4,
		.hooknum = NF_INET_LOCAL_IN,
		.priority = NF_IP_PRI_LAST,
	}, {
		.hook = mmnet_arrives,
		.pf = NFPROTO_IPV6,
		.hooknum = NF_INET_LOCAL_IN,
		.priority = NF_IP6_PRI_LAST,
	}, {
		.hook = mmnet_leaves,
		.pf = NFPROTO_IPV4,
		.hooknum = NF_INET_POST_ROUTING,
		.priority = NF_IP_PRI_LAST,
	}, {
		.hook = mmnet_leaves,
		.pf = NFPROTO_IPV6,
		.hooknum = NF_INET_POST_ROUTING,
		.priority = NF_IP6_PRI_LAST,
	},
#if IS_ENABLED(CONFIG_NETFILTER_FAMILY_BRIDGE)
	{
		.hook = mmnet_leaves,
		.pf = NFPROTO_BRIDGE,
		.hooknum = NF_BR_POST_ROUTING,
		.priority = NF_BR_PRI_LAST,
	},
#endif
};

static int __net_init mmnet_net_init(struct net *net)
{
	return nf_register_net_hooks(net, mmnet_hooks, ARRAY_SIZE(mmnet_hooks));
}

static void __net_exit mmnet_net_exit(struct net *net)
{
	nf_unregister_net_hooks(net, mmnet_hooks, ARRAY_SIZE(mmnet_hooks));
}

static struct pernet_operations mmnet_net_ops = {
	.init = mmnet_net_init,
	.exit = mmnet_net_exit,
};

int mmnet_leave_init(void)
{
	return register_pernet_subsys(&mmnet_net_ops);
}

void mmnet_leave_exit(void)
{
	unregister_pernet_subsys(&mmnet_net_ops);
}
