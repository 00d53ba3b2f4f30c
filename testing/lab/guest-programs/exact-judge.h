// What numbers, contents and counters say of operations that are to be carried out exactly once and in order. No verbs here: a test plants what may go wrong
// (exact-judge-test.c).
#ifndef EXACT_JUDGE_H
#define EXACT_JUDGE_H

#include <stdint.h>
#include <string.h>

// What was found. One fault may be counted at several places that show it.
struct tally {
	uint64_t lost, repeated, reordered, corrupt;
};

// Numbers that are to come as 0, 1, 2 and so on. Those that were passed over are remembered: they may come later.
#define MISSING 1024
struct sequence {
	uint64_t next;
	unsigned missing;
	uint64_t numbers[MISSING];
};

static void sequence_take(struct sequence *s, struct tally *t, uint64_t number) {
	if (number >= s->next) {
		t->lost += number - s->next;
		for (uint64_t n = s->next; n < number && s->missing < MISSING; n++)
			s->numbers[s->missing++] = n;
		s->next = number + 1;
		return;
	}
	for (unsigned i = 0; i < s->missing; i++)
		if (s->numbers[i] == number) {
			s->numbers[i] = s->numbers[--s->missing];
			t->lost--;
			t->reordered++;
			return;
		}
	t->repeated++;
}

// There were to be so many.
static void sequence_end(struct sequence *s, struct tally *t, uint64_t total) {
	if (s->next < total)
		t->lost += total - s->next;
	else
		t->repeated += s->next - total;
	s->next = total;
}

// A word that each atomic operation adds one to: what it found says how many were carried out before. Goes on from what was found.
static void counter_take(uint64_t *expected, struct tally *t, uint64_t found) {
	if (found < *expected)
		t->lost += *expected - found;
	else
		t->repeated += found - *expected;
	*expected = found;
}

// Contents: a number, whose they are, and words that follow from both.
struct content {
	uint64_t number, owner;
};
#define POISON 0x5au

static uint64_t content_word(uint64_t owner, uint64_t number, uint64_t index) {
	uint64_t z = owner * 0x9e3779b97f4a7c15ull + number * 0xd1342543de82ef95ull + index * 0xbf58476d1ce4e5b9ull + 1;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

// `size` is a multiple of 8, at least 16.
static void content_fill(void *to, uint32_t size, uint64_t owner, uint64_t number) {
	uint64_t words[2] = { number, owner };
	memcpy(to, words, sizeof words);
	for (uint32_t at = sizeof words; at < size; at += 8) {
		uint64_t word = content_word(owner, number, at / 8);
		memcpy((char *)to + at, &word, 8);
	}
}

static int content_holds(const void *from, uint32_t size, uint64_t owner, uint64_t number) {
	uint64_t words[2] = { number, owner };
	if (memcmp(from, words, sizeof words))
		return 0;
	for (uint32_t at = sizeof words; at < size; at += 8) {
		uint64_t word = content_word(owner, number, at / 8);
		if (memcmp((const char *)from + at, &word, 8))
			return 0;
	}
	return 1;
}

static void poison(void *to, uint32_t size) {
	memset(to, POISON, size);
}

static int poisoned(const void *from, uint32_t size) {
	const unsigned char *bytes = from;
	return bytes[0] == POISON && !memcmp(bytes, bytes + 1, size - 1);
}

// Room for contents.
#define SLOT 2560u

// How many bytes the contents of a number have: most are of one packet, some of several. The same on both sides.
static uint32_t content_size(uint64_t number) {
	return number % 32 == 7 ? 2520 : number % 32 == 19 ? 1504 : 64;
}

// What was to be here when something behind it had come: a WRITE announced by a SEND, what a READ brought. Nothing came: lost. What an earlier or later
// operation left: not in order.
static void content_take(struct tally *t, const void *from, uint64_t owner, uint64_t number) {
	uint64_t found;
	memcpy(&found, from, 8);
	if (content_holds(from, content_size(number), owner, number))
		return;
	if (poisoned(from, content_size(number)))
		t->lost++;
	else if (content_holds(from, content_size(found), owner, found))
		t->reordered++;
	else
		t->corrupt++;
}

// Nothing was to come here since it was taken.
static void untouched(struct tally *t, const void *from, uint64_t owner, uint64_t number) {
	if (poisoned(from, SLOT))
		return;
	if (content_holds(from, content_size(number), owner, number))
		t->repeated++;
	else
		t->corrupt++;
}

#endif
