/* Mutation fuzzer of the decoders. Built with -fsanitize=address,undefined and run as a process of its own:
 *
 *     fuzz_delta ITERATIONS SEED
 *
 * Each iteration takes a valid segment (sparse, or planes of 1, 2, 4 or 8 bytes) and damages it in one to eight places, or
 * makes up a sparse one whose lengths fit one another, and decodes it at an instruction set chosen at random, from and into
 * memory of exactly the size it may touch. A decoder that accepts what it got must have given sorted positions inside the
 * segment, and taking its steps back must bring back the base; segments that are not damaged must come back.
 * Run it with ASAN_OPTIONS=max_allocation_size_mb=16, so that memory out of proportion to the input is a defect, too.
 * Exit code 0: nothing found. Anything else, or a sanitizer's report: a defect.
 */
#include "delta.h"

#include <stdio.h>
#include <stdlib.h>

enum { MOST = 6000, LOG = 13 };

static uint64_t state;

static uint64_t next(void) /* splitmix64 */
{
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static uint64_t below(uint64_t limit) { return limit ? next() % limit : 0; }

static void fail(const char *what)
{
    fprintf(stderr, "fuzz_delta: %s\n", what);
    exit(1);
}

static uint8_t *exactly(const void *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy) fail("no memory");
    if (data && size) memcpy(copy, data, size);
    return copy;
}

static void fill(uint8_t *old, uint8_t *new_, size_t bytes)
{
    uint64_t every = 1 + below(1 + below(400)), kind = below(4);
    for (size_t i = 0; i < bytes; i++) new_[i] = old[i] = (uint8_t)(kind == 0 ? 0 : kind == 1 ? below(4) : next());
    for (size_t i = 0; i < bytes; i++)
        if (below(every) == 0) new_[i] = kind == 3 ? (uint8_t)next() : (uint8_t)(old[i] + 1);
}

static size_t damage(uint8_t *data, size_t length)
{
    for (uint64_t times = 1 + below(8); times && length; times--) {
        size_t at = below(2) ? below(length) : below(length < 160 ? length : 160);
        switch (below(6)) {
        case 0: data[at] ^= (uint8_t)(1u << below(8)); break;
        case 1: data[at] = (uint8_t)next(); break;
        case 2: length = at; break;
        case 3: data[at] = below(2) ? 0xFF : 0; break;
        case 4:
            if (length - at >= 4) {
                uint32_t edge[6] = {0, 1, 0x7FFFFFFF, 0xFFFFFFFF, (uint32_t)length, (uint32_t)next()};
                rlc_store32(data + at, edge[below(6)]);
            }
            break;
        default:
            if (length > 1) {
                size_t from = below(length), size = below(length - (from > at ? from : at)) + 1;
                memmove(data + at, data + from, size);
            }
        }
    }
    return length;
}

/* Small numbers that fit one another, so that the length says nothing, around random bits. */
static size_t forge(uint8_t *data)
{
    uint64_t m = below(12), k = below(8) ? below(28) : below(80), unary = below(6), escaped = below(4) ? 0 : below(4);
    uint64_t mode = below(4), steps = mode == RLC_MODE_CONSTANT ? 1 : m, low = (m * k + 7) / 8;
    size_t size = (size_t)(RLC_SPARSE_HEADER + low + unary + steps + 2 * escaped);
    for (size_t i = 0; i < size; i++) data[i] = (uint8_t)(below(3) ? next() & next() & next() : next());
    rlc_store32(data, (uint32_t)m);
    rlc_store32(data + 4, (uint32_t)unary);
    rlc_store32(data + 8, (uint32_t)steps);
    rlc_store32(data + 12, (uint32_t)escaped);
    data[16] = (uint8_t)k;
    data[17] = (uint8_t)mode;
    rlc_store16(data + 18, 0);
    return size;
}

static void one_sparse(int damaged)
{
    uint64_t n = 1 + below(below(4) ? MOST : 12), changed, done; /* few: fewer than a forged one says it has */
    uint8_t *old = exactly(0, 2 * n), *new_ = exactly(0, 2 * n), *out = exactly(0, 8 * n + 256);
    uint32_t length32;
    fill(old, new_, 2 * n);
    int64_t length = rlc_sparse_encode(old, new_, n, LOG, 0, 1, out, 8 * n + 256, &length32, &changed);
    if (length < 0) fail("a segment could not be encoded");
    uint8_t forged[512];
    int forging = damaged && below(2);
    size_t size = forging ? forge(forged) : damaged ? damage(out, (size_t)length) : (size_t)length;
    uint8_t *data = exactly(forging ? forged : out, size);
    uint32_t *positions = (uint32_t *)exactly(0, 4 * n);
    int16_t *steps = (int16_t *)exactly(0, 2 * n);
    int64_t found = rlc_sparse_decode(data, size, n, positions, steps, n);
    for (int64_t i = 0; i < found; i++)
        if (positions[i] >= n || (i && positions[i] <= positions[i - 1])) fail("positions are not sorted and inside");
    if (found == RLC_CAPACITY) fail("more changes than words were taken for a matter of room");
    if (found > 0) { /* with too little room: refused, and not written beyond it */
        uint64_t room = below((uint64_t)found);
        uint32_t *few = (uint32_t *)exactly(0, 4 * room);
        int16_t *fewer = (int16_t *)exactly(0, 2 * room);
        if (rlc_sparse_decode(data, size, n, few, fewer, room) != RLC_CAPACITY) fail("too little room was not refused");
        free(few), free(fewer);
    }
    length32 = (uint32_t)size;
    uint8_t *base = exactly(old, 2 * n);
    int64_t applied = rlc_sparse_apply(data, size, &length32, n, LOG, 0, 1, base, 1, &done);
    if (applied != found && (applied >= 0 || found >= 0)) fail("decode and apply disagree");
    if (!damaged && (applied < 0 || memcmp(base, new_, 2 * n))) fail("an undamaged segment did not come back");
    if (applied >= 0) rlc_sparse_apply(data, size, &length32, n, LOG, 0, 1, base, -1, &done);
    if (memcmp(base, old, 2 * n)) fail("the base was not brought back");
    free(old), free(new_), free(out), free(data), free(positions), free(steps), free(base);
}

/* A few bytes that say they change millions of words: refused before memory is taken for them, which only a limit on
 * allocations shows (ASAN_OPTIONS=max_allocation_size_mb). The base is not touched, so there is none. */
static void greedy(void)
{
    uint8_t data[RLC_SPARSE_HEADER + 8] = {0}, base[2];
    uint32_t length = sizeof data;
    uint64_t done;
    rlc_store32(data, (uint32_t)1 << RLC_MAX_LOG);
    rlc_store32(data + 4, 7);
    rlc_store32(data + 8, 1);
    data[17] = RLC_MODE_CONSTANT;
    if (rlc_sparse_apply(data, length, &length, (uint64_t)1 << RLC_MAX_LOG, RLC_MAX_LOG, 0, 1, base, 1, &done) != RLC_FORMAT)
        fail("a count that its bytes cannot hold was not refused");
}

static void one_planes(int damaged)
{
    int width = 1 << below(4);
    uint64_t n = 1 + below(MOST) / (uint64_t)width, bytes = n * (uint64_t)width, done;
    uint8_t *old = exactly(0, bytes), *new_ = exactly(0, bytes), *out = exactly(0, 2 * bytes + 512);
    uint32_t length32;
    fill(old, new_, bytes);
    int64_t length = rlc_planes_encode(old, new_, n, width, LOG, 0, 1, out, 2 * bytes + 512, &length32);
    if (length < 0) fail("planes could not be encoded");
    size_t size = damaged ? damage(out, (size_t)length) : (size_t)length;
    uint8_t *data = exactly(out, size), *base = exactly(old, bytes);
    length32 = (uint32_t)size;
    int64_t code = rlc_planes_apply(data, size, &length32, n, width, LOG, 0, 1, base, 1, &done);
    if (!damaged && (code < 0 || memcmp(base, new_, bytes))) fail("undamaged planes did not come back");
    if (code >= 0) rlc_planes_apply(data, size, &length32, n, width, LOG, 0, 1, base, 1, &done);
    if (memcmp(base, old, bytes)) fail("the base was not brought back");
    free(old), free(new_), free(out), free(data), free(base);
}

int main(int count, char **words)
{
    if (count != 3) fail("usage: fuzz_delta ITERATIONS SEED");
    uint64_t iterations = strtoull(words[1], 0, 10);
    state = strtoull(words[2], 0, 10);
    greedy();
    for (uint64_t i = 0; i < iterations; i++) {
        rlc_delta_use((int)below(3));
        if (below(4)) one_sparse(i % 16 != 0);
        else one_planes(i % 16 != 0);
    }
    printf("%llu inputs\n", (unsigned long long)iterations);
    return 0;
}
