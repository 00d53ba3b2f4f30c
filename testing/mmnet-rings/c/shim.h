/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The parts of Linux that the rings of guest/mmnet use, for a process. One thread at a time uses an end, so locks only check that lock and
 * unlock alternate. Other threads share the words of a segment: their accesses are the kernel's on x86-64, as C11 atomics.
 */
#ifndef CW_RINGS_SHIM_H
#define CW_RINGS_SHIM_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t s64;
typedef u64 resource_size_t;
#define U32_MAX UINT32_MAX
#define U64_MAX UINT64_MAX

#define __iomem
#define __rcu
#define EXPORT_SYMBOL_GPL(name) _Static_assert(1, #name)
#define container_of(pointer, type, member) ((type *)((char *)(pointer) - offsetof(type, member)))
#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))

/* x86-64 is little-endian. */
#define le64_to_cpu(value) (value)
#define cpu_to_le64(value) (value)

#define READ_ONCE(place) __atomic_load_n(&(place), __ATOMIC_RELAXED)
#define WRITE_ONCE(place, value) __atomic_store_n(&(place), value, __ATOMIC_RELAXED)
#define virt_load_acquire(place) __atomic_load_n(place, __ATOMIC_ACQUIRE)
#define virt_store_release(place, value) __atomic_store_n(place, value, __ATOMIC_RELEASE)
#define virt_mb() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define cmpxchg(place, old, new) \
	({ __typeof__(*(place)) found = old; \
	   __atomic_compare_exchange_n(place, &found, new, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); found; })

/* A broken invariant of the module aborts the process, so that the test fails. */
#define shim_must(condition) \
	((condition) ? (void)0 : (fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition), abort()))
#define WARN_ON_ONCE(condition) ({ bool found = (condition); shim_must(!found); found; })

typedef struct { bool held; } spinlock_t;

static inline void spin_lock_init(spinlock_t *lock)
{
	lock->held = false;
}

static inline void spin_lock_irq(spinlock_t *lock)
{
	shim_must(!lock->held);
	lock->held = true;
}

static inline void spin_unlock_irq(spinlock_t *lock)
{
	shim_must(lock->held);
	lock->held = false;
}

#define spin_lock_irqsave(lock, flags) ((flags) = 0, spin_lock_irq(lock))
#define spin_unlock_irqrestore(lock, flags) ((void)(flags), spin_unlock_irq(lock))

typedef struct { int count; } refcount_t;
typedef struct { int count; } atomic_t;

static inline void refcount_set(refcount_t *refs, int count)
{
	refs->count = count;
}

static inline void refcount_inc(refcount_t *refs)
{
	shim_must(refs->count > 0);
	refs->count++;
}

static inline bool refcount_inc_not_zero(refcount_t *refs)
{
	if (!refs->count)
		return false;
	refs->count++;
	return true;
}

static inline bool refcount_dec_and_test(refcount_t *refs)
{
	shim_must(refs->count > 0);
	return !--refs->count;
}

#define rcu_read_lock() ((void)0)
#define rcu_read_unlock() ((void)0)
#define rcu_dereference(pointer) (pointer)

struct rcu_head { int unused; };
struct kref { int unused; };
struct list_head { struct list_head *next; };
struct mutex { int unused; };
struct work_struct { int unused; };
struct delayed_work { int unused; };
struct timer_list { bool pending; };
struct napi_struct { bool scheduled; };
struct net_device { int unused; };
struct sk_buff { int unused; };
struct device { int unused; };
struct pci_dev { int unused; };
struct workqueue_struct { int unused; };
struct dev_pagemap { int unused; };
struct range { u64 start, end; };
struct page { int unused; };
struct module { int unused; };
typedef struct { int unused; } wait_queue_head_t;
struct wait_queue_head { int unused; };

#define ETH_ALEN 6
#define MAX_SKB_FRAGS 17
#define PAGE_SHIFT 12
#define NSEC_PER_USEC 1000U
/* The tests never access the bytes of a part. */
#define pfn_to_page(pfn) ((struct page *)(uintptr_t)(pfn))
#define offset_in_page(address) ((unsigned int)((address) & 4095))

/* The poll loop makes a single pass, and the clock is constant. */
#define num_online_cpus() 1
#define need_resched() true
#define cpu_relax() ((void)0)
#define ktime_get_ns() 1ULL
#define jiffies 0UL

static inline bool timer_pending(const struct timer_list *timer)
{
	return timer->pending;
}

static inline void mod_timer(struct timer_list *timer, unsigned long when)
{
	(void)when;
	timer->pending = true;
}

static inline void napi_schedule(struct napi_struct *napi)
{
	napi->scheduled = true;
}

static inline bool napi_complete_done(struct napi_struct *napi, int done)
{
	(void)done;
	napi->scheduled = false;
	return true;
}

static inline void writel(u32 value, u32 *place)
{
	(*place) += value;
}

static inline u64 readq(const void *place)
{
	return *(const u64 *)place;
}

#define GFP_KERNEL 0
/* Returns zeroed memory, followed by an inaccessible guard page: an overrun ends the process. */
void *shim_guarded(size_t bytes);
void shim_guarded_free(void *memory);
#define kvcalloc(count, size, flags) shim_guarded((size_t)(count) * (size))
#define kvfree(memory) shim_guarded_free(memory)

#endif
