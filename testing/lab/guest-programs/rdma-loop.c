// Operations of one kind without a pause on an established connection, every byte verified, for counting what each costs.
//
//   server: rdma-loop [options]            client: rdma-loop [options] SERVER
//
// Without --step it does --count operations of each kind. With --step it goes on until it is told to stop, so that counters
// can be read from outside while it runs. The client then takes lines on its standard input:
//   go     after it printed `READY op`: start
//   mark   print `FROM op done=…` at once and `TO op done=…` --count operations later; the operations go on all the time
//   stop   come to the end
// Both sides print `LOOP op=… count=… size=… seconds=… events=… empty_polls=… mismatches=…` after each kind.
#include "rdma-common.h"
#include <getopt.h>
#include <poll.h>

#define RING 256

static int tcp, use_events, step;
static const char *device_name, *port = "18600";
static int gid_index = -1, depth = 64;
static size_t size = 64, slot;
static uint64_t count = 1000000;
static char ops[128] = "send,write,read";

static struct device device;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static char *memory;
static struct hello peer;
static uint64_t events, empty_polls, unacknowledged;
static uint64_t received, receives; // Over all rounds: RING receives are always posted.
static uint64_t mark_at;

static int readable(int fd) {
	struct pollfd p = { .fd = fd, .events = POLLIN };
	return poll(&p, 1, 0) == 1;
}

// For the client, often: follows the lines on standard input. False when the operations are to end.
static int goes_on(const char *op, uint64_t done) {
	static unsigned calls;
	char line[16];
	if (!step)
		return 1;
	if (mark_at && done >= mark_at) {
		printf("TO %s done=%llu\n", op, (unsigned long long)done);
		fflush(stdout);
		mark_at = 0;
	}
	if (++calls % 16 || !readable(0))
		return 1;
	if (!fgets(line, sizeof line, stdin) || !strcmp(line, "stop\n"))
		return 0;
	errno = EINVAL;
	if (strcmp(line, "mark\n") || mark_at)
		die("Can't follow %s", line);
	printf("FROM %s done=%llu\n", op, (unsigned long long)done);
	fflush(stdout);
	mark_at = done + count;
	return 1;
}

// For the server: whether the client has said just now how many there are.
static int told_total(int fd, uint64_t *total) {
	if (fd < 0 || *total != UINT64_MAX || !readable(fd))
		return 0;
	read_all(fd, total, sizeof *total);
	return 1;
}

// Takes completions; all of them must be good. It waits for at least one, or for the client's word on `fd` that there are
// `total`: then it may take none.
static int completions(struct ibv_wc *wc, int room, int fd, uint64_t *total) {
	int armed = 0;
	for (unsigned looks = 1;; looks++) {
		int n = ibv_poll_cq(cq, room, wc);
		if (n < 0)
			die("Can't poll");
		for (int i = 0; i < n; i++)
			if (wc[i].status) {
				errno = 0;
				die("Work request %llu completed with %s (vendor error 0x%x)", (unsigned long long)wc[i].wr_id,
				    ibv_wc_status_str(wc[i].status), wc[i].vendor_err);
			}
		if (n)
			return n;
		if (!use_events) {
			empty_polls++;
			if (looks % 1024 == 0 && told_total(fd, total))
				return 0;
		} else if (!armed) {
			if (ibv_req_notify_cq(cq, 0))
				die("Can't arm the completion queue");
			armed = 1; // What came before the arming is found by one more poll.
		} else {
			struct pollfd either[2] = { { .fd = channel->fd, .events = POLLIN },
						    { .fd = *total == UINT64_MAX ? fd : -1, .events = POLLIN } };
			if (poll(either, 2, -1) < 0)
				die("Can't wait for a completion event");
			if (!either[0].revents) {
				if (told_total(fd, total))
					return 0;
				continue;
			}
			struct ibv_cq *which;
			void *context;
			if (ibv_get_cq_event(channel, &which, &context))
				die("Can't take a completion event");
			events++;
			if (++unacknowledged == 1000) {
				ibv_ack_cq_events(cq, 1000);
				unacknowledged = 0;
			}
			armed = 0;
		}
	}
}

static void post_receive(uint64_t n) {
	struct ibv_sge sge = { .addr = (uintptr_t)memory + (n % RING) * slot, .length = (uint32_t)size, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = n, .sg_list = &sge, .num_sge = 1 }, *bad;
	if (ibv_post_recv(qp, &wr, &bad))
		die("Can't post receive %llu", (unsigned long long)n);
}

static void post(enum ibv_wr_opcode opcode, uint64_t n) {
	uint64_t at = (n % RING) * slot;
	struct ibv_sge sge = { .addr = (uintptr_t)memory + at, .length = (uint32_t)size, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = n, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED }, *bad;
	if (opcode != IBV_WR_SEND) {
		wr.wr.rdma.remote_addr = peer.address + at;
		wr.wr.rdma.rkey = peer.rkey;
	}
	if (ibv_post_send(qp, &wr, &bad))
		die("Can't post send %llu", (unsigned long long)n);
}

// Sends, writes or reads messages until it is told to stop, at most `*total`; returns how many were wrong, and in `*total`
// how many there were.
static uint64_t requester(const char *op, enum ibv_wr_opcode opcode, uint64_t *total, uint64_t seed) {
	struct ibv_wc wc[RING];
	uint64_t posted = 0, done = 0, wrong = 0, forever = 0;
	while (done < *total) {
		if (posted < *total && !goes_on(op, done))
			*total = posted;
		while (posted < *total && posted - done < (uint64_t)depth) {
			if (opcode == IBV_WR_RDMA_READ)
				memset(memory + (posted % RING) * slot, 0, size < 64 ? size : 64);
			else
				pattern_fill(memory + (posted % RING) * slot, size, seed + posted);
			post(opcode, posted++);
		}
		if (done == posted)
			break;
		int n = completions(wc, RING, -1, &forever);
		for (int i = 0; i < n; i++, done++) {
			if (wc[i].wr_id != done)
				wrong++;
			if (opcode == IBV_WR_RDMA_READ && !pattern_holds(memory + (done % RING) * slot, size, seed + done % RING))
				wrong++;
		}
	}
	return wrong;
}

// Receives until the client has said on `fd` how many there were, and these have come.
static uint64_t receiver(int fd, uint64_t *total, uint64_t seed) {
	struct ibv_wc wc[RING];
	uint64_t wrong = 0, done = 0;
	while (done < *total) {
		int n = completions(wc, RING, fd, total);
		for (int i = 0; i < n; i++, done++, received++) {
			if (wc[i].wr_id != received || wc[i].byte_len != size ||
			    !pattern_holds(memory + (received % RING) * slot, size, seed + done))
				wrong++;
			post_receive(receives++);
		}
	}
	return wrong;
}

// What the written-to memory must hold at the end: the last message of every slot.
static uint64_t check_written(uint64_t total, uint64_t seed) {
	uint64_t wrong = 0;
	for (uint64_t s = 0; s < RING && s < total; s++)
		wrong += !pattern_holds(memory + s * slot, size, seed + s + (total - 1 - s) / RING * RING);
	return wrong;
}

static uint64_t verbs_round(int fd, int client, const char *op, uint64_t *total, uint64_t seed) {
	enum ibv_wr_opcode opcode = !strcmp(op, "send") ? IBV_WR_SEND : !strcmp(op, "write") ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
	uint64_t wrong = 0;
	if (!client && opcode == IBV_WR_SEND)
		while (receives < received + RING)
			post_receive(receives++);
	if (!client && opcode == IBV_WR_RDMA_READ)
		for (uint64_t s = 0; s < RING; s++)
			pattern_fill(memory + s * slot, size, seed + s);
	barrier(fd);
	if (client) {
		*total = step ? UINT64_MAX : count;
		wrong = requester(op, opcode, total, seed);
		write_all(fd, total, sizeof *total);
	} else {
		*total = UINT64_MAX;
		if (opcode == IBV_WR_SEND)
			wrong = receiver(fd, total, seed);
		if (*total == UINT64_MAX)
			read_all(fd, total, sizeof *total);
	}
	barrier(fd);
	if (!client && opcode == IBV_WR_RDMA_WRITE)
		wrong = check_written(*total, seed);
	return wrong;
}

// The same over a TCP connection: a message per operation, in windows as deep as the verbs' queue. A window begins with the
// number of its messages, in the first message's packet; 0 is the end.
static uint64_t tcp_round(int fd, int client, const char *op, uint64_t *total, uint64_t seed) {
	uint64_t wrong = 0, done = 0;
	int read_op = !strcmp(op, "read");
	barrier(fd);
	for (;;) {
		uint16_t window = 0;
		if (client) {
			if (step ? goes_on(op, done) : done < count)
				window = (uint16_t)(step || count - done > (uint64_t)depth ? (uint64_t)depth : count - done);
			if (send(fd, &window, sizeof window, window ? MSG_MORE : 0) != sizeof window)
				die("Can't begin a window of %u messages", window);
		} else {
			read_all(fd, &window, sizeof window);
		}
		if (!window)
			break;
		char request[16] = { 0 };
		for (uint64_t i = 0; i < window; i++) {
			if (client && read_op) {
				write_all(fd, request, sizeof request);
			} else if (client) {
				pattern_fill(memory, size, seed + done + i);
				write_all(fd, memory, size);
			} else if (read_op) {
				read_all(fd, request, sizeof request);
				pattern_fill(memory, size, seed + done + i);
				write_all(fd, memory, size);
			} else {
				read_all(fd, memory, size);
				wrong += !pattern_holds(memory, size, seed + done + i);
			}
		}
		if (client && read_op)
			for (uint64_t i = 0; i < window; i++) {
				read_all(fd, memory, size);
				wrong += !pattern_holds(memory, size, seed + done + i);
			}
		done += window;
		if (!read_op) {
			char acknowledged = 'a';
			if (client)
				read_all(fd, &acknowledged, 1);
			else
				write_all(fd, &acknowledged, 1);
		}
	}
	*total = done;
	barrier(fd);
	return wrong;
}

static void connect_verbs(int fd) {
	device = device_open(device_name, gid_index);
	if (use_events && !(channel = ibv_create_comp_channel(device.context)))
		die("Can't create a completion channel");
	cq = ibv_create_cq(device.context, 2 * RING, NULL, channel, 0);
	if (!cq)
		die("Can't create a completion queue of %d", 2 * RING);
	struct ibv_qp_init_attr attributes = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = (uint32_t)depth, .max_recv_wr = RING, .max_send_sge = 1, .max_recv_sge = 1 } };
	qp = ibv_create_qp(device.pd, &attributes);
	if (!qp)
		die("Can't create a queue pair");
	mr = ibv_reg_mr(device.pd, memory, RING * slot,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	if (!mr)
		die("Can't register %zu bytes", RING * slot);
	struct hello mine = { .qpn = qp->qp_num, .rkey = mr->rkey, .address = (uintptr_t)memory, .gid = device.gid };
	peer = exchange(fd, mine);
	rc_connect(&device, qp, peer);
	barrier(fd);
}

static void options(int argc, char **argv) {
	static const struct option known[] = { { "tcp", 0, 0, 't' }, { "events", 0, 0, 'e' }, { "step", 0, 0, 'w' },
		{ "device", 1, 0, 'd' }, { "gid", 1, 0, 'g' }, { "count", 1, 0, 'n' }, { "size", 1, 0, 's' }, { "depth", 1, 0, 'q' },
		{ "ops", 1, 0, 'o' }, { "port", 1, 0, 'p' }, { 0, 0, 0, 0 } };
	for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;)
		switch (c) {
		case 't': tcp = 1; break;
		case 'e': use_events = 1; break;
		case 'w': step = 1; break;
		case 'd': device_name = optarg; break;
		case 'g': gid_index = atoi(optarg); break;
		case 'n': count = strtoull(optarg, NULL, 0); break;
		case 's': size = strtoull(optarg, NULL, 0); break;
		case 'q': depth = atoi(optarg); break;
		case 'o': snprintf(ops, sizeof ops, "%s", optarg); break;
		case 'p': port = optarg; break;
		default: exit(2);
		}
	errno = EINVAL;
	if (depth < 1 || depth > RING || size < 1 || size > 1 << 20 || count < 1)
		die("depth must be 1 to %d, size 1 to 1048576, count at least 1", RING);
}

int main(int argc, char **argv) {
	options(argc, argv);
	setvbuf(stdin, NULL, _IONBF, 0); // A line that was read ahead couldn't be waited for.
	const char *server = argv[optind];
	int fd = control(server, port);
	slot = (size + 63) / 64 * 64;
	memory = pages(RING * slot);
	if (!tcp)
		connect_verbs(fd);
	uint64_t seed = 1, all_wrong = 0;
	for (char *save, *op = strtok_r(ops, ",", &save); op; op = strtok_r(NULL, ",", &save)) {
		errno = EINVAL;
		if (strcmp(op, "send") && strcmp(op, "write") && strcmp(op, "read"))
			die("There is no operation %s", op);
		events = empty_polls = mark_at = 0;
		if (server && step) {
			char line[16];
			printf("READY %s\n", op);
			fflush(stdout);
			if (!fgets(line, sizeof line, stdin))
				return 1;
		}
		barrier(fd);
		double start = seconds();
		uint64_t total;
		uint64_t wrong = (tcp ? tcp_round : verbs_round)(fd, server != NULL, op, &total, seed << 40);
		printf("LOOP op=%s transport=%s count=%llu size=%zu seconds=%.3f events=%llu empty_polls=%llu mismatches=%llu\n", op,
		       tcp ? "tcp" : "verbs", (unsigned long long)total, size, seconds() - start, (unsigned long long)events,
		       (unsigned long long)empty_polls, (unsigned long long)wrong);
		fflush(stdout);
		all_wrong += wrong;
		seed++;
	}
	barrier(fd);
	return all_wrong ? 3 : 0;
}
