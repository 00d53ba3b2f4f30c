// One counter on the server, incremented by the client with many atomic operations under way at once: each increment must find
// exactly the value that the one before it left, however often packets were lost, repeated or came out of order.
//
//   server: rdma-counter [options]          client: rdma-counter [options] --count N SERVER
//
// The client prints `COUNTER operations=… wrong=… repeated=…`: wrong are increments that found another value than theirs, repeated is
// by how much the counter is beyond the number of operations at the end. With --until-failure it goes on until the connection fails, and
// prints `FAILED status=… after=…` with the seconds from the last completion to the failure.
#include "rdma-common.h"
#include <getopt.h>

#define WINDOW 16u

static const char *device_name, *port = "18602";
static int gid_index = -1, until_failure, client, fd;
static uint64_t count = 10000;
static struct device device;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct hello peer;
// Words 0 to WINDOW - 1: what the operations found. On the server word 0 is the counter.
static uint64_t *words;

static void post(uint64_t operation) {
	struct ibv_sge sge = { .addr = (uintptr_t)&words[operation % WINDOW], .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = operation, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
		.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD }, *bad;
	wr.wr.atomic.remote_addr = peer.address;
	wr.wr.atomic.rkey = peer.rkey;
	wr.wr.atomic.compare_add = 1;
	if (ibv_post_send(qp, &wr, &bad))
		die("Can't post increment %llu", (unsigned long long)operation);
}

static struct ibv_wc completion(double patience) {
	struct ibv_wc wc;
	double start = seconds();
	for (;;) {
		int n = ibv_poll_cq(cq, 1, &wc);
		if (n < 0)
			die("Can't poll");
		if (n)
			return wc;
		if (seconds() - start > patience) {
			errno = ETIMEDOUT;
			die("No completion within %.0f s", patience);
		}
	}
}

static int increment(void) {
	uint64_t posted = 0, done = 0, wrong = 0;
	double last = seconds();
	printf("COUNTING\n");
	fflush(stdout);
	while (until_failure || done < count) {
		while (posted - done < WINDOW && (until_failure || posted < count))
			post(posted++);
		struct ibv_wc wc = completion(120);
		if (wc.status && until_failure) {
			printf("FAILED status=%s after=%.3f operations=%llu\n", ibv_wc_status_str(wc.status), seconds() - last, (unsigned long long)done);
			return wrong ? 3 : 0;
		}
		if (wc.status) {
			errno = 0;
			die("Increment %llu completed with %s (vendor error 0x%x)", (unsigned long long)done, ibv_wc_status_str(wc.status), wc.vendor_err);
		}
		// In order on one connection.
		wrong += wc.wr_id != done || words[done % WINDOW] != done;
		done++;
		last = seconds();
	}
	barrier(fd);
	uint64_t sum;
	read_all(fd, &sum, sizeof sum);
	uint64_t repeated = sum > count ? sum - count : 0;
	wrong += sum < count;
	printf("COUNTER operations=%llu wrong=%llu repeated=%llu\n", (unsigned long long)count, (unsigned long long)wrong,
	       (unsigned long long)repeated);
	return wrong || repeated ? 3 : 0;
}

int main(int argc, char **argv) {
	static const struct option known[] = { { "device", 1, 0, 'd' }, { "gid", 1, 0, 'g' }, { "count", 1, 0, 'c' }, { "port", 1, 0, 'p' },
		{ "until-failure", 0, 0, 'f' }, { 0, 0, 0, 0 } };
	for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;)
		switch (c) {
		case 'd': device_name = optarg; break;
		case 'g': gid_index = atoi(optarg); break;
		case 'c': count = strtoull(optarg, NULL, 0); break;
		case 'p': port = optarg; break;
		case 'f': until_failure = 1; break;
		default: return 2;
		}
	client = argv[optind] != NULL;
	fd = control(argv[optind], port);
	device = device_open(device_name, gid_index);
	words = pages(4096);
	cq = ibv_create_cq(device.context, 64, NULL, NULL, 0);
	if (!cq)
		die("Can't create a completion queue");
	struct ibv_qp_init_attr attributes = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = WINDOW, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	qp = ibv_create_qp(device.pd, &attributes);
	if (!qp)
		die("Can't create a queue pair");
	mr = ibv_reg_mr(device.pd, words, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
	if (!mr)
		die("Can't register a page");
	struct hello mine = { .qpn = qp->qp_num, .rkey = mr->rkey, .address = (uintptr_t)words, .gid = device.gid };
	peer = exchange(fd, mine);
	rd_atomic = WINDOW;
	rc_connect(&device, qp, peer);
	barrier(fd);
	if (client)
		return increment();
	if (until_failure)
		for (;;)
			pause();
	barrier(fd);
	uint64_t sum = *(volatile uint64_t *)words;
	write_all(fd, &sum, sizeof sum);
	return 0;
}
