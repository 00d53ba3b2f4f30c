// What the guest programs share: a control connection over TCP, a connected pair of queue pairs, and patterns that tell
// every message from every other. Errors end the program with a line that says what was tried.
#ifndef RDMA_COMMON_H
#define RDMA_COMMON_H

#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PSN 0x1234

static void __attribute__((noreturn, format(printf, 1, 2))) die(const char *format, ...) {
	int error = errno;
	va_list list;
	va_start(list, format);
	fputs("ERROR ", stdout);
	vprintf(format, list);
	va_end(list);
	printf(": %s\n", error ? strerror(error) : "no errno");
	fflush(stdout);
	exit(1);
}

static double seconds(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

// A different sequence of words for every seed (splitmix64).
static uint64_t word(uint64_t seed, uint64_t index) {
	uint64_t z = seed * 0x9e3779b97f4a7c15ull + index * 0xbf58476d1ce4e5b9ull + 1;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static void __attribute__((unused)) pattern_fill(void *to, size_t size, uint64_t seed) {
	for (size_t at = 0; at < size; at += 8) {
		uint64_t w = word(seed, at / 8);
		memcpy((char *)to + at, &w, size - at < 8 ? size - at : 8);
	}
}

// Whether `size` bytes are what `pattern_fill` wrote.
static int __attribute__((unused)) pattern_holds(const void *from, size_t size, uint64_t seed) {
	for (size_t at = 0; at < size; at += 8) {
		uint64_t w = word(seed, at / 8);
		if (memcmp((const char *)from + at, &w, size - at < 8 ? size - at : 8))
			return 0;
	}
	return 1;
}

static void write_all(int fd, const void *from, size_t size) {
	for (const char *at = from; size;) {
		ssize_t n = write(fd, at, size);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			die("Can't write %zu bytes to the peer", size);
		at += n;
		size -= (size_t)n;
	}
}

static void read_all(int fd, void *to, size_t size) {
	for (char *at = to; size;) {
		ssize_t n = read(fd, at, size);
		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0)
			errno = ECONNRESET;
		if (n <= 0)
			die("Can't read %zu bytes from the peer", size);
		at += n;
		size -= (size_t)n;
	}
}

// The server waits for one client, the client tries for half a minute.
static int control(const char *host, const char *port) {
	struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM, .ai_flags = host ? 0 : AI_PASSIVE };
	struct addrinfo *found;
	if (getaddrinfo(host, port, &hints, &found))
		die("Can't resolve %s", host ? host : "the own address");
	int one = 1, fd = -1;
	if (host) {
		for (int i = 0; i < 300; i++) {
			fd = socket(AF_INET, SOCK_STREAM, 0);
			if (connect(fd, found->ai_addr, found->ai_addrlen) == 0)
				break;
			close(fd);
			fd = -1;
			usleep(100000);
		}
		if (fd < 0)
			die("Can't connect to %s port %s", host, port);
	} else {
		int listener = socket(AF_INET, SOCK_STREAM, 0);
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
		if (bind(listener, found->ai_addr, found->ai_addrlen) || listen(listener, 1))
			die("Can't listen on port %s", port);
		fd = accept(listener, NULL, NULL);
		close(listener);
	}
	freeaddrinfo(found);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	return fd;
}

// Both sides are here.
static void barrier(int fd) {
	char mine = 'b', theirs = 0;
	write_all(fd, &mine, 1);
	read_all(fd, &theirs, 1);
	if (theirs != 'b')
		die("The peer is out of step: it sent 0x%02x", theirs);
}

// What one side tells the other.
struct hello {
	uint32_t qpn, rkey;
	uint64_t address;
	union ibv_gid gid;
};

static struct hello exchange(int fd, struct hello mine) {
	struct hello theirs;
	write_all(fd, &mine, sizeof mine);
	read_all(fd, &theirs, sizeof theirs);
	return theirs;
}

struct device {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_port_attr port;
	union ibv_gid gid;
	int gid_index;
};

// Opens a device by name and takes its first GID that stands for an IPv4 address.
static struct device device_open(const char *name, int gid_index) {
	struct device d = { 0 };
	struct ibv_device **list = ibv_get_device_list(NULL);
	for (int i = 0; list && list[i]; i++)
		if (!name || !strcmp(ibv_get_device_name(list[i]), name)) {
			d.context = ibv_open_device(list[i]);
			break;
		}
	if (!d.context)
		die("Can't open the RDMA device %s", name ? name : "(any)");
	ibv_free_device_list(list);
	if (ibv_query_port(d.context, 1, &d.port))
		die("Can't query the port");
	d.gid_index = gid_index;
	static const unsigned char mapped[12] = { [10] = 0xff, [11] = 0xff };
	for (int i = 0; gid_index < 0 && d.gid_index < 0 && i < d.port.gid_tbl_len; i++)
		if (!ibv_query_gid(d.context, 1, i, &d.gid) && !memcmp(d.gid.raw, mapped, 12)) {
			struct ibv_gid_entry entry;
			// RoCEv2 where the device has both kinds.
			if (ibv_query_gid_ex(d.context, 1, (uint32_t)i, &entry, 0) || entry.gid_type == IBV_GID_TYPE_ROCE_V2)
				d.gid_index = i;
		}
	errno = 0;
	if (d.gid_index < 0 || ibv_query_gid(d.context, 1, d.gid_index, &d.gid))
		die("The device has no GID for an IPv4 address");
	d.pd = ibv_alloc_pd(d.context);
	if (!d.pd)
		die("Can't allocate a protection domain");
	return d;
}

// READs and atomic operations that a connection may have under way, each way.
static uint8_t rd_atomic = 1;

// How long a connection waits for an answer: 4.096 us * 2^14 are 67 ms.
static uint8_t ack_timeout = 14;

// Takes a reliable connection from RESET to RTS.
static void rc_connect(struct device *d, struct ibv_qp *qp, struct hello peer) {
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };
	if (ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		die("Can't take the queue pair to INIT");
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = d->port.active_mtu, .dest_qp_num = peer.qpn, .rq_psn = PSN,
		.max_dest_rd_atomic = rd_atomic, .min_rnr_timer = 1,
		.ah_attr = { .is_global = 1, .port_num = 1,
			.grh = { .dgid = peer.gid, .sgid_index = (uint8_t)d->gid_index, .hop_limit = 64 } } };
	if (ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		die("Can't take the queue pair to RTR");
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = ack_timeout, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = PSN, .max_rd_atomic = rd_atomic };
	if (ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			IBV_QP_MAX_QP_RD_ATOMIC))
		die("Can't take the queue pair to RTS");
}

static void *pages(size_t size) {
	void *p = NULL;
	if (posix_memalign(&p, 4096, size ? size : 1))
		die("Can't allocate %zu bytes", size);
	memset(p, 0, size);
	return p;
}

#endif
