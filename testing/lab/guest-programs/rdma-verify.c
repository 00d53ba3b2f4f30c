// Every kind of operation at many sizes, every byte verified on both sides, with guards around what may be written.
//
//   server: rdma-verify [options]          client: rdma-verify [options] SERVER
//
// Prints `VERIFY op=… sizes=… bytes=… mismatches=…` per kind of operation on the side that checks.
#include "rdma-common.h"
#include <getopt.h>

#define LARGEST (8u << 20)
#define GUARD 4096u
#define ATOMICS 200

static const uint32_t sizes[] = { 1, 2, 3, 7, 8, 63, 64, 255, 256, 1023, 1024, 1500, 4095, 4096, 4097, 8192, 65535, 65536,
	(1 << 20) - 1, 1 << 20, LARGEST };
enum op { SEND, SEND_IMM, WRITE, WRITE_IMM, READ, OPS };
static const char *const names[] = { "send", "send_imm", "write", "write_imm", "read" };
static const enum ibv_wr_opcode opcodes[] = { IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
	IBV_WR_RDMA_READ };

static const char *device_name, *port = "18601";
static int gid_index = -1, use_events, skip_atomics, skip_ud, client;
static uint32_t largest = LARGEST;
static struct device device;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static char *memory;
static struct hello peer;
static int fd;
static uint64_t total_wrong;

static struct ibv_wc completion(void) {
	struct ibv_wc wc;
	double start = seconds();
	for (;;) {
		int n = ibv_poll_cq(cq, 1, &wc);
		if (n < 0)
			die("Can't poll");
		if (n)
			break;
		if (use_events) {
			struct ibv_cq *which;
			void *context;
			if (ibv_req_notify_cq(cq, 0))
				die("Can't arm the completion queue");
			n = ibv_poll_cq(cq, 1, &wc);
			if (n)
				break;
			if (ibv_get_cq_event(channel, &which, &context))
				die("Can't wait for a completion event");
			ibv_ack_cq_events(which, 1);
		} else if (seconds() - start > 120) {
			errno = ETIMEDOUT;
			die("No completion");
		}
	}
	if (wc.status) {
		errno = 0;
		die("A work request completed with %s (vendor error 0x%x)", ibv_wc_status_str(wc.status), wc.vendor_err);
	}
	return wc;
}

// Cuts a buffer into up to three pieces: scatter and gather lists whose borders lie anywhere.
static int pieces(struct ibv_sge *sge, char *at, uint32_t size, int wanted) {
	int n = 0;
	uint32_t used = 0;
	for (int i = 0; i < wanted && used < size; i++) {
		uint32_t part = i + 1 == wanted ? size - used : size / 3 + (uint32_t)i;
		if (part == 0 || part > size - used)
			part = size - used;
		sge[n++] = (struct ibv_sge){ .addr = (uintptr_t)at + used, .length = part, .lkey = mr->lkey };
		used += part;
	}
	return n;
}

static void receive(char *at, uint32_t size, int wanted) {
	struct ibv_sge sge[3];
	struct ibv_recv_wr wr = { .sg_list = sge, .num_sge = pieces(sge, at, size, wanted) }, *bad;
	if (ibv_post_recv(qp, &wr, &bad))
		die("Can't post a receive of %u bytes", size);
}

// Whether nothing beside the `size` bytes was touched.
static int guards_hold(const char *at, uint32_t size) {
	for (uint32_t i = 0; i < GUARD; i++)
		if (at[(long)i - (long)GUARD] != 0x5a || at[size + i] != 0x5a)
			return 0;
	return 1;
}

static void rc_rounds(enum op op, int sges) {
	uint64_t wrong = 0, bytes = 0;
	unsigned done = 0;
	int checks = (op == READ) == client;
	for (unsigned s = 0; s < sizeof sizes / sizeof *sizes && sizes[s] <= largest; s++) {
		uint32_t size = sizes[s];
		// Unaligned on purpose.
		char *at = memory + GUARD + s;
		uint64_t seed = (uint64_t)op << 32 | s << 8 | (unsigned)sges;
		memset(at - GUARD, 0x5a, size + 2 * GUARD);
		if (!checks)
			pattern_fill(at, size, seed);
		if (checks && (op == SEND || op == SEND_IMM))
			receive(at, size, sges);
		if (checks && op == WRITE_IMM)
			receive(memory, 0, 0);
		barrier(fd);
		if (client) {
			struct ibv_sge sge[3];
			struct ibv_send_wr wr = { .sg_list = sge, .num_sge = pieces(sge, at, size, sges), .opcode = opcodes[op],
				.send_flags = IBV_SEND_SIGNALED, .imm_data = htonl(0xabcd0000 + s) }, *bad;
			wr.wr.rdma.remote_addr = peer.address + GUARD + s;
			wr.wr.rdma.rkey = peer.rkey;
			if (ibv_post_send(qp, &wr, &bad))
				die("Can't post %s of %u bytes", names[op], size);
			completion();
		} else if (op == SEND || op == SEND_IMM || op == WRITE_IMM) {
			struct ibv_wc wc = completion();
			if (wc.byte_len != size || (op != SEND && (!(wc.wc_flags & IBV_WC_WITH_IMM) || ntohl(wc.imm_data) != 0xabcd0000 + s)))
				wrong++;
		}
		barrier(fd);
		if (checks && (!pattern_holds(at, size, seed) || !guards_hold(at, size))) {
			printf("WRONG op=%s size=%u sges=%d\n", names[op], size, sges);
			wrong++;
		}
		bytes += size;
		done++;
	}
	if (checks)
		printf("VERIFY op=%s sges=%d sizes=%u bytes=%llu mismatches=%llu\n", names[op], sges, done, (unsigned long long)bytes,
		       (unsigned long long)wrong);
	total_wrong += wrong;
}

// One counter on the server: what each atomic operation found is known beforehand.
static void atomics(void) {
	uint64_t *word = (uint64_t *)memory, wrong = 0;
	*word = client ? 0 : 5;
	barrier(fd);
	for (uint64_t i = 0; client && i < ATOMICS; i++) {
		int add = i & 1;
		struct ibv_sge sge = { .addr = (uintptr_t)word, .length = 8, .lkey = mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
			.opcode = add ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP }, *bad;
		wr.wr.atomic.remote_addr = peer.address;
		wr.wr.atomic.rkey = peer.rkey;
		// Every tenth comparison fails, and must leave the counter alone.
		int fails = !add && i % 20 == 0;
		uint64_t expected = 5 + i - (i + 19) / 20;
		wr.wr.atomic.compare_add = add ? 1 : expected + (uint64_t)fails;
		wr.wr.atomic.swap = expected + 1;
		if (ibv_post_send(qp, &wr, &bad))
			die("Can't post an atomic operation");
		completion();
		wrong += *word != expected;
	}
	barrier(fd);
	if (!client)
		wrong += *(volatile uint64_t *)word != 5 + ATOMICS - ATOMICS / 20;
	printf("VERIFY op=atomics sges=1 sizes=1 bytes=%u mismatches=%llu\n", ATOMICS * 8, (unsigned long long)wrong);
	total_wrong += wrong;
}

// Datagrams: up to the MTU, behind the 40 bytes of the header that the receiver gets.
static void datagrams(void) {
	struct ibv_qp_init_attr attributes = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 } };
	qp = ibv_create_qp(device.pd, &attributes);
	if (!qp)
		die("Can't create an unreliable datagram queue pair");
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x1357, .sq_psn = PSN };
	if (ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY))
		die("Can't take the datagram queue pair to INIT");
	a.qp_state = IBV_QPS_RTR;
	if (ibv_modify_qp(qp, &a, IBV_QP_STATE))
		die("Can't take the datagram queue pair to RTR");
	a.qp_state = IBV_QPS_RTS;
	if (ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN))
		die("Can't take the datagram queue pair to RTS");
	struct hello mine = { .qpn = qp->qp_num, .gid = device.gid };
	struct hello to = exchange(fd, mine);
	struct ibv_ah_attr address = { .is_global = 1, .port_num = 1,
		.grh = { .dgid = to.gid, .sgid_index = (uint8_t)device.gid_index, .hop_limit = 64 } };
	struct ibv_ah *ah = ibv_create_ah(device.pd, &address);
	if (!ah)
		die("Can't create an address handle");
	uint32_t mtu = 128u << device.port.active_mtu;
	uint64_t wrong = 0, bytes = 0;
	unsigned done = 0;
	for (unsigned s = 0; s < sizeof sizes / sizeof *sizes && sizes[s] <= mtu; s++, done++) {
		uint32_t size = sizes[s];
		memset(memory, 0x5a, 2 * GUARD + size + 40);
		if (client)
			pattern_fill(memory, size, 77 + s);
		else
			receive(memory + GUARD, size + 40, 1);
		barrier(fd);
		if (client) {
			struct ibv_sge sge = { .addr = (uintptr_t)memory, .length = size, .lkey = mr->lkey };
			struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED, .opcode = IBV_WR_SEND }, *bad;
			wr.wr.ud.ah = ah;
			wr.wr.ud.remote_qpn = to.qpn;
			wr.wr.ud.remote_qkey = 0x1357;
			if (ibv_post_send(qp, &wr, &bad))
				die("Can't post a datagram of %u bytes", size);
			completion();
		} else {
			struct ibv_wc wc = completion();
			if (wc.byte_len != size + 40 || wc.src_qp != to.qpn || !(wc.wc_flags & IBV_WC_GRH) ||
			    !pattern_holds(memory + GUARD + 40, size, 77 + s) || !guards_hold(memory + GUARD, size + 40)) {
				printf("WRONG op=ud size=%u byte_len=%u src_qp=%u flags=0x%x\n", size, wc.byte_len, wc.src_qp, (unsigned)wc.wc_flags);
				wrong++;
			}
		}
		bytes += size;
		barrier(fd);
	}
	if (!client)
		printf("VERIFY op=ud sges=1 sizes=%u bytes=%llu mismatches=%llu\n", done, (unsigned long long)bytes, (unsigned long long)wrong);
	total_wrong += wrong;
	ibv_destroy_ah(ah);
	ibv_destroy_qp(qp);
}

int main(int argc, char **argv) {
	static const struct option known[] = { { "device", 1, 0, 'd' }, { "gid", 1, 0, 'g' }, { "events", 0, 0, 'e' },
		{ "largest", 1, 0, 'l' }, { "port", 1, 0, 'p' }, { "no-atomics", 0, 0, 'a' }, { "no-ud", 0, 0, 'u' }, { 0, 0, 0, 0 } };
	for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;)
		switch (c) {
		case 'd': device_name = optarg; break;
		case 'g': gid_index = atoi(optarg); break;
		case 'e': use_events = 1; break;
		case 'l': largest = (uint32_t)strtoul(optarg, NULL, 0); break;
		case 'p': port = optarg; break;
		case 'a': skip_atomics = 1; break;
		case 'u': skip_ud = 1; break;
		default: return 2;
		}
	client = argv[optind] != NULL;
	fd = control(argv[optind], port);
	device = device_open(device_name, gid_index);
	size_t bytes = LARGEST + 4 * GUARD;
	memory = pages(bytes);
	if (use_events && !(channel = ibv_create_comp_channel(device.context)))
		die("Can't create a completion channel");
	cq = ibv_create_cq(device.context, 64, NULL, channel, 0);
	if (!cq)
		die("Can't create a completion queue");
	struct ibv_qp_init_attr attributes = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 3, .max_recv_sge = 3 } };
	qp = ibv_create_qp(device.pd, &attributes);
	if (!qp)
		die("Can't create a queue pair with 3 scatter-gather entries");
	mr = ibv_reg_mr(device.pd, memory, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			(skip_atomics ? 0 : IBV_ACCESS_REMOTE_ATOMIC));
	if (!mr)
		die("Can't register %zu bytes", bytes);
	struct hello mine = { .qpn = qp->qp_num, .rkey = mr->rkey, .address = (uintptr_t)memory, .gid = device.gid };
	peer = exchange(fd, mine);
	rc_connect(&device, qp, peer);
	for (int op = 0; op < OPS; op++)
		for (int sges = 1; sges <= 3; sges += 2)
			rc_rounds((enum op)op, sges);
	if (!skip_atomics)
		atomics();
	barrier(fd);
	ibv_destroy_qp(qp);
	if (!skip_ud)
		datagrams();
	barrier(fd);
	printf("VERIFIED mismatches=%llu\n", (unsigned long long)total_wrong);
	return total_wrong ? 3 : 0;
}
