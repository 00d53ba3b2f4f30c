// Plants a fault of each kind in front of the judge; ends with status 0 when each was found as what it is.
#include "exact-judge.h"
#include <stdio.h>

static int wrong;

static void expect(const char *what, struct tally t, uint64_t lost, uint64_t repeated, uint64_t reordered, uint64_t corrupt) {
	if (t.lost == lost && t.repeated == repeated && t.reordered == reordered && t.corrupt == corrupt)
		return;
	printf("%s: lost %llu, repeated %llu, reordered %llu, corrupt %llu\n", what, (unsigned long long)t.lost, (unsigned long long)t.repeated,
	       (unsigned long long)t.reordered, (unsigned long long)t.corrupt);
	wrong = 1;
}

static struct tally numbers(const uint64_t *list, unsigned length, uint64_t total) {
	struct tally t = { 0 };
	struct sequence s = { 0 };
	for (unsigned i = 0; i < length; i++)
		sequence_take(&s, &t, list[i]);
	sequence_end(&s, &t, total);
	return t;
}
#define NUMBERS(total, ...) numbers((const uint64_t[]){ __VA_ARGS__ }, sizeof((const uint64_t[]){ __VA_ARGS__ }) / 8, total)

static struct tally atomics(const uint64_t *found, unsigned length) {
	struct tally t = { 0 };
	uint64_t expected = 0;
	for (unsigned i = 0; i < length; i++) {
		counter_take(&expected, &t, found[i]);
		expected++;
	}
	return t;
}
#define ATOMICS(...) atomics((const uint64_t[]){ __VA_ARGS__ }, sizeof((const uint64_t[]){ __VA_ARGS__ }) / 8)

static struct tally content(const char *slot, uint64_t number) {
	struct tally t = { 0 };
	content_take(&t, slot, 5, number);
	return t;
}

static struct tally later(const char *slot, uint64_t number) {
	struct tally t = { 0 };
	untouched(&t, slot, 5, number);
	return t;
}

int main(void) {
	static char slot[SLOT];
	expect("in order", NUMBERS(4, 0, 1, 2, 3), 0, 0, 0, 0);
	expect("one is lost", NUMBERS(4, 0, 1, 3), 1, 0, 0, 0);
	expect("the last ones are lost", NUMBERS(4, 0, 1), 2, 0, 0, 0);
	expect("one comes twice", NUMBERS(4, 0, 1, 1, 2, 3), 0, 1, 0, 0);
	expect("one of long ago comes again", NUMBERS(4, 0, 1, 2, 3, 0), 0, 1, 0, 0);
	expect("two change places", NUMBERS(4, 0, 2, 1, 3), 0, 0, 1, 0);
	expect("a late one comes twice", NUMBERS(4, 0, 2, 1, 1, 3), 0, 1, 1, 0);
	expect("more than there were", NUMBERS(3, 0, 1, 2, 3), 0, 1, 0, 0);
	expect("atomics in order", ATOMICS(0, 1, 2, 3), 0, 0, 0, 0);
	expect("an addition that was acknowledged isn't there", ATOMICS(0, 1, 1, 2), 1, 0, 0, 0);
	expect("an addition was carried out twice", ATOMICS(0, 1, 3, 4), 0, 1, 0, 0);
	for (uint64_t number = 32; number < 64; number++) {
		poison(slot, sizeof slot);
		expect("nothing came", content(slot, number), 1, 0, 0, 0);
		expect("nothing came again", later(slot, number), 0, 0, 0, 0);
		content_fill(slot, content_size(number), 5, number);
		expect("it is there", content(slot, number), 0, 0, 0, 0);
		expect("it came again", later(slot, number), 0, 1, 0, 0);
		slot[content_size(number) - 1] ^= 1;
		expect("the last byte is another", content(slot, number), 0, 0, 0, 1);
		expect("something came again", later(slot, number), 0, 0, 0, 1);
		content_fill(slot, content_size(number), 6, number);
		expect("it belongs to another", content(slot, number), 0, 0, 0, 1);
		content_fill(slot, content_size(number - 32), 5, number - 32);
		expect("what was there before", content(slot, number), 0, 0, 1, 0);
	}
	return wrong;
}
