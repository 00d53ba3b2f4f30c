// Operations that are to be carried out exactly once and in order, in both directions of several connections, until there were --count rounds of each.
// With --while FILE at the client, legs of --count rounds follow one another until that file is gone; both sides agree on each leg over TCP.
//
//   server: rdma-exact [options]           client: rdma-exact [options] SERVER
//
// A round is six operations, posted as one list: a WRITE into the peer's next mailbox, the SEND that announces it, a WRITE and the READ that gets it back, a
// fetch-and-add and a compare-and-swap of one word (each 16th is to fail). What is wrong is judged from the data (exact-judge.h):
//   - completions come in the order of posting, SENDs with the next number and its contents;
//   - a mailbox holds its contents when it is announced. It is poisoned then, and still is when it is given back: a WRITE that is carried out again is seen;
//   - atomics find how many there were before, those that fail included, and the word is what it must be in the end;
//   - the word by which mailboxes are given back never goes back.
// Prints `DONE rounds=…` now and then and `EXACT operations=… lost=… repeated=… reordered=… corrupt=…` at its end; an error ends it with status 1.
#include "exact-judge.h"
#include "rdma-common.h"
#include <getopt.h>

#define RING 32u  // Rounds under way each way.
#define BATCH 8u  // Rounds of one doorbell.
#define LAG 8u    // Mailboxes that are taken and not yet given back.
#define EACH 6u
#define CONNECTIONS 16u
#define CREDIT (1ull << 63)
#define RECEIVE (1ull << 62)

// What the peer writes, reads and changes, and what only this side does: registered as one.
struct shared {
	char mail[RING][SLOT], scratch[RING][SLOT];
	char out_mail[RING][SLOT], out_scratch[RING][SLOT], back[RING][SLOT], out[RING][SLOT], in[RING][SLOT];
	uint64_t found[RING][2];
	uint64_t counter, released_by_peer, released;
};

struct connection {
	struct ibv_qp *qp;
	struct shared *at;
	struct hello peer;
	uint64_t mine, theirs; // Owners of contents.
	uint64_t posted, completed, consumed, released, told, credited, credits_posted, credits_done;
	uint64_t value; // Of the peer's word, as this side's operations leave it.
	struct sequence completions, sends, receives;
};

static const char *device_name, *port = "18602", *while_file;
static int gid_index = -1;
static unsigned connections = 4;
static uint64_t rounds = 1000;
static struct device device;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct shared *memory;
static struct connection all[CONNECTIONS];
static struct tally tally;

static uint64_t least(uint64_t a, uint64_t b) {
	return a < b ? a : b;
}

static void receive(struct connection *c, uint64_t first, unsigned many) {
	struct ibv_sge sge[RING];
	struct ibv_recv_wr wr[RING], *bad;
	for (unsigned i = 0; i < many; i++) {
		char *at = c->at->in[(first + i) % RING];
		poison(at, SLOT);
		sge[i] = (struct ibv_sge){ .addr = (uintptr_t)at, .length = SLOT, .lkey = mr->lkey };
		wr[i] = (struct ibv_recv_wr){ .wr_id = RECEIVE | (first + i), .sg_list = &sge[i], .num_sge = 1, .next = i + 1 < many ? &wr[i + 1] : NULL };
	}
	if (ibv_post_recv(c->qp, wr, &bad))
		die("Can't post receives");
}

static uint64_t there(struct connection *c, const void *here) {
	return c->peer.address + (uint64_t)((const char *)here - (const char *)c->at);
}

// Whether the compare-and-swap of a round is to fail.
static int fails(uint64_t round) {
	return round % 16 == 9;
}

// What the word is when so many rounds are over.
static uint64_t word_after(uint64_t all_rounds) {
	return 2 * all_rounds - (all_rounds / 16 + (all_rounds % 16 > 9));
}

static void post_rounds(struct connection *c, unsigned many) {
	static struct ibv_sge sge[BATCH * EACH];
	static struct ibv_send_wr wr[BATCH * EACH];
	struct ibv_send_wr *bad;
	unsigned n = 0;
	for (unsigned i = 0; i < many; i++, c->posted++) {
		struct shared *at = c->at;
		uint64_t round = c->posted, slot = round % RING;
		uint32_t size = content_size(round);
		content_fill(at->out_mail[slot], size, c->mine, round);
		content_fill(at->out[slot], size, c->mine + 1, round);
		content_fill(at->out_scratch[slot], size, c->mine + 2, round);
		poison(at->back[slot], SLOT);
		at->found[slot][0] = at->found[slot][1] = ~0ull;
		uint64_t before = word_after(round);
		const struct {
			enum ibv_wr_opcode opcode;
			void *local, *remote;
			uint32_t size;
			uint64_t compare_add, swap;
		} list[EACH] = {
			{ IBV_WR_RDMA_WRITE, at->out_mail[slot], at->mail[slot], size, 0, 0 },
			{ IBV_WR_SEND, at->out[slot], NULL, size, 0, 0 },
			{ IBV_WR_RDMA_WRITE, at->out_scratch[slot], at->scratch[slot], size, 0, 0 },
			{ IBV_WR_RDMA_READ, at->back[slot], at->scratch[slot], size, 0, 0 },
			{ IBV_WR_ATOMIC_FETCH_AND_ADD, &at->found[slot][0], &at->counter, 8, 1, 0 },
			{ IBV_WR_ATOMIC_CMP_AND_SWP, &at->found[slot][1], &at->counter, 8, before + 1 + (uint64_t)fails(round), before + 2 },
		};
		for (unsigned k = 0; k < EACH; k++, n++) {
			sge[n] = (struct ibv_sge){ .addr = (uintptr_t)list[k].local, .length = list[k].size, .lkey = mr->lkey };
			wr[n] = (struct ibv_send_wr){ .wr_id = round * EACH + k, .sg_list = &sge[n], .num_sge = 1, .opcode = list[k].opcode,
				.send_flags = IBV_SEND_SIGNALED, .next = &wr[n + 1] };
			if (k >= 4) {
				wr[n].wr.atomic.remote_addr = there(c, list[k].remote);
				wr[n].wr.atomic.rkey = c->peer.rkey;
				wr[n].wr.atomic.compare_add = list[k].compare_add;
				wr[n].wr.atomic.swap = list[k].swap;
			} else if (list[k].remote) {
				wr[n].wr.rdma.remote_addr = there(c, list[k].remote);
				wr[n].wr.rdma.rkey = c->peer.rkey;
			}
		}
	}
	wr[n - 1].next = NULL;
	if (ibv_post_send(c->qp, wr, &bad))
		die("Can't post %u rounds", many);
}

// Mailboxes are the peer's again, up to the round `released`.
static void give_back(struct connection *c) {
	c->at->released = c->released;
	struct ibv_sge sge = { .addr = (uintptr_t)&c->at->released, .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = CREDIT | c->credits_posted, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED }, *bad;
	wr.wr.rdma.remote_addr = there(c, &c->at->released_by_peer);
	wr.wr.rdma.rkey = c->peer.rkey;
	if (ibv_post_send(c->qp, &wr, &bad))
		die("Can't give mailboxes back");
	c->credits_posted++;
	c->told = c->released;
}

static void sent(struct connection *c, uint64_t id) {
	if (id & CREDIT) {
		c->credits_done++;
		return;
	}
	sequence_take(&c->completions, &tally, id);
	uint64_t round = id / EACH, slot = round % RING;
	switch (id % EACH) {
	case 3:
		content_take(&tally, c->at->back[slot], c->mine + 2, round);
		break;
	case 4:
		counter_take(&c->value, &tally, c->at->found[slot][0]);
		c->value++;
		break;
	case 5:
		counter_take(&c->value, &tally, c->at->found[slot][1]);
		c->value += !fails(round);
		c->completed = round + 1;
		break;
	}
}

static void received(struct connection *c, uint64_t id, uint32_t size) {
	char *in = c->at->in[(id & ~RECEIVE) % RING];
	uint64_t number;
	sequence_take(&c->receives, &tally, id & ~RECEIVE);
	memcpy(&number, in, 8);
	if (size != content_size(number) || !content_holds(in, size, c->theirs + 1, number)) {
		tally.corrupt++;
	} else {
		sequence_take(&c->sends, &tally, number);
		char *mail = c->at->mail[number % RING];
		content_take(&tally, mail, c->theirs, number);
		poison(mail, SLOT);
	}
	c->consumed++;
}

// What follows from what was received: receives are posted anew, mailboxes looked at once more and given back.
static void follow(struct connection *c, uint64_t before) {
	for (uint64_t at = before; at < c->consumed;) {
		unsigned many = (unsigned)least(c->consumed - at, RING);
		receive(c, at + RING, many);
		at += many;
	}
	// At the end of a leg all is given back. The peer may be in the next leg already, and have sent more than this side's rounds.
	uint64_t until = c->consumed > LAG ? c->consumed - LAG : 0;
	if (c->consumed >= rounds && until < rounds)
		until = rounds;
	for (; c->released < until; c->released++)
		untouched(&tally, c->at->mail[c->released % RING], c->theirs, c->released);
	if (c->released - c->told >= BATCH || (c->released >= rounds && c->told < rounds))
		give_back(c);
}

static int over(const struct connection *c) {
	return c->completed == rounds && c->consumed >= rounds && c->told >= rounds && c->credits_done == c->credits_posted;
}

static unsigned step(void) {
	struct ibv_wc wc[128];
	unsigned did = 0;
	for (unsigned i = 0; i < connections; i++) {
		struct connection *c = &all[i];
		uint64_t credited = *(volatile uint64_t *)&c->at->released_by_peer;
		// It is written in order, and exactly once.
		if (credited < c->credited || credited > c->posted)
			tally.reordered++;
		else
			c->credited = credited;
		uint64_t room = least(c->credited, c->completed) + RING - c->posted, left = rounds - c->posted;
		if (left && room >= least(left, BATCH)) {
			post_rounds(c, (unsigned)least(left, BATCH));
			did++;
		}
	}
	int n = ibv_poll_cq(cq, 128, wc);
	if (n < 0)
		die("Can't poll");
	uint64_t before[CONNECTIONS];
	for (unsigned i = 0; i < connections; i++)
		before[i] = all[i].consumed;
	for (int k = 0; k < n; k++) {
		unsigned i = 0;
		while (i < connections && all[i].qp->qp_num != wc[k].qp_num)
			i++;
		errno = 0;
		if (i == connections)
			die("A completion names queue pair %u, which isn't one of ours", wc[k].qp_num);
		if (wc[k].status)
			die("Work request %llx of connection %u completed with %s (vendor error 0x%x), after %llu rounds", (unsigned long long)wc[k].wr_id, i,
			    ibv_wc_status_str(wc[k].status), wc[k].vendor_err, (unsigned long long)all[i].completed);
		if (wc[k].opcode & IBV_WC_RECV)
			received(&all[i], wc[k].wr_id, wc[k].byte_len);
		else
			sent(&all[i], wc[k].wr_id);
	}
	for (unsigned i = 0; i < connections; i++)
		if (all[i].consumed != before[i])
			follow(&all[i], before[i]);
	return did + (unsigned)n;
}

static void connect_all(int fd, int client) {
	for (unsigned i = 0; i < connections; i++) {
		struct connection *c = &all[i];
		struct ibv_qp_init_attr attributes = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = 512, .max_recv_wr = 2 * RING, .max_send_sge = 1, .max_recv_sge = 1 } };
		c->qp = ibv_create_qp(device.pd, &attributes);
		if (!c->qp)
			die("Can't create a queue pair");
		c->at = &memory[i];
		c->mine = 100 * i + (client ? 10 : 20);
		c->theirs = 100 * i + (client ? 20 : 10);
		for (unsigned k = 0; k < RING; k++)
			poison(c->at->mail[k], SLOT);
		struct hello mine = { .qpn = c->qp->qp_num, .rkey = mr->rkey, .address = (uintptr_t)c->at, .gid = device.gid };
		c->peer = exchange(fd, mine);
		rc_connect(&device, c->qp, c->peer);
		receive(c, 0, RING);
	}
}

// Returns whether another leg follows. The client decides.
static int another_leg(int fd, int client) {
	char word = while_file && !access(while_file, F_OK) ? 'm' : 'e';
	if (client)
		write_all(fd, &word, 1);
	else
		read_all(fd, &word, 1);
	if (word != 'm' && word != 'e')
		die("The peer is out of step: it sent 0x%02x", word);
	return word == 'm';
}

// Works until there were `rounds` of each connection, in both directions.
static void work(double start, double *said) {
	unsigned idle = 0;
	for (unsigned left = connections; left;) {
		idle = step() ? 0 : idle + 1;
		// An emulated host has one CPU: whoever polls takes it from the engine.
		if (idle > 3)
			usleep(500);
		left = 0;
		uint64_t least_done = rounds;
		for (unsigned i = 0; i < connections; i++) {
			left += !over(&all[i]);
			least_done = least(least_done, all[i].completed);
		}
		if (seconds() - *said > 5) {
			*said = seconds();
			printf("DONE rounds=%llu seconds=%.0f lost=%llu repeated=%llu reordered=%llu corrupt=%llu\n", (unsigned long long)least_done, *said - start,
			       (unsigned long long)tally.lost, (unsigned long long)tally.repeated, (unsigned long long)tally.reordered, (unsigned long long)tally.corrupt);
			fflush(stdout);
		}
	}
}

int main(int argc, char **argv) {
	static const struct option known[] = { { "device", 1, 0, 'd' }, { "gid", 1, 0, 'g' }, { "count", 1, 0, 'n' }, { "connections", 1, 0, 'c' },
		{ "port", 1, 0, 'p' }, { "while", 1, 0, 'w' }, { 0, 0, 0, 0 } };
	for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;)
		switch (c) {
		case 'd': device_name = optarg; break;
		case 'g': gid_index = atoi(optarg); break;
		case 'n': rounds = strtoull(optarg, NULL, 0); break;
		case 'c': connections = (unsigned)atoi(optarg); break;
		case 'p': port = optarg; break;
		case 'w': while_file = optarg; break;
		default: return 2;
		}
	errno = EINVAL;
	if (!connections || connections > CONNECTIONS || !rounds)
		die("There are 1 to %u connections, and at least one round", CONNECTIONS);
	int client = argv[optind] != NULL, fd = control(argv[optind], port);
	device = device_open(device_name, gid_index);
	struct ibv_device_attr can;
	if (ibv_query_device(device.context, &can))
		die("Can't ask what the device can do");
	rd_atomic = (uint8_t)least(16, least((uint64_t)can.max_qp_rd_atom, (uint64_t)can.max_qp_init_rd_atom));
	// An emulated host under load doesn't answer for seconds.
	ack_timeout = 19;
	memory = pages(connections * sizeof *memory);
	mr = ibv_reg_mr(device.pd, memory, connections * sizeof *memory,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
	cq = ibv_create_cq(device.context, (int)(connections * (RING * (EACH + 2) + 64)), NULL, NULL, 0);
	if (!mr || !cq)
		die("Can't register memory or create a completion queue");
	connect_all(fd, client);
	barrier(fd);
	double start = seconds(), said = start;
	uint64_t leg = rounds;
	work(start, &said);
	while (another_leg(fd, client)) {
		rounds += leg;
		work(start, &said);
	}
	barrier(fd);
	// What would still come now is one too many.
	usleep(300000);
	struct ibv_wc wc;
	tally.repeated += (uint64_t)ibv_poll_cq(cq, 1, &wc);
	for (unsigned i = 0; i < connections; i++) {
		struct connection *c = &all[i];
		sequence_end(&c->completions, &tally, rounds * EACH);
		sequence_end(&c->sends, &tally, rounds);
		sequence_end(&c->receives, &tally, rounds);
		uint64_t value = word_after(rounds);
		counter_take(&value, &tally, *(volatile uint64_t *)&c->at->counter);
		for (unsigned k = 0; k < RING; k++)
			untouched(&tally, c->at->mail[k], c->theirs, rounds - 1 - (rounds - 1 - k) % RING);
	}
	printf("EXACT operations=%llu lost=%llu repeated=%llu reordered=%llu corrupt=%llu seconds=%.0f\n", (unsigned long long)(connections * rounds * EACH),
	       (unsigned long long)tally.lost, (unsigned long long)tally.repeated, (unsigned long long)tally.reordered, (unsigned long long)tally.corrupt,
	       seconds() - start);
	barrier(fd);
	return tally.lost || tally.repeated || tally.reordered || tally.corrupt;
}
