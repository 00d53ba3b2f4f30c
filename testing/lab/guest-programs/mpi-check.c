// MPI between the guests: a ping-pong and an all-to-all over many sizes, every byte verified.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned char at(uint64_t from, uint64_t to, uint64_t round, uint64_t i) {
	uint64_t z = (from * 31 + to * 17 + round * 101 + i + 1) * 0x9e3779b97f4a7c15ull;
	return (unsigned char)(z >> 56 ^ z >> 24);
}

int main(int argc, char **argv) {
	int rank, ranks;
	long wrong = 0, all = 0;
	uint64_t bytes = 0;
	size_t largest = argc > 1 ? strtoull(argv[1], NULL, 0) : 8 << 20;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	unsigned char *out = malloc(largest * (size_t)ranks), *in = malloc(largest * (size_t)ranks);
	if (!out || !in || ranks < 2)
		MPI_Abort(MPI_COMM_WORLD, 2);

	for (size_t size = 1; size <= largest && rank < 2; size = size < 4 ? size + 1 : size * 4) {
		for (int round = 0; round < 4; round++) {
			int peer = 1 - rank;
			for (size_t i = 0; i < size; i++)
				out[i] = at((uint64_t)rank, (uint64_t)peer, (uint64_t)round, i);
			memset(in, 0, size);
			if (rank == 0)
				MPI_Send(out, (int)size, MPI_BYTE, peer, round, MPI_COMM_WORLD);
			MPI_Recv(in, (int)size, MPI_BYTE, peer, round, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			if (rank == 1)
				MPI_Send(out, (int)size, MPI_BYTE, peer, round, MPI_COMM_WORLD);
			for (size_t i = 0; i < size; i++)
				wrong += in[i] != at((uint64_t)peer, (uint64_t)rank, (uint64_t)round, i);
			bytes += size;
		}
	}
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0)
		printf("MPI ping-pong up to %zu bytes: %llu bytes received\n", largest, (unsigned long long)bytes);

	size_t most = largest / 8 ? largest / 8 : 1;
	for (size_t size = 1; size <= most; size = size < 4 ? size + 1 : size * 8) {
		for (size_t p = 0; p < (size_t)ranks; p++)
			for (size_t i = 0; i < size; i++)
				out[p * size + i] = at((uint64_t)rank, p, 7, i);
		memset(in, 0, size * (size_t)ranks);
		MPI_Alltoall(out, (int)size, MPI_BYTE, in, (int)size, MPI_BYTE, MPI_COMM_WORLD);
		for (size_t p = 0; p < (size_t)ranks; p++)
			for (size_t i = 0; i < size; i++)
				wrong += in[p * size + i] != at(p, (uint64_t)rank, 7, i);
		bytes += size * (size_t)ranks;
	}
	MPI_Reduce(&wrong, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
	if (rank == 0)
		printf("MPI ranks=%d bytes=%llu mismatches=%ld\n", ranks, (unsigned long long)bytes, all);
	MPI_Finalize();
	return rank == 0 && all != 0;
}
