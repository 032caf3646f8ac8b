/* Weight deltas: the native twin of orchestrator/transfer/delta (its format.py describes the bytes).
 *
 * Guarantees
 *   - Byte for byte what the NumPy reference writes, and the same verdict on what it reads.
 *   - No input, however damaged, makes a decoder read or write outside the buffers it was given: every count and length
 *     is checked against the bytes at hand before memory is taken or touched. Checksums are the caller's.
 *   - A decoder that fails has written whole segments only; *done says how many, so that the caller can take them back.
 *   - No global state but the chosen instruction set; every function may run in many threads at once.
 * Little-endian machines only. Positions and sizes count elements, lengths count bytes.
 */
#ifndef RLC_DELTA_H
#define RLC_DELTA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the delta format is read and written on little-endian machines only"
#endif

#if defined(__x86_64__) && !defined(RLC_PORTABLE_ONLY) && (defined(__GNUC__) || defined(__clang__))
#define RLC_X86 1
#define RLC_AVX2 __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt")))
#define RLC_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,bmi,bmi2,lzcnt,popcnt")))
#else
#define RLC_X86 0
#endif
#define RLC_INLINE static inline __attribute__((always_inline))
#define RLC_API __attribute__((visibility("default")))

enum { RLC_ABI = 1 };
enum { RLC_PORTABLE = 0, RLC_LEVEL_AVX2 = 1, RLC_LEVEL_AVX512 = 2 };
/* What a negative result means. */
enum { RLC_CAPACITY = -1, RLC_MEMORY = -2, RLC_TRUNCATED = -3, RLC_FORMAT = -4 };

enum { RLC_MIN_LOG = 12, RLC_MAX_LOG = 24, RLC_MAX_RICE = 24 };
enum { RLC_SPARSE_HEADER = 20, RLC_PLANE_HEADER = 8 };
enum { RLC_MODE_RAW = 0, RLC_MODE_CONSTANT = 1, RLC_MODE_RANS = 2 };
enum { RLC_ESCAPE = 255, RLC_LARGEST = 65534 };
enum { RLC_SLACK = 64 }; /* bytes that inner loops may write or read behind a scratch buffer */

/* -- instruction sets ---------------------------------------------------------------------------------------------- */
RLC_API int rlc_delta_abi(void);
RLC_API int rlc_delta_best(void);         /* the best level of this CPU */
RLC_API int rlc_delta_use(int level);     /* at most the best; returns the level now in use */
int rlc_level(void);

/* -- byte streams (rans.c) ----------------------------------------------------------------------------------------- */
/* Scratch of an encoder: at least 2 * count + RLC_SLACK bytes. */
size_t rlc_stream_encode(const uint8_t *symbols, size_t count, uint8_t *out, uint8_t *scratch, uint8_t *mode);
size_t rlc_stream_bound(size_t count);
/* 0 or a negative code. `symbols` has room for count + RLC_SLACK. */
int rlc_stream_decode(const uint8_t *data, size_t length, int mode, uint8_t *symbols, size_t count);

/* -- sparse segments (sparse.c) ------------------------------------------------------------------------------------ */
/* Positions where two arrays of 16-bit words differ. positions, olds, news: room for count + RLC_SLACK. */
RLC_API int64_t rlc_sparse_gather(const void *old, const void *new_, uint64_t count, uint32_t *positions, uint16_t *olds,
                                  uint16_t *news);
/* Segments [first, last) of `elements` words cut into pieces of 1 << log; lengths has last - first entries.
 * Returns the bytes written. *changed is the number of words that differ. */
RLC_API int64_t rlc_sparse_encode(const void *old, const void *new_, uint64_t elements, int log, uint64_t first,
                                  uint64_t last, uint8_t *out, uint64_t capacity, uint32_t *lengths, uint64_t *changed);
/* The same from what was gathered elsewhere: `count` sorted positions inside segments [first, last), and steps, none 0. */
RLC_API int64_t rlc_sparse_encode_steps(const int64_t *positions, const int16_t *steps, uint64_t count, uint64_t elements,
                                        int log, uint64_t first, uint64_t last, uint8_t *out, uint64_t capacity,
                                        uint32_t *lengths);
/* One segment of `elements` words into positions and steps (room for `room` entries); returns their number. */
RLC_API int64_t rlc_sparse_decode(const uint8_t *data, uint64_t length, uint64_t elements, uint32_t *positions,
                                  int16_t *steps, uint64_t room);
/* Segments [first, last), whose bytes follow one another in data; base is the whole array. sign -1 takes steps back. */
RLC_API int64_t rlc_sparse_apply(const uint8_t *data, uint64_t length, const uint32_t *lengths, uint64_t elements, int log,
                                 uint64_t first, uint64_t last, void *base, int sign, uint64_t *done);

/* -- byte planes (planes.c) ---------------------------------------------------------------------------------------- */
/* `old` may be NULL: planes of the values themselves, else of old XOR new. Elements of width 1, 2, 4 or 8 bytes. */
RLC_API int64_t rlc_planes_encode(const uint8_t *old, const uint8_t *new_, uint64_t elements, int width, int log,
                                  uint64_t first, uint64_t last, uint8_t *out, uint64_t capacity, uint32_t *lengths);
RLC_API int64_t rlc_planes_apply(const uint8_t *data, uint64_t length, const uint32_t *lengths, uint64_t elements,
                                 int width, int log, uint64_t first, uint64_t last, uint8_t *base, int xor_,
                                 uint64_t *done);

/* -- unaligned little-endian access -------------------------------------------------------------------------------- */
RLC_INLINE uint16_t rlc_load16(const void *p) { uint16_t v; memcpy(&v, p, 2); return v; }
RLC_INLINE uint32_t rlc_load32(const void *p) { uint32_t v; memcpy(&v, p, 4); return v; }
RLC_INLINE uint64_t rlc_load64(const void *p) { uint64_t v; memcpy(&v, p, 8); return v; }
RLC_INLINE void rlc_store16(void *p, uint16_t v) { memcpy(p, &v, 2); }
RLC_INLINE void rlc_store32(void *p, uint32_t v) { memcpy(p, &v, 4); }
RLC_INLINE void rlc_store64(void *p, uint64_t v) { memcpy(p, &v, 8); }

/* bf16 bits on the monotone integer line: negative numbers are mirrored, -0 is just below +0. Its own inverse. */
RLC_INLINE uint16_t rlc_line(uint16_t x) { return (uint16_t)(x ^ (uint32_t)(int32_t)(int16_t)x >> 17); }

RLC_INLINE uint64_t rlc_segment_elements(uint64_t elements, int log, uint64_t segment)
{
    uint64_t rest = elements - (segment << log), full = (uint64_t)1 << log;
    return rest < full ? rest : full;
}

RLC_INLINE int rlc_range_ok(uint64_t elements, int log, uint64_t first, uint64_t last)
{
    if (log < RLC_MIN_LOG || log > RLC_MAX_LOG || first > last || elements > ((uint64_t)1 << 48)) return 0;
    return last <= (elements >> log) + ((elements & (((uint64_t)1 << log) - 1)) != 0);
}

#endif
