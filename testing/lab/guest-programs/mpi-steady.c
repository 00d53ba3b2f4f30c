// MPI between guests, for as long as it is wanted: rounds of an all-to-all, a ring of messages and a sum, of changing sizes, every byte verified. Rank 0 prints
// how many rounds it has seen, and ends all once the file that it was told of is there.
//
//   mpi-steady FILE [LARGEST]
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static unsigned char at(uint64_t from, uint64_t to, uint64_t round, uint64_t i) {
	uint64_t z = (from * 31 + to * 17 + round * 101 + i + 1) * 0x9e3779b97f4a7c15ull;
	return (unsigned char)(z >> 56 ^ z >> 24);
}

int main(int argc, char **argv) {
	int rank, ranks, go_on = 1;
	long wrong = 0, all = 0;
	unsigned long long rounds = 0, bytes = 0, total = 0;
	if (argc < 2)
		return 2;
	size_t largest = argc > 2 ? strtoull(argv[2], NULL, 0) : 64 << 10;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	size_t places = (size_t)ranks;
	unsigned char *out = malloc(largest * places), *in = malloc(largest * places);
	if (!out || !in || ranks < 2 || largest < 1)
		MPI_Abort(MPI_COMM_WORLD, 2);
	for (size_t size = 1; go_on; size = size * 3 > largest ? 1 : size * 3, rounds++) {
		for (size_t p = 0; p < places; p++)
			for (size_t i = 0; i < size; i++)
				out[p * size + i] = at((uint64_t)rank, p, rounds, i);
		memset(in, 0, size * places);
		MPI_Alltoall(out, (int)size, MPI_BYTE, in, (int)size, MPI_BYTE, MPI_COMM_WORLD);
		for (size_t p = 0; p < places; p++)
			for (size_t i = 0; i < size; i++)
				wrong += in[p * size + i] != at(p, (uint64_t)rank, rounds, i);
		int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
		MPI_Sendrecv(out + (size_t)next * size, (int)size, MPI_BYTE, next, 1, in, (int)size, MPI_BYTE, before, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		for (size_t i = 0; i < size; i++)
			wrong += in[i] != at((uint64_t)before, (uint64_t)rank, rounds, i);
		long long mine = (long long)rounds + rank, sum = 0;
		MPI_Allreduce(&mine, &sum, 1, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
		wrong += sum != (long long)rounds * ranks + (long long)ranks * (ranks - 1) / 2;
		bytes += size * (places + 1);
		if (rank == 0) {
			go_on = access(argv[1], F_OK) != 0;
			if (rounds % 50 == 0) {
				printf("ROUNDS %llu\n", rounds);
				fflush(stdout);
			}
		}
		MPI_Bcast(&go_on, 1, MPI_INT, 0, MPI_COMM_WORLD);
	}
	MPI_Reduce(&wrong, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
	MPI_Reduce(&bytes, &total, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
	if (rank == 0)
		printf("STEADY ranks=%d rounds=%llu bytes=%llu mismatches=%ld\n", ranks, rounds, total, all);
	MPI_Finalize();
	return rank == 0 && all != 0;
}
