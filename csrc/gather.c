/* Compare and gather: the positions where two arrays of 16-bit words differ, with both values. */
#include "delta.h"

#if RLC_X86
#include <immintrin.h>
#endif

RLC_INLINE uint64_t take(uint64_t m, uint64_t at, const uint8_t *old, const uint8_t *new_, uint32_t *positions,
                         uint16_t *olds, uint16_t *news)
{
    positions[m] = (uint32_t)at;
    olds[m] = rlc_load16(old + 2 * at);
    news[m] = rlc_load16(new_ + 2 * at);
    return m + 1;
}

RLC_INLINE uint64_t gather_tail(uint64_t i, uint64_t n, uint64_t m, const uint8_t *old, const uint8_t *new_,
                                uint32_t *positions, uint16_t *olds, uint16_t *news)
{
    for (; i + 4 <= n; i += 4)
        if (rlc_load64(old + 2 * i) != rlc_load64(new_ + 2 * i))
            for (uint64_t j = i; j < i + 4; j++)
                if (rlc_load16(old + 2 * j) != rlc_load16(new_ + 2 * j)) m = take(m, j, old, new_, positions, olds, news);
    for (; i < n; i++)
        if (rlc_load16(old + 2 * i) != rlc_load16(new_ + 2 * i)) m = take(m, i, old, new_, positions, olds, news);
    return m;
}

#if RLC_X86
/* In chunks that stay in the first cache: masks of what differs, without a branch; positions from the masks that are not
 * empty, four or eight at a time and too many rather than by the bit (Langdale and Lemire 2019); then the values, of one array
 * after the other: lines of both may not fit into the first cache side by side, where their addresses are alike. Meanwhile
 * what comes next is fetched. */
enum { CHUNK = 512, AHEAD = 1024 };

RLC_AVX2 __attribute__((always_inline)) static inline uint64_t flatten_by(int step, const uint64_t *masks,
                                                                          const uint32_t *begins, uint64_t used, uint64_t m,
                                                                          uint32_t *positions)
{
    for (uint64_t j = 0; j < used; j++) {
        uint64_t mask = masks[j], found = (uint64_t)__builtin_popcountll(mask);
        uint32_t *p = positions + m;
        for (;;) {
            for (int b = 0; b < step; b++) {
                p[b] = begins[j] + (uint32_t)_tzcnt_u64(mask);
                mask &= mask - 1;
            }
            if (!mask) break;
            p += step;
        }
        m += found;
    }
    return m;
}

RLC_AVX2 static inline void fetch_chunk(const uint8_t *p)
{
    for (int line = 0; line < 2 * CHUNK; line += 64) __builtin_prefetch(p + line);
}

RLC_AVX2 static inline void take_values(const uint8_t *from, const uint32_t *positions, uint64_t m, uint16_t *values)
{
    for (uint64_t j = 0; j < m; j++) values[j] = rlc_load16(from + 2 * (uint64_t)positions[j]);
}

/* The chunk at `at`: its `used` masks, of which `differ` bits are set. */
RLC_AVX2 static inline uint64_t flatten(const uint64_t *masks, const uint32_t *begins, uint64_t used, uint64_t differ,
                                        uint64_t at, uint64_t m, const uint8_t *old, const uint8_t *new_,
                                        uint32_t *positions, uint16_t *olds, uint16_t *news)
{
    if (!used) return m;
    fetch_chunk(old + 2 * (at + AHEAD));
    if (differ > 4 * used) flatten_by(8, masks, begins, used, m, positions);
    else flatten_by(4, masks, begins, used, m, positions);
    fetch_chunk(new_ + 2 * (at + AHEAD));
    take_values(old, positions + m, differ, olds + m);
    take_values(new_, positions + m, differ, news + m);
    return m + differ;
}

RLC_AVX2 static uint64_t gather_avx2(const uint8_t *old, const uint8_t *new_, uint64_t n, uint32_t *positions,
                                     uint16_t *olds, uint16_t *news)
{
    uint64_t masks[CHUNK / 64], i = 0, m = 0;
    uint32_t begins[CHUNK / 64];
    for (; i + CHUNK <= n; i += CHUNK) {
        uint64_t used = 0, differ = 0;
        for (uint64_t at = i; at < i + CHUNK; at += 64) {
            uint64_t mask = 0;
            for (int half = 0; half < 2; half++) {
                const uint8_t *a = old + 2 * at + 64 * half, *b = new_ + 2 * at + 64 * half;
                __m256i p = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)a), _mm256_loadu_si256((const __m256i *)b));
                __m256i q = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)(a + 32)),
                                               _mm256_loadu_si256((const __m256i *)(b + 32)));
                __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(p, q), 0xD8);
                mask |= (uint64_t)(uint32_t)~_mm256_movemask_epi8(both) << (32 * half);
            }
            masks[used] = mask;
            begins[used] = (uint32_t)at;
            used += mask != 0;
            differ += (uint64_t)__builtin_popcountll(mask);
        }
        m = flatten(masks, begins, used, differ, i, m, old, new_, positions, olds, news);
    }
    return gather_tail(i, n, m, old, new_, positions, olds, news);
}

RLC_AVX512 static uint64_t gather_avx512(const uint8_t *old, const uint8_t *new_, uint64_t n, uint32_t *positions,
                                         uint16_t *olds, uint16_t *news)
{
    uint64_t masks[CHUNK / 64], i = 0, m = 0;
    uint32_t begins[CHUNK / 64];
    for (; i + CHUNK <= n; i += CHUNK) {
        uint64_t used = 0, differ = 0;
        for (uint64_t at = i; at < i + CHUNK; at += 64) {
            const uint8_t *a = old + 2 * at, *b = new_ + 2 * at;
            uint64_t mask =
                (uint64_t)_mm512_cmpneq_epi16_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b)) |
                (uint64_t)_mm512_cmpneq_epi16_mask(_mm512_loadu_si512(a + 64), _mm512_loadu_si512(b + 64)) << 32;
            masks[used] = mask;
            begins[used] = (uint32_t)at;
            used += mask != 0;
            differ += (uint64_t)__builtin_popcountll(mask);
        }
        m = flatten(masks, begins, used, differ, i, m, old, new_, positions, olds, news);
    }
    return gather_tail(i, n, m, old, new_, positions, olds, news);
}
#endif

int64_t rlc_sparse_gather(const void *old, const void *new_, uint64_t n, uint32_t *positions, uint16_t *olds,
                          uint16_t *news)
{
#if RLC_X86
    if (rlc_level() == RLC_LEVEL_AVX512) return (int64_t)gather_avx512(old, new_, n, positions, olds, news);
    if (rlc_level() == RLC_LEVEL_AVX2) return (int64_t)gather_avx2(old, new_, n, positions, olds, news);
#endif
    return (int64_t)gather_tail(0, n, 0, old, new_, positions, olds, news);
}
