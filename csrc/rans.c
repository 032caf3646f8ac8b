/* Byte streams: raw, constant, or order-0 rANS (Duda 2013; 32 interleaved states as in Giesen 2014).
 *
 * A rANS stream:  32 bytes bitmap of the symbols in use | u16 frequency of each, their sum 4096 | 32 states u32 | words u16
 * Symbol i belongs to state i % 32. A state is in [2^16, 2^32) between symbols and takes one word when it falls below.
 * After the last symbol every state is 2^16 again and every word was taken: both are checked.
 */
#include "delta.h"

#if RLC_X86
#include <immintrin.h>
#endif

enum { LANES = 32, SCALE_BITS = 12, SCALE = 1 << SCALE_BITS, BITMAP = 32, LOW = 1 << 16 };

typedef struct {
    uint64_t reciprocal; /* floor(x / frequency) is the upper half of x * reciprocal */
    uint32_t start, complement, limit, unused;
} encoder_symbol;

size_t rlc_stream_bound(size_t count) { return count + 1; }

/* Frequencies with sum 4096, at least 1 for each symbol in use. The same integers as normalise() in reference_codec.py. */
static void normalise(const uint32_t *counts, size_t total, uint32_t *frequencies)
{
    int64_t sum = 0;
    for (int s = 0; s < 256; s++) {
        uint64_t f = (uint64_t)counts[s] * SCALE / total;
        frequencies[s] = counts[s] ? (uint32_t)(f ? f : 1) : 0;
        sum += frequencies[s];
    }
    while (sum != SCALE) {
        int top = 0;
        for (int s = 1; s < 256; s++)
            if (frequencies[s] > frequencies[top]) top = s;
        int64_t move = SCALE - sum, half = -(int64_t)(frequencies[top] / 2);
        if (move < half) move = half;
        frequencies[top] = (uint32_t)((int64_t)frequencies[top] + move);
        sum += move;
    }
}

#if RLC_X86
/* For each mask of eight lanes: which of the next words a lane takes; and the lanes of the mask, moved to the upper end. */
static uint32_t spread[256][8], gathered[256][8];

__attribute__((constructor)) static void fill_tables(void)
{
    for (int mask = 0; mask < 256; mask++) {
        int next = 0, slot = 8 - __builtin_popcount((unsigned)mask);
        for (int lane = 0; lane < 8; lane++) {
            spread[mask][lane] = (mask >> lane & 1) ? (uint32_t)next++ : 0;
            if (mask >> lane & 1) gathered[mask][slot++] = (uint32_t)lane;
        }
    }
}

/* Eight entries: single loads are faster than a gather where that is microcode, and no slower elsewhere. */
RLC_AVX2 static inline __m256i look_up(const uint32_t *table, const uint8_t *symbols)
{
    int entries[8];
    for (int lane = 0; lane < 8; lane++) entries[lane] = (int)table[symbols[lane]];
    return _mm256_setr_epi32(entries[0], entries[1], entries[2], entries[3], entries[4], entries[5], entries[6], entries[7]);
}

/* Whole groups, from the last to the first; `count` is a multiple of 32. Returns the new start of the words before `p`. */
RLC_AVX2 static uint8_t *encode_avx2(uint32_t *states, const uint32_t *frequencies, const uint8_t *symbols, size_t count,
                                     uint8_t *p)
{
    uint32_t packed[256];
    uint32_t start = 0;
    for (int s = 0; s < 256; s++) {
        packed[s] = start << 12 | frequencies[s];
        start += frequencies[s];
    }
    const __m256i low12 = _mm256_set1_epi32(SCALE - 1), low16 = _mm256_set1_epi32(0xFFFF), one = _mm256_set1_epi32(1);
    __m256i states8[4];
    for (int v = 0; v < 4; v++) states8[v] = _mm256_loadu_si256((const __m256i *)(states + 8 * v));
    while (count) {
        count -= LANES;
        for (int v = 3; v >= 0; v--) {
            __m256i entry = look_up(packed, symbols + count + 8 * v);
            __m256i f = _mm256_and_si256(entry, low12), below_f = _mm256_sub_epi32(f, one), x = states8[v];
            __m256i spill = _mm256_cmpgt_epi32(_mm256_srli_epi32(x, 20), below_f);
            unsigned mask = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(spill));
            __m256i words = _mm256_permutevar8x32_epi32(_mm256_and_si256(x, low16),
                                                        _mm256_loadu_si256((const __m256i *)gathered[mask]));
            words = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
            _mm_storeu_si128((__m128i *)(p - 16), _mm256_castsi256_si128(words));
            p -= 2 * (size_t)__builtin_popcount(mask);
            x = _mm256_blendv_epi8(x, _mm256_srli_epi32(x, 16), spill);
            /* x / f < 2^20. Half of x is off by at most a half, rounding by an eighth, and a quarter is taken away: what is cut
             * off is the quotient, or one less, never more. */
            __m256 quarter = _mm256_set1_ps(0.25f), half = _mm256_add_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(x, 1)), quarter);
            half = _mm256_div_ps(half, _mm256_cvtepi32_ps(f));
            __m256i q = _mm256_cvttps_epi32(_mm256_sub_ps(_mm256_add_ps(half, half), quarter));
            __m256i r = _mm256_sub_epi32(x, _mm256_mullo_epi32(q, f)), more = _mm256_cmpgt_epi32(r, below_f);
            q = _mm256_sub_epi32(q, more);
            r = _mm256_sub_epi32(r, _mm256_and_si256(more, f));
            states8[v] = _mm256_add_epi32(_mm256_slli_epi32(q, SCALE_BITS), _mm256_add_epi32(r, _mm256_srli_epi32(entry, 12)));
        }
    }
    for (int v = 0; v < 4; v++) _mm256_storeu_si256((__m256i *)(states + 8 * v), states8[v]);
    return p;
}
#endif

/* The first `count` symbols, from the last to the first. */
static uint8_t *encode_portable(uint32_t *states, const uint32_t *frequencies, const uint8_t *symbols, size_t count,
                                uint8_t *p)
{
    encoder_symbol table[256];
    uint32_t start = 0;
    for (int s = 0; s < 256; s++) {
        uint32_t f = frequencies[s];
        if (!f) continue;
        /* Exact for every x < 2^32. With f = 1 the quotient comes out one too small, which `start` makes up for. */
        table[s].reciprocal = f == 1 ? UINT64_MAX : UINT64_MAX / f + 1;
        table[s].start = f == 1 ? start + SCALE - 1 : start;
        table[s].complement = SCALE - f;
        table[s].limit = f << 20;
        start += f;
    }
    for (size_t i = count; i-- > 0;) {
        const encoder_symbol *t = &table[symbols[i]];
        uint32_t x = states[i % LANES];
        size_t spill = x >= t->limit;
        rlc_store16(p - 2, (uint16_t)x);
        p -= 2 * spill;
        x >>= 16 * spill;
        states[i % LANES] = x + t->start + (uint32_t)(((unsigned __int128)x * t->reciprocal) >> 64) * t->complement;
    }
    return p;
}

static size_t rans_encode(const uint8_t *symbols, size_t count, const uint32_t *counts, uint8_t *out, size_t limit,
                          uint8_t *scratch)
{
    uint32_t frequencies[256];
    uint32_t states[LANES];
    uint8_t header[BITMAP + 2 * 256];
    size_t used = BITMAP;

    normalise(counts, count, frequencies);
    memset(header, 0, BITMAP);
    for (int s = 0; s < 256; s++) {
        if (!frequencies[s]) continue;
        header[s >> 3] |= (uint8_t)(1u << (s & 7));
        rlc_store16(header + used, (uint16_t)frequencies[s]);
        used += 2;
    }
    if (used + 4 * LANES >= limit) return 0;
    for (int lane = 0; lane < LANES; lane++) states[lane] = LOW;

    uint8_t *end = scratch + 2 * count + RLC_SLACK, *p = end;
#if RLC_X86
    if (rlc_level() >= RLC_LEVEL_AVX2 && count >= LANES) {
        size_t whole = count - count % LANES;
        p = encode_portable(states, frequencies, symbols + whole, count - whole, p);
        p = encode_avx2(states, frequencies, symbols, whole, p);
    } else
#endif
        p = encode_portable(states, frequencies, symbols, count, p);
    size_t words = (size_t)(end - p), total = used + 4 * LANES + words;
    if (total >= limit) return 0;
    memcpy(out, header, used);
    memcpy(out + used, states, 4 * LANES);
    memcpy(out + used + 4 * LANES, p, words);
    return total;
}

size_t rlc_stream_encode(const uint8_t *symbols, size_t count, uint8_t *out, uint8_t *scratch, uint8_t *mode)
{
    uint32_t counts[4][256];
    size_t i = 0;
    int kinds = 0;
    memset(counts, 0, sizeof counts);
    for (; i + 4 <= count; i += 4) {
        counts[0][symbols[i]]++;
        counts[1][symbols[i + 1]]++;
        counts[2][symbols[i + 2]]++;
        counts[3][symbols[i + 3]]++;
    }
    for (; i < count; i++) counts[0][symbols[i]]++;
    for (int s = 0; s < 256; s++) {
        counts[0][s] += counts[1][s] + counts[2][s] + counts[3][s];
        kinds += counts[0][s] != 0;
    }
    if (kinds == 1) {
        *mode = RLC_MODE_CONSTANT;
        out[0] = symbols[0];
        return 1;
    }
    size_t length = count ? rans_encode(symbols, count, counts[0], out, count, scratch) : 0;
    if (length) {
        *mode = RLC_MODE_RANS;
        return length;
    }
    *mode = RLC_MODE_RAW;
    memcpy(out, symbols, count);
    return count;
}

/* A slot of the decoder's table: symbol << 24 | frequency << 12 | distance from the symbol's first slot. */
RLC_INLINE int step_state(uint32_t *state, const uint32_t *table, const uint8_t **words, const uint8_t *end, uint8_t *symbol)
{
    uint32_t x = *state, entry = table[x & (SCALE - 1)];
    *symbol = (uint8_t)(entry >> 24);
    x = ((entry >> 12) & 0xFFF) * (x >> SCALE_BITS) + (entry & 0xFFF);
    if (x < LOW) {
        if (end - *words < 2) return RLC_TRUNCATED;
        x = x << 16 | rlc_load16(*words);
        *words += 2;
    }
    *state = x;
    return 0;
}

#if RLC_X86
/* Whole groups while 64 bytes of words (the most a group can take) and 16 more (the width of a load) are left. */
RLC_AVX2 static size_t decode_avx2(uint32_t *states, const uint32_t *table, const uint8_t **words, const uint8_t *end,
                                   uint8_t *symbols, size_t count)
{
    const __m256i slots = _mm256_set1_epi32(SCALE - 1), zero = _mm256_setzero_si256();
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const uint8_t *p = *words;
    size_t done = 0;
    __m256i x[4];
    for (int v = 0; v < 4; v++) x[v] = _mm256_loadu_si256((const __m256i *)(states + 8 * v));
    while (count - done >= LANES && end - p >= 2 * LANES + 16) {
        __m256i found[4];
        __m256i low[4];
        for (int v = 0; v < 4; v++) {
            __m256i entry = _mm256_i32gather_epi32((const int *)table, _mm256_and_si256(x[v], slots), 4);
            __m256i frequency = _mm256_and_si256(_mm256_srli_epi32(entry, 12), slots);
            found[v] = _mm256_srli_epi32(entry, 24);
            x[v] = _mm256_add_epi32(_mm256_mullo_epi32(frequency, _mm256_srli_epi32(x[v], SCALE_BITS)),
                                    _mm256_and_si256(entry, slots));
            low[v] = _mm256_cmpeq_epi32(_mm256_srli_epi32(x[v], 16), zero);
        }
        for (int v = 0; v < 4; v++) {
            unsigned mask = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(low[v]));
            __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
            next = _mm256_permutevar8x32_epi32(next, _mm256_loadu_si256((const __m256i *)spread[mask]));
            x[v] = _mm256_blendv_epi8(x[v], _mm256_or_si256(_mm256_slli_epi32(x[v], 16), next), low[v]);
            p += 2 * (size_t)__builtin_popcount(mask);
        }
        __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(found[0], found[1]), _mm256_packus_epi32(found[2], found[3]));
        _mm256_storeu_si256((__m256i *)(symbols + done), _mm256_permutevar8x32_epi32(bytes, order));
        done += LANES;
    }
    for (int v = 0; v < 4; v++) _mm256_storeu_si256((__m256i *)(states + 8 * v), x[v]);
    *words = p;
    return done;
}
#endif

static int rans_decode(const uint8_t *data, size_t length, uint8_t *symbols, size_t count)
{
    uint32_t table[SCALE];
    uint32_t states[LANES];
    size_t used = BITMAP;
    uint32_t start = 0;

    if (length < BITMAP) return RLC_TRUNCATED;
    for (uint32_t s = 0; s < 256; s++) {
        if (!(data[s >> 3] >> (s & 7) & 1)) continue;
        if (length - used < 2) return RLC_TRUNCATED;
        uint32_t f = rlc_load16(data + used);
        used += 2;
        if (f == 0 || f >= SCALE || f > SCALE - start) return RLC_FORMAT;
        for (uint32_t slot = 0; slot < f; slot++) table[start + slot] = s << 24 | f << 12 | slot;
        start += f;
    }
    if (start != SCALE) return RLC_FORMAT;
    if (length - used < 4 * LANES) return RLC_TRUNCATED;
    memcpy(states, data + used, 4 * LANES);
    for (int lane = 0; lane < LANES; lane++)
        if (states[lane] < LOW) return RLC_FORMAT;

    const uint8_t *words = data + used + 4 * LANES, *end = data + length;
    size_t i = 0;
#if RLC_X86
    if (rlc_level() >= RLC_LEVEL_AVX2) i = decode_avx2(states, table, &words, end, symbols, count);
#endif
    for (; i < count; i++)
        if (step_state(&states[i % LANES], table, &words, end, &symbols[i])) return RLC_TRUNCATED;
    if (words != end) return RLC_FORMAT;
    for (int lane = 0; lane < LANES; lane++)
        if (states[lane] != LOW) return RLC_FORMAT;
    return 0;
}

int rlc_stream_decode(const uint8_t *data, size_t length, int mode, uint8_t *symbols, size_t count)
{
    switch (mode) {
    case RLC_MODE_RAW:
        if (length != count) return RLC_TRUNCATED;
        memcpy(symbols, data, count);
        return 0;
    case RLC_MODE_CONSTANT:
        if (length != 1) return RLC_TRUNCATED;
        memset(symbols, data[0], count);
        return 0;
    case RLC_MODE_RANS: return rans_decode(data, length, symbols, count);
    default: return RLC_FORMAT;
    }
}
