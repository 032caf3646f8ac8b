/* Sparse segments of 16-bit floats: where they changed (gaps, Rice coded) and by how many steps on the integer line.
 *
 * A segment:  count u32 | unary bytes u32 | step bytes u32 | escapes u32 | k u8 | mode u8 | zero u16 |
 *             low k bits of each gap | unary | step stream | escapes u16
 * A gap is the number of unchanged words before a change; gap >> k is that many zero bits and a one. A step (mod 2^16,
 * never 0) is zigzagged, less one; from 255 on it is the symbol 255 and an escape. Bits fill bytes from the lowest.
 * A segment without changes is empty.
 */
#include "delta.h"

#include <stdlib.h>

/* -- packing ------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *memory;
    size_t size;
} scratch;

static uint8_t *scratch_for(scratch *s, size_t size)
{
    if (s->size < size) {
        free(s->memory);
        s->size = size + size / 4;
        s->memory = malloc(s->size);
        if (!s->memory) s->size = 0;
    }
    return s->memory;
}

/* gaps from positions; the best k of four below the mean gap, and the bits of the unary part under it. */
RLC_INLINE int gaps_and_k(const uint32_t *positions, uint64_t m, uint32_t *gaps, uint64_t *unary_bits)
{
    uint64_t mean = ((uint64_t)positions[m - 1] + 1) / m, best = UINT64_MAX;
    uint32_t s0, s1, s2, s3; /* a sum of gaps is below 2^24 */
    int high = 63 - __builtin_clzll(mean), low = high < 3 ? 0 : high - 3, k = low;
    gaps[0] = positions[0];
    s0 = gaps[0] >> low, s1 = s0 >> 1, s2 = s0 >> 2, s3 = s0 >> 3;
    for (uint64_t i = 1; i < m; i++) {
        uint32_t gap = positions[i] - positions[i - 1] - 1;
        gaps[i] = gap;
        gap >>= low;
        s0 += gap;
        s1 += gap >> 1;
        s2 += gap >> 2;
        s3 += gap >> 3;
    }
    const uint32_t sums[4] = {s0, s1, s2, s3};
    for (int j = low; j <= high; j++) {
        uint64_t bits = sums[j - low] + m * (uint64_t)(j + 1);
        if (bits < best) {
            best = bits;
            k = j;
        }
    }
    *unary_bits = sums[k - low] + m;
    return k;
}

/* `low` has room for m * k bits and RLC_SLACK. Several gaps are put together before they join the stream. */
RLC_INLINE void write_low(const uint32_t *gaps, uint64_t m, int k, uint8_t *low)
{
    const uint64_t mask = ((uint64_t)1 << k) - 1;
    uint64_t held = 0, bits = 0, i = 0;
#define RLC_APPEND(value, width) \
    held |= (value) << bits; \
    rlc_store64(low, held); \
    bits += (uint64_t)(width); \
    low += bits >> 3; \
    held >>= bits & ~(uint64_t)7; \
    bits &= 7;
    if (k <= 14)
        for (; i + 4 <= m; i += 4) {
            uint64_t two = (gaps[i] & mask) | (gaps[i + 1] & mask) << k, more = (gaps[i + 2] & mask) | (gaps[i + 3] & mask) << k;
            RLC_APPEND(two | more << 2 * k, 4 * k)
        }
    for (; i < m; i++) {
        RLC_APPEND(gaps[i] & mask, k)
    }
#undef RLC_APPEND
}

/* `unary` is zero, and RLC_SLACK bytes longer than it needs. Four short codes are put together before they join. */
RLC_INLINE void write_unary(const uint32_t *gaps, uint64_t m, int k, uint8_t *unary)
{
    uint64_t held = 0, bits = 0, i = 0;
    while (i < m) {
        if (i + 4 <= m) {
            uint64_t a = gaps[i] >> k, b = a + 1 + (gaps[i + 1] >> k), c = b + 1 + (gaps[i + 2] >> k);
            uint64_t d = c + 1 + (gaps[i + 3] >> k);
            if (d < 56) {
                held |= ((uint64_t)1 << a | (uint64_t)1 << b | (uint64_t)1 << c | (uint64_t)1 << d) << bits;
                rlc_store64(unary, held);
                bits += d + 1;
                unary += bits >> 3;
                held = bits >> 6 ? 0 : held >> (bits & ~(uint64_t)7);
                bits &= 7;
                i += 4;
                continue;
            }
        }
        /* One code, perhaps a long one: what is held is stored, and the zeros are there. */
        rlc_store64(unary, held);
        bits += gaps[i++] >> k;
        unary += bits >> 3;
        held = bits >> 3 ? 0 : held;
        bits &= 7;
        held |= (uint64_t)1 << bits;
        rlc_store64(unary, held);
        bits++;
        unary += bits >> 3;
        held >>= bits & ~(uint64_t)7;
        bits &= 7;
    }
}

/* Symbols from values; returns the number of escapes. news is overwritten with the zigzagged steps. */
RLC_INLINE uint64_t make_symbols(const uint16_t *olds, uint16_t *news, uint64_t m, uint8_t *symbols, uint16_t *escapes)
{
    uint64_t large = 0, count = 0;
    for (uint64_t i = 0; i < m; i++) {
        uint16_t step = (uint16_t)(rlc_line(news[i]) - rlc_line(olds[i]));
        uint16_t zigzag = (uint16_t)((step << 1) ^ (0 - (step >> 15)));
        news[i] = (uint16_t)(zigzag - 1);
        symbols[i] = (uint8_t)(news[i] < RLC_ESCAPE ? news[i] : RLC_ESCAPE);
        large += news[i] >= RLC_ESCAPE;
    }
    if (large)
        for (uint64_t i = 0; i < m; i++)
            if (news[i] >= RLC_ESCAPE) escapes[count++] = news[i];
    return count;
}

/* news are used up. */
RLC_INLINE int64_t pack_body(const uint32_t *positions, const uint16_t *olds, uint16_t *news, uint64_t m, uint8_t *out,
                             uint64_t capacity, scratch *s, scratch *g)
{
    if (!m) return 0;
    uint64_t unary_bits;
    uint32_t *gaps = (uint32_t *)scratch_for(g, 4 * m);
    if (!gaps) return RLC_MEMORY;
    int k = gaps_and_k(positions, m, gaps, &unary_bits);
    uint64_t low_bytes = (m * (uint64_t)k + 7) / 8, unary_bytes = (unary_bits + 7) / 8;
    uint64_t fixed = RLC_SPARSE_HEADER + low_bytes + unary_bytes;
    if (capacity < fixed + m + 1) return RLC_CAPACITY; /* m + 1: the bound of the step stream */

    size_t sizes[5] = {unary_bytes + RLC_SLACK, low_bytes + RLC_SLACK, m + RLC_SLACK, 2 * m + RLC_SLACK, 2 * m + 2 * RLC_SLACK};
    size_t total = 0;
    for (int i = 0; i < 5; i++) {
        sizes[i] = (sizes[i] + 63) / 64 * 64;
        total += sizes[i];
    }
    uint8_t *memory = scratch_for(s, total);
    if (!memory) return RLC_MEMORY;
    uint8_t *unary = memory, *low = memory + sizes[0], *symbols = low + sizes[1];
    uint16_t *escapes = (uint16_t *)(symbols + sizes[2]);
    uint8_t *rest = symbols + sizes[2] + sizes[3];

    memset(unary, 0, sizes[0]);
    write_low(gaps, m, k, low);
    write_unary(gaps, m, k, unary);
    uint64_t escaped = make_symbols(olds, news, m, symbols, escapes);
    memcpy(out + RLC_SPARSE_HEADER, low, low_bytes);
    memcpy(out + RLC_SPARSE_HEADER + low_bytes, unary, unary_bytes);
    uint8_t mode;
    uint64_t steps = rlc_stream_encode(symbols, m, out + fixed, rest, &mode);
    if (capacity - fixed - steps < 2 * escaped) return RLC_CAPACITY;
    memcpy(out + fixed + steps, escapes, 2 * escaped);
    rlc_store32(out, (uint32_t)m);
    rlc_store32(out + 4, (uint32_t)unary_bytes);
    rlc_store32(out + 8, (uint32_t)steps);
    rlc_store32(out + 12, (uint32_t)escaped);
    out[16] = (uint8_t)k;
    out[17] = mode;
    rlc_store16(out + 18, 0);
    return (int64_t)(fixed + steps + 2 * escaped);
}

#define RLC_PACK_ARGUMENTS \
    const uint32_t *p, const uint16_t *o, uint16_t *n, uint64_t m, uint8_t *out, uint64_t c, scratch *s, scratch *g

static int64_t pack_portable(RLC_PACK_ARGUMENTS) { return pack_body(p, o, n, m, out, c, s, g); }
#if RLC_X86
RLC_AVX2 static int64_t pack_avx2(RLC_PACK_ARGUMENTS) { return pack_body(p, o, n, m, out, c, s, g); }
#endif

static int64_t pack(RLC_PACK_ARGUMENTS)
{
#if RLC_X86
    if (rlc_level() >= RLC_LEVEL_AVX2) return pack_avx2(p, o, n, m, out, c, s, g);
#endif
    return pack_portable(p, o, n, m, out, c, s, g);
}

/* Room for the changes of one segment: all of its words may have changed. Untouched pages cost nothing. */
static int changes_room(uint64_t elements, int log, uint32_t **positions, uint16_t **olds, uint16_t **news)
{
    uint64_t room = elements < (uint64_t)1 << log ? elements : (uint64_t)1 << log;
    *positions = malloc(8 * (room + RLC_SLACK));
    if (!*positions) return 0;
    *olds = (uint16_t *)(*positions + room + RLC_SLACK);
    *news = *olds + room + RLC_SLACK;
    return 1;
}

int64_t rlc_sparse_encode(const void *old, const void *new_, uint64_t elements, int log, uint64_t first, uint64_t last,
                          uint8_t *out, uint64_t capacity, uint32_t *lengths, uint64_t *changed)
{
    uint32_t *positions;
    uint16_t *olds, *news;
    scratch s = {0, 0}, g = {0, 0};
    uint64_t written = 0;
    int64_t result = 0;
    *changed = 0;
    if (!rlc_range_ok(elements, log, first, last)) return RLC_FORMAT;
    if (!changes_room(elements, log, &positions, &olds, &news)) return RLC_MEMORY;
    for (uint64_t segment = first; segment < last; segment++) {
        uint64_t begin = segment << log, count = rlc_segment_elements(elements, log, segment);
        uint64_t m = (uint64_t)rlc_sparse_gather((const uint8_t *)old + 2 * begin, (const uint8_t *)new_ + 2 * begin, count,
                                                 positions, olds, news);
        result = pack(positions, olds, news, m, out + written, capacity - written, &s, &g);
        if (result < 0) break;
        lengths[segment - first] = (uint32_t)result;
        written += (uint64_t)result;
        *changed += m;
    }
    free(positions);
    free(s.memory);
    free(g.memory);
    return result < 0 ? result : (int64_t)written;
}

int64_t rlc_sparse_encode_steps(const int64_t *where, const int16_t *steps, uint64_t count, uint64_t elements, int log,
                                uint64_t first, uint64_t last, uint8_t *out, uint64_t capacity, uint32_t *lengths)
{
    uint32_t *positions;
    uint16_t *olds, *news;
    scratch s = {0, 0}, g = {0, 0};
    uint64_t written = 0, i = 0;
    int64_t result = 0;
    if (!rlc_range_ok(elements, log, first, last)) return RLC_FORMAT;
    if (!changes_room(elements, log, &positions, &olds, &news)) return RLC_MEMORY;
    for (uint64_t segment = first; segment < last; segment++) {
        uint64_t begin = segment << log, size = rlc_segment_elements(elements, log, segment), m = 0, next = begin;
        for (; i < count && where[i] >= 0 && (uint64_t)where[i] < begin + size; i++, m++) {
            if ((uint64_t)where[i] < next || !steps[i]) break; /* not sorted, or no change */
            next = (uint64_t)where[i] + 1;
            positions[m] = (uint32_t)((uint64_t)where[i] - begin);
            olds[m] = 0; /* the line of 0 is 0, so that the step is the line of the "new value" */
            news[m] = rlc_line((uint16_t)steps[i]);
        }
        if (i < count && (where[i] < 0 || (uint64_t)where[i] < begin + size)) {
            result = RLC_FORMAT;
            break;
        }
        result = pack(positions, olds, news, m, out + written, capacity - written, &s, &g);
        if (result < 0) break;
        lengths[segment - first] = (uint32_t)result;
        written += (uint64_t)result;
    }
    if (result >= 0 && i < count) result = RLC_FORMAT;
    free(positions);
    free(s.memory);
    free(g.memory);
    return result < 0 ? result : (int64_t)written;
}

/* -- unpacking ----------------------------------------------------------------------------------------------------- */

/* Reads m gaps; 0 unless there are exactly m ones, the last of them in the last byte, and all positions are inside. */
RLC_INLINE int read_gaps(const uint8_t *low, const uint64_t *unary, uint64_t words, uint64_t unary_bytes, int k, uint64_t m,
                         uint64_t elements, uint32_t *positions)
{
    const uint32_t mask = (uint32_t)(((uint64_t)1 << k) - 1);
    uint64_t i = 0, bit = 0, before = 0, at = 0; /* at: the next position that is free */
    for (uint64_t w = 0; w < words; w++) {
        uint64_t held = unary[w];
        for (; held; held &= held - 1) {
            uint64_t one = 64 * w + (uint64_t)__builtin_ctzll(held), quotient = one - before;
            if (i == m) return 0;
            before = one + 1;
            at += quotient << k | (uint32_t)((rlc_load64(low + (bit >> 3)) >> (bit & 7)) & mask);
            bit += (uint64_t)k;
            positions[i++] = (uint32_t)at++;
        }
    }
    return i == m && (before + 7) / 8 == unary_bytes && at <= elements;
}

RLC_INLINE int64_t unpack_body(const uint8_t *data, uint64_t length, uint64_t elements, uint32_t *positions, uint16_t *steps,
                               uint64_t room, scratch *s)
{
    if (!length) return 0;
    if (length < RLC_SPARSE_HEADER) return RLC_TRUNCATED;
    uint64_t m = rlc_load32(data), unary_bytes = rlc_load32(data + 4), step_bytes = rlc_load32(data + 8);
    uint64_t escaped = rlc_load32(data + 12), k = data[16];
    int mode = data[17];
    if (!m || m > elements || k > RLC_MAX_RICE || escaped > m || rlc_load16(data + 18)) return RLC_FORMAT;
    uint64_t low_bytes = (m * k + 7) / 8;
    if (RLC_SPARSE_HEADER + low_bytes + unary_bytes + step_bytes + 2 * escaped != length) return RLC_TRUNCATED;
    if (m > 8 * unary_bytes) return RLC_FORMAT;
    if (m > room) return RLC_CAPACITY;

    /* The bit streams are copied so that loops may read a little further than they end. */
    uint64_t words = (unary_bytes + 7) / 8;
    size_t unary_room = (8 * words + 63) / 64 * 64, low_room = (low_bytes + RLC_SLACK + 63) / 64 * 64;
    uint8_t *memory = scratch_for(s, unary_room + low_room + m + RLC_SLACK);
    if (!memory) return RLC_MEMORY;
    uint64_t *unary = (uint64_t *)memory;
    uint8_t *low = memory + unary_room, *symbols = low + low_room;
    const uint8_t *p = data + RLC_SPARSE_HEADER;
    memcpy(low, p, low_bytes);
    memset(low + low_bytes, 0, RLC_SLACK);
    p += low_bytes;
    unary[words - 1] = 0;
    memcpy(unary, p, unary_bytes);
    p += unary_bytes;
    if (!read_gaps(low, unary, words, unary_bytes, (int)k, m, elements, positions)) return RLC_FORMAT;
    int code = rlc_stream_decode(p, step_bytes, mode, symbols, m);
    if (code) return code;
    p += step_bytes;

    uint64_t large = 0;
    for (uint64_t i = 0; i < m; i++) {
        uint16_t zigzag = (uint16_t)(symbols[i] + 1);
        steps[i] = (uint16_t)((zigzag >> 1) ^ (0 - (zigzag & 1)));
        large += symbols[i] == RLC_ESCAPE;
    }
    if (large != escaped) return RLC_FORMAT;
    for (uint64_t i = 0; large; i++) {
        if (symbols[i] != RLC_ESCAPE) continue;
        uint16_t value = rlc_load16(p);
        if (value < RLC_ESCAPE || value > RLC_LARGEST) return RLC_FORMAT;
        uint16_t zigzag = (uint16_t)(value + 1);
        steps[i] = (uint16_t)((zigzag >> 1) ^ (0 - (zigzag & 1)));
        p += 2;
        large--;
    }
    return (int64_t)m;
}

static int64_t unpack_portable(const uint8_t *d, uint64_t l, uint64_t e, uint32_t *p, uint16_t *st, uint64_t room, scratch *s)
{
    return unpack_body(d, l, e, p, st, room, s);
}
#if RLC_X86
RLC_AVX2 static int64_t unpack_avx2(const uint8_t *d, uint64_t l, uint64_t e, uint32_t *p, uint16_t *st, uint64_t room,
                                    scratch *s)
{
    return unpack_body(d, l, e, p, st, room, s);
}
#endif

static int64_t unpack(const uint8_t *d, uint64_t l, uint64_t e, uint32_t *p, uint16_t *st, uint64_t room, scratch *s)
{
#if RLC_X86
    if (rlc_level() >= RLC_LEVEL_AVX2) return unpack_avx2(d, l, e, p, st, room, s);
#endif
    return unpack_portable(d, l, e, p, st, room, s);
}

int64_t rlc_sparse_decode(const uint8_t *data, uint64_t length, uint64_t elements, uint32_t *positions, int16_t *steps,
                          uint64_t room)
{
    scratch s = {0, 0};
    if (elements > (uint64_t)1 << RLC_MAX_LOG) return RLC_FORMAT;
    int64_t result = unpack(data, length, elements, positions, (uint16_t *)steps, room, &s);
    free(s.memory);
    return result;
}

static void scatter(uint8_t *base, const uint32_t *positions, const uint16_t *steps, uint64_t m, uint16_t flip)
{
    /* flip is 0 or 0xFFFF: -step is ~step + 1 */
    const uint16_t one = flip & 1;
    for (uint64_t i = 0; i < m; i++) {
        __builtin_prefetch(base + 2 * (uint64_t)positions[i + 32 < m ? i + 32 : i], 1);
        uint8_t *p = base + 2 * (uint64_t)positions[i];
        uint16_t step = (uint16_t)((steps[i] ^ flip) + one);
        rlc_store16(p, rlc_line((uint16_t)(rlc_line(rlc_load16(p)) + step)));
    }
}

int64_t rlc_sparse_apply(const uint8_t *data, uint64_t length, const uint32_t *lengths, uint64_t elements, int log,
                         uint64_t first, uint64_t last, void *base, int sign, uint64_t *done)
{
    scratch s = {0, 0}, changes = {0, 0};
    uint64_t at = 0, total = 0;
    int64_t result = 0;
    *done = 0;
    if (!rlc_range_ok(elements, log, first, last)) return RLC_FORMAT;
    for (uint64_t segment = first; segment < last; segment++, (*done)++) {
        uint64_t size = lengths[segment - first], count = rlc_segment_elements(elements, log, segment);
        if (size > length - at) {
            result = RLC_TRUNCATED;
            break;
        }
        if (!size) continue;
        if (size < RLC_SPARSE_HEADER) {
            result = RLC_TRUNCATED;
            break;
        }
        /* A change takes at least one bit of unary, so memory is bounded by the input, whatever the count says. */
        uint64_t m = rlc_load32(data + at);
        if (m > count || m > 8 * size) {
            result = RLC_FORMAT;
            break;
        }
        uint8_t *memory = scratch_for(&changes, 6 * (m + RLC_SLACK));
        if (!memory) {
            result = RLC_MEMORY;
            break;
        }
        uint32_t *positions = (uint32_t *)memory;
        uint16_t *steps = (uint16_t *)(positions + m + RLC_SLACK);
        result = unpack(data + at, size, count, positions, steps, m, &s);
        if (result < 0) break;
        scatter((uint8_t *)base + 2 * (segment << log), positions, steps, m, sign < 0 ? 0xFFFF : 0);
        at += size;
        total += m;
    }
    if (result >= 0 && at != length) result = RLC_FORMAT;
    free(s.memory);
    free(changes.memory);
    return result < 0 ? result : (int64_t)total;
}
