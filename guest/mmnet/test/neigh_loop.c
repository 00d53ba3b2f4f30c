// SPDX-License-Identifier: GPL-2.0
/*
 * A test double of the neighbours' core, in place of cw_neigh: one neighbour, which is this VM itself. Posted messages go to the
 * same VM's users, so that client and server of mmblk run against each other in one kernel, without a window. The order of calls
 * and their contexts are those of neigh.h. Parameters cause faults at run time:
 *
 *	kill		write milliseconds: the link ends, as by the peer's death, and a new one begins after that time
 *	unreachable	1: programs' pages count as a third VM's, and requests that name one complete with NEIGH_UNREACHABLE
 *	most		limit of outstanding messages per user
 *	refuse		requests of mmblk of this kind complete with the status MMBLK_BUSY; 0: none
 *	probe		write the name of a file system's write_iter: holds_least and holds_most then record, over its calls,
 *			how often the file system is protected against freezing (sb_start_write); "none" ends it
 *	name		the neighbour's name, for devices that seek it from then on
 */
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/refcount.h>
#include <linux/slab.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "mmblk_wire.h"
#include "neigh.h"

#define LOOP_IDS 4096

struct loop_item {
	struct list_head node;
	struct neigh_msg msg;
	const struct neigh_user *sender;
	void *cookie;
	u32 status;
	bool outstanding;	/* the sender waits for it */
	bool received;		/* the receiver hasn't completed it */
};

struct neigh_link {
	u32 epoch;
	refcount_t users;
};

struct neigh {
	spinlock_t lock;	/* all fields; irqs off */
	struct neigh_link link;
	bool open;
	struct list_head in, back;
	struct loop_item *item[LOOP_IDS];
	struct tasklet_struct poll;
	struct {
		const struct neigh_user *user;
		void *priv;
		bool live, wants_room;
		unsigned int outstanding;
	} at[NEIGH_PROTOCOLS];
};

static struct neigh loop;
static DEFINE_MUTEX(loop_mutex);
static DECLARE_WAIT_QUEUE_HEAD(loop_idle);
static uint most = 512;
module_param(most, uint, 0644);
static bool unreachable;
module_param(unreachable, bool, 0644);
static uint refuse;
module_param(refuse, uint, 0644);
static char loop_name[80] = "self";
module_param_string(name, loop_name, sizeof(loop_name), 0644);

static uint holds_least;
module_param(holds_least, uint, 0444);
static uint holds_most;
module_param(holds_most, uint, 0444);
static char probe_symbol[64];
static struct kprobe probe;

static void end_link(void);
static void begin_link(void);

/* write_iter(iocb, ...) is called. The count is valid only if a single write is in progress. */
static int probe_hit(struct kprobe *of, struct pt_regs *regs)
{
	struct kiocb *iocb = (struct kiocb *)regs_get_kernel_argument(regs, 0);
	struct super_block *sb = file_inode(iocb->ki_filp)->i_sb;
	uint holds = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		holds += *per_cpu_ptr(sb->s_writers.rw_sem[SB_FREEZE_WRITE - 1].read_count, cpu);
	holds_least = min(holds_least, holds);
	holds_most = max(holds_most, holds);
	return 0;
}

static void probe_end(void)
{
	if (probe_symbol[0])
		unregister_kprobe(&probe);
	probe_symbol[0] = 0;
}

static int probe_set(const char *text, const struct kernel_param *param)
{
	char name[sizeof(probe_symbol)];
	int ret;

	if (strscpy(name, text, sizeof(name)) < 0)
		return -EINVAL;
	probe_end();
	if (!strcmp(strim(name), "none"))
		return 0;
	holds_least = UINT_MAX;
	holds_most = 0;
	probe = (struct kprobe) { .symbol_name = probe_symbol, .pre_handler = probe_hit };
	strscpy(probe_symbol, strim(name), sizeof(probe_symbol));
	ret = register_kprobe(&probe);
	if (ret)
		probe_symbol[0] = 0;
	return ret;
}

static const struct kernel_param_ops probe_ops = { .set = probe_set };
module_param_cb(probe, &probe_ops, NULL, 0200);

int neigh_post(struct neigh *nb, const struct neigh_user *user, const struct neigh_part *parts, unsigned int count, u16 kind,
	       u32 note, void *cookie)
{
	struct loop_item *item;
	unsigned long flags;
	unsigned int i;
	int ret = 0;

	if (!count || count > CW_NB_MOST_PARTS)
		return -EINVAL;
	item = kzalloc(sizeof(*item), GFP_ATOMIC);
	if (!item)
		return -ENOSPC;
	item->msg = (struct neigh_msg) { .neigh = nb, .link = &nb->link, .note = note, .kind = kind, .count = count };
	for (i = 0; i < count; i++) {
		item->msg.parts[i] = parts[i];
		item->msg.bytes += parts[i].length;
	}
	item->sender = user;
	item->cookie = cookie;
	item->outstanding = true;
	spin_lock_irqsave(&nb->lock, flags);
	if (!nb->open || !nb->at[user->protocol].live)
		ret = -ENOTCONN;
	else if (nb->at[user->protocol].outstanding >= min_t(uint, READ_ONCE(most), LOOP_IDS / 2))
		ret = -ENOSPC;
	for (i = 0; !ret && i < LOOP_IDS && nb->item[i]; i++)
		;
	if (!ret && i == LOOP_IDS)
		ret = -ENOSPC;
	if (ret == -ENOSPC)
		nb->at[user->protocol].wants_room = true;
	if (!ret) {
		item->msg.id = i;
		nb->item[i] = item;
		nb->at[user->protocol].outstanding++;
		list_add_tail(&item->node, &nb->in);
	}
	spin_unlock_irqrestore(&nb->lock, flags);
	if (ret)
		kfree(item);
	else
		tasklet_schedule(&nb->poll);
	return ret;
}
EXPORT_SYMBOL_GPL(neigh_post);

void neigh_kick(struct neigh *nb)
{
	tasklet_schedule(&nb->poll);
}
EXPORT_SYMBOL_GPL(neigh_kick);

void neigh_complete_quietly(struct neigh_link *link, u32 id, u32 status)
{
	struct neigh *nb = container_of(link, struct neigh, link);
	struct loop_item *item;
	unsigned long flags;
	bool gone;

	spin_lock_irqsave(&nb->lock, flags);
	item = nb->item[id];
	if (WARN_ON_ONCE(!item || !item->received)) {
		spin_unlock_irqrestore(&nb->lock, flags);
		return;
	}
	item->received = false;
	item->status = status;
	gone = !item->outstanding;
	if (gone)
		nb->item[id] = NULL;
	else
		list_add_tail(&item->node, &nb->back);
	spin_unlock_irqrestore(&nb->lock, flags);
	if (gone)
		kfree(item);
	if (refcount_dec_and_test(&link->users))
		wake_up(&loop_idle);
	tasklet_schedule(&nb->poll);
}
EXPORT_SYMBOL_GPL(neigh_complete_quietly);

void neigh_complete(struct neigh_link *link, u32 id, u32 status)
{
	neigh_complete_quietly(link, id, status);
}
EXPORT_SYMBOL_GPL(neigh_complete);

/* Whether a page is a program's memory: neither a module's copy nor a page of a file. */
static bool is_anothers(const struct page *page)
{
	return READ_ONCE(unreachable) && PageAnon((struct page *)page);
}

static bool names_anothers(const struct neigh_msg *msg)
{
	unsigned int i;

	for (i = 0; i < msg->count; i++)
		if (is_anothers(pfn_to_page(PHYS_PFN(msg->parts[i].address))))
			return true;
	return false;
}

static void hand_out(struct neigh *nb, struct loop_item *item)
{
	u8 protocol = item->msg.kind >> 8;
	const struct neigh_user *user = protocol < NEIGH_PROTOCOLS ? nb->at[protocol].user : NULL;

	if (!user || !nb->at[protocol].live)
		neigh_complete_quietly(&nb->link, item->msg.id, NEIGH_NOBODY);
	else if (protocol == NEIGH_PROTO_BLK_REQUEST && NEIGH_KIND_OWN(item->msg.kind) == READ_ONCE(refuse))
		neigh_complete_quietly(&nb->link, item->msg.id, MMBLK_BUSY);
	else if (protocol == NEIGH_PROTO_BLK_REQUEST && names_anothers(&item->msg))
		neigh_complete_quietly(&nb->link, item->msg.id, NEIGH_UNREACHABLE);
	else
		user->ops->receive(nb, nb->at[protocol].priv, &item->msg);
}

static void loop_poll(struct tasklet_struct *tasklet)
{
	struct neigh *nb = &loop;
	struct loop_item *item;
	unsigned int i;
	bool room;

	for (;;) {
		spin_lock_irq(&nb->lock);
		item = list_first_entry_or_null(&nb->back, struct loop_item, node);
		if (item) {
			list_del(&item->node);
			nb->item[item->msg.id] = NULL;
			nb->at[item->sender->protocol].outstanding--;
			spin_unlock_irq(&nb->lock);
			item->sender->ops->sent(nb, nb->at[item->sender->protocol].priv, item->cookie, item->status);
			kfree(item);
			continue;
		}
		item = nb->open ? list_first_entry_or_null(&nb->in, struct loop_item, node) : NULL;
		if (!item) {
			spin_unlock_irq(&nb->lock);
			break;
		}
		list_del(&item->node);
		item->received = true;
		refcount_inc(&nb->link.users);
		spin_unlock_irq(&nb->lock);
		hand_out(nb, item);
	}
	for (i = 0; i < NEIGH_PROTOCOLS; i++)
		if (nb->at[i].user && nb->at[i].live) {
			spin_lock_irq(&nb->lock);
			room = nb->at[i].wants_room && nb->at[i].outstanding < READ_ONCE(most);
			if (room)
				nb->at[i].wants_room = false;
			spin_unlock_irq(&nb->lock);
			if (room)
				nb->at[i].user->ops->room(nb, nb->at[i].priv);
			nb->at[i].user->ops->batch_end(nb, nb->at[i].priv);
		}
}

/* Fails all outstanding messages of a user, or of all users. The poll doesn't run. */
static void fail_sent(struct neigh *nb, const struct neigh_user *only)
{
	unsigned int id;

	local_bh_disable();
	for (id = 0; id < LOOP_IDS; id++) {
		struct loop_item *item;
		bool free;

		spin_lock_irq(&nb->lock);
		item = nb->item[id];
		if (!item || !item->outstanding || (only && item->sender != only)) {
			spin_unlock_irq(&nb->lock);
			continue;
		}
		item->outstanding = false;
		nb->at[item->sender->protocol].outstanding--;
		free = !item->received;
		if (free) {
			list_del(&item->node);
			nb->item[id] = NULL;
		}
		spin_unlock_irq(&nb->lock);
		item->sender->ops->sent(nb, nb->at[item->sender->protocol].priv, item->cookie, NEIGH_DEAD);
		if (free)
			kfree(item);
	}
	local_bh_enable();
}

static void user_live(unsigned int i)
{
	spin_lock_irq(&loop.lock);
	loop.at[i].live = true;
	spin_unlock_irq(&loop.lock);
	loop.at[i].user->ops->live(&loop, loop.at[i].priv);
}

static void user_dead(unsigned int i)
{
	spin_lock_irq(&loop.lock);
	loop.at[i].live = false;
	spin_unlock_irq(&loop.lock);
	fail_sent(&loop, loop.at[i].user);
	loop.at[i].user->ops->dead(&loop, loop.at[i].priv);
}

static void begin_link(void)
{
	unsigned int i;

	loop.link.epoch++;
	refcount_set(&loop.link.users, 1);
	spin_lock_irq(&loop.lock);
	loop.open = true;
	spin_unlock_irq(&loop.lock);
	for (i = 0; i < NEIGH_PROTOCOLS; i++)
		if (loop.at[i].user)
			user_live(i);
	tasklet_schedule(&loop.poll);
}

static void end_link(void)
{
	unsigned int i;

	spin_lock_irq(&loop.lock);
	loop.open = false;
	spin_unlock_irq(&loop.lock);
	tasklet_disable(&loop.poll);
	for (i = 0; i < NEIGH_PROTOCOLS; i++)
		if (loop.at[i].user && loop.at[i].live)
			user_dead(i);
	tasklet_enable(&loop.poll);
	if (!refcount_dec_and_test(&loop.link.users))
		wait_event(loop_idle, !refcount_read(&loop.link.users));
}

static int kill_set(const char *text, const struct kernel_param *param)
{
	unsigned int ms;
	int ret = kstrtouint(text, 0, &ms);

	if (ret)
		return ret;
	mutex_lock(&loop_mutex);
	end_link();
	msleep(ms);
	begin_link();
	mutex_unlock(&loop_mutex);
	return 0;
}

static const struct kernel_param_ops kill_ops = { .set = kill_set };
module_param_cb(kill, &kill_ops, NULL, 0200);

int neigh_register_user(struct neigh_user *user)
{
	void *priv = user->ops->add(&loop);

	if (IS_ERR(priv))
		return PTR_ERR(priv);
	mutex_lock(&loop_mutex);
	loop.at[user->protocol].priv = priv;
	loop.at[user->protocol].user = user;
	user_live(user->protocol);
	mutex_unlock(&loop_mutex);
	return 0;
}
EXPORT_SYMBOL_GPL(neigh_register_user);

void neigh_unregister_user(struct neigh_user *user)
{
	unsigned int i = user->protocol;

	mutex_lock(&loop_mutex);
	tasklet_disable(&loop.poll);
	user_dead(i);
	tasklet_enable(&loop.poll);
	user->ops->remove(&loop, loop.at[i].priv);
	loop.at[i].user = NULL;
	mutex_unlock(&loop_mutex);
}
EXPORT_SYMBOL_GPL(neigh_unregister_user);

static void give_up_work(struct work_struct *work)
{
	kill_set("100", NULL);
}

static DECLARE_WORK(give_up, give_up_work);

void neigh_give_up(struct neigh *nb, const char *why)
{
	pr_info("neigh_loop: given up: %s\n", why);
	schedule_work(&give_up);
}
EXPORT_SYMBOL_GPL(neigh_give_up);

bool neigh_copy_from(const struct neigh_msg *msg, u64 offset, void *to, u32 length)
{
	unsigned int i;

	if (offset > msg->bytes || length > msg->bytes - offset)
		return false;
	for (i = 0; i < msg->count && length; i++) {
		u32 piece;

		if (offset >= msg->parts[i].length) {
			offset -= msg->parts[i].length;
			continue;
		}
		piece = min_t(u64, msg->parts[i].length - offset, length);
		memcpy(to, __va(msg->parts[i].address + offset), piece);
		to += piece;
		length -= piece;
		offset = 0;
	}
	return true;
}
EXPORT_SYMBOL_GPL(neigh_copy_from);

u64 neigh_global(struct neigh *nb, const struct page *page, unsigned int offset)
{
	return page_to_phys(page) + offset;
}
EXPORT_SYMBOL_GPL(neigh_global);

u64 neigh_global_virt(struct neigh *nb, const void *memory)
{
	return virt_to_phys((void *)memory);
}
EXPORT_SYMBOL_GPL(neigh_global_virt);

bool neigh_page_is_window(const struct page *page)
{
	return is_anothers(page);
}
EXPORT_SYMBOL_GPL(neigh_page_is_window);

u32 neigh_slot(const struct neigh *nb)
{
	return 0;
}
EXPORT_SYMBOL_GPL(neigh_slot);

u32 neigh_slot_of(const struct neigh *nb, u64 address)
{
	return 0;
}
EXPORT_SYMBOL_GPL(neigh_slot_of);

const char *neigh_name(const struct neigh *nb)
{
	return loop_name;
}
EXPORT_SYMBOL_GPL(neigh_name);

u32 neigh_epoch(const struct neigh *nb)
{
	return nb->open ? nb->link.epoch : 0;
}
EXPORT_SYMBOL_GPL(neigh_epoch);

static int __init loop_init(void)
{
	spin_lock_init(&loop.lock);
	INIT_LIST_HEAD(&loop.in);
	INIT_LIST_HEAD(&loop.back);
	tasklet_setup(&loop.poll, loop_poll);
	begin_link();
	return 0;
}

static void __exit loop_exit(void)
{
	probe_end();
	flush_work(&give_up);
	end_link();
	tasklet_kill(&loop.poll);
}

module_init(loop_init);
module_exit(loop_exit);
MODULE_DESCRIPTION("Test double of the neighbours' core: this VM is its own neighbour");
MODULE_LICENSE("GPL");
