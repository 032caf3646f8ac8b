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

#if RLC_X86
#include <immintrin.h>
#endif

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

/* Bits that are no whole byte yet, and where they go: with what is appended at once at most 63. */
typedef struct {
    uint8_t *at;
    uint64_t held, bits;
} bit_writer;

RLC_INLINE void append(bit_writer *w, uint64_t value, uint64_t width)
{
    w->held |= value << w->bits;
    rlc_store64(w->at, w->held);
    w->bits += width;
    w->at += w->bits >> 3;
    w->held >>= w->bits & ~(uint64_t)7;
    w->bits &= 7;
}

/* A code of any length, where zeros are: what is held is stored, and the zeros are there. */
RLC_INLINE void append_unary(bit_writer *w, uint64_t zeros)
{
    rlc_store64(w->at, w->held);
    w->bits += zeros;
    w->at += w->bits >> 3;
    w->held = w->bits >> 3 ? 0 : w->held;
    w->bits &= 7;
    append(w, 1, 1);
}

/* `low` has room for m * k bits and RLC_SLACK. Several gaps are put together before they join the stream. */
RLC_INLINE void write_low(const uint32_t *gaps, uint64_t m, int k, uint8_t *low)
{
    const uint64_t mask = ((uint64_t)1 << k) - 1;
    bit_writer w = {low, 0, 0};
    uint64_t i = 0;
    if (k <= 14)
        for (; i + 4 <= m; i += 4) {
            uint64_t two = (gaps[i] & mask) | (gaps[i + 1] & mask) << k, more = (gaps[i + 2] & mask) | (gaps[i + 3] & mask) << k;
            append(&w, two | more << 2 * k, 4 * (uint64_t)k);
        }
    for (; i < m; i++) append(&w, gaps[i] & mask, (uint64_t)k);
}

/* `unary` is zero, and RLC_SLACK bytes longer than it needs. Four short codes are put together before they join. */
RLC_INLINE void write_unary(const uint32_t *gaps, uint64_t m, int k, uint8_t *unary)
{
    bit_writer w = {unary, 0, 0};
    uint64_t i = 0;
    while (i < m) {
        if (i + 4 <= m) {
            uint64_t a = gaps[i] >> k, b = a + 1 + (gaps[i + 1] >> k), c = b + 1 + (gaps[i + 2] >> k);
            uint64_t d = c + 1 + (gaps[i + 3] >> k);
            if (d < 56) {
                append(&w, (uint64_t)1 << a | (uint64_t)1 << b | (uint64_t)1 << c | (uint64_t)1 << d, d + 1);
                i += 4;
                continue;
            }
        }
        append_unary(&w, gaps[i++] >> k);
    }
}

/* Symbols from values; returns the number of escapes. news is overwritten with the zigzagged steps. */
RLC_INLINE uint64_t make_symbols(const uint16_t *olds, uint16_t *news, uint64_t m, uint8_t *symbols, uint16_t *escapes)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < m; i++) {
        uint16_t step = (uint16_t)(rlc_line(news[i]) - rlc_line(olds[i]));
        uint16_t zigzag = (uint16_t)((step << 1) ^ (0 - (step >> 15)));
        news[i] = (uint16_t)(zigzag - 1);
        symbols[i] = (uint8_t)(news[i] < RLC_ESCAPE ? news[i] : RLC_ESCAPE);
        escapes[count] = news[i];
        count += news[i] >= RLC_ESCAPE;
    }
    return count;
}

#if RLC_X86
/* -- packing with AVX2: the same bytes, eight changes a step ---------------------------------------------------------- */

RLC_AVX2 static int gaps_and_k_avx2(const uint32_t *positions, uint64_t m, uint32_t *gaps, uint64_t *unary_bits)
{
    return gaps_and_k(positions, m, gaps, unary_bits);
}

RLC_AVX2 static inline __m256i load256(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

RLC_AVX2 static inline uint64_t or_lanes(__m256i x)
{
    __m128i y = _mm_or_si128(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    return (uint64_t)_mm_cvtsi128_si64(_mm_or_si128(y, _mm_unpackhi_epi64(y, y)));
}

/* Sums of each number and those before it. */
RLC_AVX2 static inline __m256i running_sums(__m256i x)
{
    x = _mm256_add_epi32(x, _mm256_slli_si256(x, 4));
    x = _mm256_add_epi32(x, _mm256_slli_si256(x, 8));
    return _mm256_add_epi32(x, _mm256_shuffle_epi32(_mm256_permute2x128_si256(x, x, 0x08), 0xFF));
}

RLC_AVX2 static void write_low_avx2(const uint32_t *gaps, uint64_t m, int k, uint8_t *low)
{
    if (!k) return;
    if (k > 14) {
        write_low(gaps, m, k, low);
        return;
    }
    const __m256i mask = _mm256_set1_epi32((1 << k) - 1), pair = _mm256_set1_epi64x(((int64_t)1 << 2 * k) - 1);
    const __m256i lanes = _mm256_setr_epi64x(0, 2 * k, 0, 2 * k);
    const __m128i join = _mm_cvtsi32_si128(32 - k);
    bit_writer w = {low, 0, 0};
    uint64_t i = 0, width = 4 * (uint64_t)k;
    for (; i + 8 <= m; i += 8) {
        __m256i v = _mm256_and_si256(load256(gaps + i), mask);
        v = _mm256_sllv_epi64(_mm256_and_si256(_mm256_or_si256(v, _mm256_srl_epi64(v, join)), pair), lanes);
        v = _mm256_or_si256(v, _mm256_unpackhi_epi64(v, v)); /* four gaps in the lower half of each 128 bits */
        uint64_t a = (uint64_t)_mm_cvtsi128_si64(_mm256_castsi256_si128(v));
        uint64_t b = (uint64_t)_mm_cvtsi128_si64(_mm256_extracti128_si256(v, 1));
        if (k <= 7)
            append(&w, a | b << width, 2 * width);
        else {
            append(&w, a, width);
            append(&w, b, width);
        }
    }
    for (; i < m; i++) append(&w, gaps[i] & (((uint64_t)1 << k) - 1), (uint64_t)k);
}

RLC_AVX2 static void write_unary_avx2(const uint32_t *gaps, uint64_t m, int k, uint8_t *unary)
{
    const __m128i shift = _mm_cvtsi32_si128(k);
    const __m256i one = _mm256_set1_epi64x(1);
    bit_writer w = {unary, 0, 0};
    uint64_t i = 0;
    for (; i + 8 <= m; i += 8) {
        __m256i ends = running_sums(_mm256_add_epi32(_mm256_srl_epi32(load256(gaps + i), shift), _mm256_set1_epi32(1)));
        uint32_t bits = (uint32_t)_mm256_extract_epi32(ends, 7);
        if (bits > 56) { /* rare: k is near the mean gap */
            for (int j = 0; j < 8; j++) append_unary(&w, gaps[i + (uint64_t)j] >> k);
            continue;
        }
        __m256i a = _mm256_sllv_epi64(one, _mm256_cvtepu32_epi64(_mm256_castsi256_si128(ends)));
        __m256i b = _mm256_sllv_epi64(one, _mm256_cvtepu32_epi64(_mm256_extracti128_si256(ends, 1)));
        append(&w, or_lanes(_mm256_or_si256(a, b)) >> 1, bits);
    }
    for (; i < m; i++) append_unary(&w, gaps[i] >> k);
}

RLC_AVX2 static inline __m256i on_line(__m256i x)
{
    return _mm256_xor_si256(x, _mm256_srli_epi16(_mm256_srai_epi16(x, 15), 1));
}

RLC_AVX2 static inline __m256i zigzag_less_one(const uint16_t *olds, const uint16_t *news)
{
    __m256i step = _mm256_sub_epi16(on_line(load256(news)), on_line(load256(olds)));
    __m256i zigzag = _mm256_xor_si256(_mm256_add_epi16(step, step), _mm256_srai_epi16(step, 15));
    return _mm256_sub_epi16(zigzag, _mm256_set1_epi16(1));
}

RLC_AVX2 static uint64_t make_symbols_avx2(const uint16_t *olds, uint16_t *news, uint64_t m, uint8_t *symbols,
                                           uint16_t *escapes)
{
    const __m256i most = _mm256_set1_epi16(RLC_ESCAPE), all = _mm256_set1_epi8(-1);
    uint64_t count = 0, i = 0;
    for (; i + 32 <= m; i += 32) {
        __m256i a = zigzag_less_one(olds + i, news + i), b = zigzag_less_one(olds + i + 16, news + i + 16);
        __m256i bytes = _mm256_packus_epi16(_mm256_min_epu16(a, most), _mm256_min_epu16(b, most));
        bytes = _mm256_permute4x64_epi64(bytes, 0xD8);
        _mm256_storeu_si256((__m256i *)(symbols + i), bytes);
        uint32_t large = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, all));
        if (!large) continue;
        _mm256_storeu_si256((__m256i *)(news + i), a);
        _mm256_storeu_si256((__m256i *)(news + i + 16), b);
        for (; large; large &= large - 1) escapes[count++] = news[i + (uint64_t)__builtin_ctz(large)];
    }
    return count + make_symbols(olds + i, news + i, m - i, symbols + i, escapes + count);
}
#endif

/* Where this CPU has AVX2, by the twin that uses it. */
#if RLC_X86
#define RLC_BEST(portable, with_avx2) (rlc_level() >= RLC_LEVEL_AVX2 ? with_avx2 : portable)
#define RLC_UNUSED
#else
#define RLC_BEST(portable, with_avx2) portable
#define RLC_UNUSED __attribute__((unused))
#endif

/* news are used up. */
static int64_t pack(const uint32_t *positions, const uint16_t *olds, uint16_t *news, uint64_t m, uint8_t *out,
                    uint64_t capacity, scratch *s, scratch *g)
{
    if (!m) return 0;
    uint64_t unary_bits;
    uint32_t *gaps = (uint32_t *)scratch_for(g, 4 * m);
    if (!gaps) return RLC_MEMORY;
    int k = RLC_BEST(gaps_and_k(positions, m, gaps, &unary_bits), gaps_and_k_avx2(positions, m, gaps, &unary_bits));
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
    RLC_BEST(write_low(gaps, m, k, low), write_low_avx2(gaps, m, k, low));
    RLC_BEST(write_unary(gaps, m, k, unary), write_unary_avx2(gaps, m, k, unary));
    uint64_t escaped = RLC_BEST(make_symbols(olds, news, m, symbols, escapes),
                                make_symbols_avx2(olds, news, m, symbols, escapes));
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

#if RLC_X86
/* The same, eight at a time. `ends` has room for 1 + m + 64 numbers; the words of `base` that change are fetched meanwhile. */
RLC_AVX2 static int read_gaps_avx2(const uint8_t *low, const uint64_t *unary, uint64_t words, uint64_t unary_bytes, int k,
                                   uint64_t m, uint64_t elements, uint32_t *positions, uint32_t *ends, const uint8_t *base)
{
    if (k > 14) return read_gaps(low, unary, words, unary_bytes, k, m, elements, positions);
    uint64_t i = 0, bit = 0;
    *ends++ = UINT32_MAX; /* ends[i] is the place of the i-th one, ends[-1] that before the first */
    for (uint64_t w = 0; w < words; w++) {
        uint64_t held = unary[w], count = (uint64_t)__builtin_popcountll(held);
        if (count > m - i) return 0;
        for (uint64_t b = 0; b < count; b += 8)
            for (uint64_t j = 0; j < 8; j++) {
                ends[i + b + j] = (uint32_t)(64 * w + _tzcnt_u64(held));
                held &= held - 1;
            }
        i += count;
    }
    if (i != m || ((uint64_t)ends[m - 1] + 8) / 8 != unary_bytes) return 0;
    if (((uint64_t)ends[m - 1] + 1 - m) << k >= elements) return 0; /* what is added below is less than 2^25 a step */

    const __m256i one = _mm256_set1_epi32(1), last = _mm256_set1_epi32(7), lanes = _mm256_setr_epi64x(0, 2 * k, 0, 2 * k);
    const __m256i lower = _mm256_set1_epi64x(((int64_t)1 << k) - 1), upper = _mm256_slli_epi64(lower, 32);
    const __m128i shift = _mm_cvtsi32_si128(k), apart = _mm_cvtsi32_si128(32 - k);
    __m256i next = _mm256_setzero_si256(), any = next; /* next: the next position that is free */
    for (i = 0; i + 8 <= m; i += 8, bit += 8 * (uint64_t)k) {
        uint64_t more = bit + 4 * (uint64_t)k;
        uint64_t a = rlc_load64(low + (bit >> 3)) >> (bit & 7), b = rlc_load64(low + (more >> 3)) >> (more & 7);
        __m256i v = _mm256_srlv_epi64(_mm256_setr_epi64x((int64_t)a, (int64_t)a, (int64_t)b, (int64_t)b), lanes);
        v = _mm256_or_si256(_mm256_and_si256(v, lower), _mm256_and_si256(_mm256_sll_epi64(v, apart), upper));
        __m256i length = _mm256_sub_epi32(load256(ends + i), load256(ends + i - 1));
        v = _mm256_add_epi32(v, _mm256_sll_epi32(_mm256_sub_epi32(length, one), shift));
        v = _mm256_add_epi32(next, running_sums(_mm256_add_epi32(v, one)));
        any = _mm256_or_si256(any, v);
        next = _mm256_permutevar8x32_epi32(v, last);
        _mm256_storeu_si256((__m256i *)(positions + i), _mm256_sub_epi32(v, one));
        if (base)
            for (uint64_t j = i; j < i + 8; j++) __builtin_prefetch(base + 2 * (uint64_t)positions[j], 1, 2);
    }
    if (_mm256_movemask_ps(_mm256_castsi256_ps(any))) return 0; /* beyond 2^31: perhaps no longer ascending */
    uint64_t at = (uint32_t)_mm256_cvtsi256_si32(next), mask = ((uint64_t)1 << k) - 1;
    for (; i < m; i++, bit += (uint64_t)k) {
        at += (uint64_t)(ends[i] - *(ends + i - 1) - 1) << k | ((rlc_load64(low + (bit >> 3)) >> (bit & 7)) & mask);
        positions[i] = (uint32_t)at++;
    }
    return at <= elements;
}
#endif

RLC_INLINE uint16_t step_of(uint16_t symbol)
{
    uint16_t zigzag = (uint16_t)(symbol + 1);
    return (uint16_t)((zigzag >> 1) ^ (0 - (zigzag & 1)));
}

/* The values of the symbols that are escapes, one after the other. */
typedef struct {
    const uint8_t *at;
    uint64_t left;
} escape_reader;

RLC_INLINE int take_escape(escape_reader *escapes, uint16_t *step)
{
    if (!escapes->left) return 0;
    uint16_t value = rlc_load16(escapes->at);
    escapes->at += 2;
    escapes->left--;
    *step = step_of(value);
    return value >= RLC_ESCAPE && value <= RLC_LARGEST;
}

/* Steps from symbols; 0 unless the escapes are as many as their symbols, and all of them large. */
RLC_INLINE int make_steps(const uint8_t *symbols, uint64_t m, escape_reader *escapes, uint16_t *steps)
{
    for (uint64_t i = 0; i < m; i++) {
        steps[i] = step_of(symbols[i]);
        if (symbols[i] == RLC_ESCAPE && !take_escape(escapes, &steps[i])) return 0;
    }
    return !escapes->left;
}

#if RLC_X86
RLC_AVX2 static int make_steps_avx2(const uint8_t *symbols, uint64_t m, escape_reader *escapes, uint16_t *steps)
{
    const __m256i one = _mm256_set1_epi16(1), all = _mm256_set1_epi8(-1);
    uint64_t i = 0;
    for (; i + 32 <= m; i += 32) {
        for (uint64_t j = i; j < i + 32; j += 16) {
            __m256i zigzag = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(symbols + j)));
            zigzag = _mm256_add_epi16(zigzag, one);
            __m256i sign = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_and_si256(zigzag, one));
            _mm256_storeu_si256((__m256i *)(steps + j), _mm256_xor_si256(_mm256_srli_epi16(zigzag, 1), sign));
        }
        uint32_t large = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(load256(symbols + i), all));
        for (; large; large &= large - 1)
            if (!take_escape(escapes, &steps[i + (uint64_t)__builtin_ctz(large)])) return 0;
    }
    return make_steps(symbols + i, m - i, escapes, steps + i);
}
#endif

/* `base`: the words that will change, to be fetched; or NULL. */
static int64_t unpack(const uint8_t *data, uint64_t length, uint64_t elements, uint32_t *positions, uint16_t *steps,
                      uint64_t room, scratch *s, RLC_UNUSED const uint8_t *base)
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
    size_t ends_room = (4 * (1 + m + RLC_SLACK) + 63) / 64 * 64;
    uint8_t *memory = scratch_for(s, unary_room + low_room + ends_room + m + RLC_SLACK);
    if (!memory) return RLC_MEMORY;
    uint64_t *unary = (uint64_t *)memory;
    uint8_t *low = memory + unary_room, *symbols = low + low_room + ends_room;
    RLC_UNUSED uint32_t *ends = (uint32_t *)(low + low_room);
    const uint8_t *p = data + RLC_SPARSE_HEADER;
    memcpy(low, p, low_bytes);
    memset(low + low_bytes, 0, RLC_SLACK);
    p += low_bytes;
    unary[words - 1] = 0;
    memcpy(unary, p, unary_bytes);
    p += unary_bytes;
    if (!RLC_BEST(read_gaps(low, unary, words, unary_bytes, (int)k, m, elements, positions),
                  read_gaps_avx2(low, unary, words, unary_bytes, (int)k, m, elements, positions, ends, base)))
        return RLC_FORMAT;
    int code = rlc_stream_decode(p, step_bytes, mode, symbols, m);
    if (code) return code;
    escape_reader escapes = {p + step_bytes, escaped};
    if (!RLC_BEST(make_steps(symbols, m, &escapes, steps), make_steps_avx2(symbols, m, &escapes, steps))) return RLC_FORMAT;
    return (int64_t)m;
}

int64_t rlc_sparse_decode(const uint8_t *data, uint64_t length, uint64_t elements, uint32_t *positions, int16_t *steps,
                          uint64_t room)
{
    scratch s = {0, 0};
    if (elements > (uint64_t)1 << RLC_MAX_LOG) return RLC_FORMAT;
    int64_t result = unpack(data, length, elements, positions, (uint16_t *)steps, room, &s, 0);
    free(s.memory);
    return result;
}

RLC_INLINE void advance(uint8_t *p, uint16_t step, int sign)
{
    uint16_t at = rlc_line(rlc_load16(p));
    rlc_store16(p, rlc_line((uint16_t)(sign < 0 ? at - step : at + step)));
}

RLC_INLINE void scatter_by(int sign, uint8_t *base, const uint32_t *positions, const uint16_t *steps, uint64_t m)
{
    uint64_t i = 0;
    for (; i + 32 < m; i++) {
        __builtin_prefetch(base + 2 * (uint64_t)positions[i + 32], 1);
        advance(base + 2 * (uint64_t)positions[i], steps[i], sign);
    }
    for (; i < m; i++) advance(base + 2 * (uint64_t)positions[i], steps[i], sign);
}

static void scatter(uint8_t *base, const uint32_t *positions, const uint16_t *steps, uint64_t m, int sign)
{
    if (sign < 0) scatter_by(-1, base, positions, steps, m);
    else scatter_by(1, base, positions, steps, m);
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
        uint8_t *begin = (uint8_t *)base + 2 * (segment << log);
        result = unpack(data + at, size, count, positions, steps, m, &s, begin);
        if (result < 0) break;
        scatter(begin, positions, steps, m, sign);
        at += size;
        total += m;
    }
    if (result >= 0 && at != length) result = RLC_FORMAT;
    free(s.memory);
    free(changes.memory);
    return result < 0 ? result : (int64_t)total;
}
