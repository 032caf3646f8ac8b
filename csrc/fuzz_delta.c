/* Fuzzer of the delta decoders (fuzz.h says how it is run).
 *
 * An input is eight bytes (what kind of segment, instruction set, elements, the seed of the base) and a segment: a valid one
 * (sparse, or planes of 1, 2, 4 or 8 bytes), damaged in one to eight places, or a made-up sparse one whose lengths fit one another.
 * It is decoded from and into memory of exactly the size that may be touched. A decoder that accepts what it got must have given
 * sorted positions inside the segment, and taking its steps back must bring back the base; segments that are not damaged come back.
 */
#include "delta.h"
#include "fuzz.h"

enum { MOST = 6000, LOG = 13, HEAD = 8, UNDAMAGED = 0x80 };

static uint8_t *exactly(const void *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy) fuzz_fail("no memory");
    if (data && size) memcpy(copy, data, size);
    return copy;
}

/* A base and what it becomes, from a seed. */
static void fill(uint8_t *old, uint8_t *new_, size_t bytes, uint64_t seed)
{
    uint64_t kept = fuzz_state;
    fuzz_state = seed;
    uint64_t every = 1 + fuzz_below(1 + fuzz_below(400)), kind = fuzz_below(4);
    for (size_t i = 0; i < bytes; i++)
        new_[i] = old[i] = (uint8_t)(kind == 0 ? 0 : kind == 1 ? fuzz_below(4) : fuzz_next());
    for (size_t i = 0; i < bytes; i++)
        if (fuzz_below(every) == 0) new_[i] = kind == 3 ? (uint8_t)fuzz_next() : (uint8_t)(old[i] + 1);
    fuzz_state = kept;
}

static size_t damage(uint8_t *data, size_t length)
{
    for (uint64_t times = 1 + fuzz_below(8); times && length; times--) {
        size_t at = fuzz_below(2) ? fuzz_below(length) : fuzz_below(length < 160 ? length : 160);
        switch (fuzz_below(6)) {
        case 0: data[at] ^= (uint8_t)(1u << fuzz_below(8)); break;
        case 1: data[at] = (uint8_t)fuzz_next(); break;
        case 2: length = at; break;
        case 3: data[at] = fuzz_below(2) ? 0xFF : 0; break;
        case 4:
            if (length - at >= 4) {
                uint32_t edge[6] = {0, 1, 0x7FFFFFFF, 0xFFFFFFFF, (uint32_t)length, (uint32_t)fuzz_next()};
                rlc_store32(data + at, edge[fuzz_below(6)]);
            }
            break;
        default:
            if (length > 1) {
                size_t from = fuzz_below(length), size = fuzz_below(length - (from > at ? from : at)) + 1;
                memmove(data + at, data + from, size);
            }
        }
    }
    return length;
}

/* Small numbers that fit one another, so that the length says nothing, around random bits. */
static size_t forge(uint8_t *data)
{
    uint64_t m = fuzz_below(12), k = fuzz_below(8) ? fuzz_below(28) : fuzz_below(80), unary = fuzz_below(6);
    uint64_t escaped = fuzz_below(4) ? 0 : fuzz_below(4), mode = fuzz_below(4);
    uint64_t steps = mode == RLC_MODE_CONSTANT ? 1 : m, low = (m * k + 7) / 8;
    size_t size = (size_t)(RLC_SPARSE_HEADER + low + unary + steps + 2 * escaped);
    for (size_t i = 0; i < size; i++)
        data[i] = (uint8_t)(fuzz_below(3) ? fuzz_next() & fuzz_next() & fuzz_next() : fuzz_next());
    rlc_store32(data, (uint32_t)m);
    rlc_store32(data + 4, (uint32_t)unary);
    rlc_store32(data + 8, (uint32_t)steps);
    rlc_store32(data + 12, (uint32_t)escaped);
    data[16] = (uint8_t)k;
    data[17] = (uint8_t)mode;
    rlc_store16(data + 18, 0);
    return size;
}

/* A few bytes that say they change millions of words: refused before memory is taken for them, which only a limit on
 * allocations shows. The base is not touched, so there is none. */
static void greedy(void)
{
    uint8_t data[RLC_SPARSE_HEADER + 8] = {0}, base[2];
    uint32_t length = sizeof data;
    uint64_t done, most = (uint64_t)1 << RLC_MAX_LOG;
    rlc_store32(data, (uint32_t)1 << RLC_MAX_LOG);
    rlc_store32(data + 4, 7);
    rlc_store32(data + 8, 1);
    data[17] = RLC_MODE_CONSTANT;
    if (rlc_sparse_apply(data, length, &length, most, RLC_MAX_LOG, 0, 1, base, 1, &done) != RLC_FORMAT)
        fuzz_fail("a count that its bytes cannot hold was not refused");
}

static size_t encode(int kind, uint64_t n, uint64_t seed, uint8_t *out, size_t room)
{
    size_t width = kind ? (size_t)1 << (kind - 1) : 2;
    uint8_t *old = exactly(0, width * n), *new_ = exactly(0, width * n);
    uint32_t length32;
    uint64_t changed;
    fill(old, new_, width * n, seed);
    int64_t length = kind ? rlc_planes_encode(old, new_, n, (int)width, LOG, 0, 1, out, room, &length32)
                          : rlc_sparse_encode(old, new_, n, LOG, 0, 1, out, room, &length32, &changed);
    if (length < 0) fuzz_fail("a segment could not be encoded");
    free(old), free(new_);
    return (size_t)length;
}

static void check_sparse(const uint8_t *data, size_t size, uint64_t n, uint64_t seed, int undamaged)
{
    uint8_t *old = exactly(0, 2 * n), *new_ = exactly(0, 2 * n);
    fill(old, new_, 2 * n, seed);
    uint32_t *positions = (uint32_t *)exactly(0, 4 * n), length32 = (uint32_t)size;
    int16_t *steps = (int16_t *)exactly(0, 2 * n);
    uint64_t done;
    int64_t found = rlc_sparse_decode(data, size, n, positions, steps, n);
    for (int64_t i = 0; i < found; i++)
        if (positions[i] >= n || (i && positions[i] <= positions[i - 1])) fuzz_fail("positions are not sorted and inside");
    if (found == RLC_CAPACITY) fuzz_fail("more changes than words were taken for a matter of room");
    if (found > 0) { /* with too little room: refused, and not written beyond it */
        uint64_t room = seed % (uint64_t)found;
        uint32_t *few = (uint32_t *)exactly(0, 4 * room);
        int16_t *fewer = (int16_t *)exactly(0, 2 * room);
        if (rlc_sparse_decode(data, size, n, few, fewer, room) != RLC_CAPACITY) fuzz_fail("too little room was not refused");
        free(few), free(fewer);
    }
    uint8_t *base = exactly(old, 2 * n);
    int64_t applied = rlc_sparse_apply(data, size, &length32, n, LOG, 0, 1, base, 1, &done);
    if (applied != found && (applied >= 0 || found >= 0)) fuzz_fail("decode and apply disagree");
    if (undamaged && (applied < 0 || memcmp(base, new_, 2 * n))) fuzz_fail("an undamaged segment did not come back");
    if (applied >= 0) rlc_sparse_apply(data, size, &length32, n, LOG, 0, 1, base, -1, &done);
    if (memcmp(base, old, 2 * n)) fuzz_fail("the base was not brought back");
    free(old), free(new_), free(positions), free(steps), free(base);
}

static void check_planes(const uint8_t *data, size_t size, int width, uint64_t n, uint64_t seed, int undamaged)
{
    uint64_t bytes = n * (uint64_t)width, done;
    uint8_t *old = exactly(0, bytes), *new_ = exactly(0, bytes);
    fill(old, new_, bytes, seed);
    uint8_t *base = exactly(old, bytes);
    uint32_t length32 = (uint32_t)size;
    int64_t code = rlc_planes_apply(data, size, &length32, n, width, LOG, 0, 1, base, 1, &done);
    if (undamaged && (code < 0 || memcmp(base, new_, bytes))) fuzz_fail("undamaged planes did not come back");
    if (code >= 0) rlc_planes_apply(data, size, &length32, n, width, LOG, 0, 1, base, 1, &done);
    if (memcmp(base, old, bytes)) fuzz_fail("the base was not brought back");
    free(old), free(new_), free(base);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int begun;
    if (!begun++) greedy();
    if (size < HEAD) return 0;
    int kind = data[0] % 5, undamaged = !!(data[0] & UNDAMAGED), width = kind ? 1 << (kind - 1) : 2;
    uint64_t n = 1 + rlc_load16(data + 2) % MOST / (uint64_t)(kind ? width : 1), seed = rlc_load32(data + 4);
    rlc_delta_use(data[1] % 3);
    uint8_t *segment;
    size -= HEAD;
    if (undamaged) {
        segment = exactly(0, FUZZ_ROOM);
        size = encode(kind, n, seed, segment, FUZZ_ROOM);
        segment = realloc(segment, size ? size : 1);
    } else
        segment = exactly(data + HEAD, size);
    if (kind) check_planes(segment, size, width, n, seed, undamaged);
    else check_sparse(segment, size, n, seed, undamaged);
    free(segment);
    return 0;
}

size_t fuzz_make(uint8_t *data)
{
    int kind = fuzz_below(4) ? 0 : 1 + (int)fuzz_below(4);
    uint64_t n = fuzz_below(MOST >> fuzz_below(10)), seed = fuzz_next() & 0xFFFFFFFF; /* few: fewer than a forged one says */
    uint64_t elements = 1 + n / (uint64_t)(kind ? 1 << (kind - 1) : 1);
    data[0] = (uint8_t)(kind + 5 * (int)fuzz_below(20)); /* below UNDAMAGED */
    data[1] = (uint8_t)fuzz_below(3);
    rlc_store16(data + 2, (uint16_t)n);
    rlc_store32(data + 4, (uint32_t)seed);
    if (fuzz_below(16) == 0) {
        data[0] = (uint8_t)(130 + kind); /* a multiple of 5, and UNDAMAGED */
        return HEAD;
    }
    if (!kind && fuzz_below(2)) return HEAD + forge(data + HEAD);
    rlc_delta_use(data[1]);
    return HEAD + damage(data + HEAD, encode(kind, elements, seed, data + HEAD, FUZZ_ROOM - HEAD));
}
