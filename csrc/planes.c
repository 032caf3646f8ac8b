/* Byte planes: byte b of every element is a stream of its own, of the values or of old XOR new.
 *
 * A segment:  for each plane, from the lowest byte:  stream bytes u32 | mode u8 | zero u24 | stream
 */
#include "delta.h"

#include <stdlib.h>

RLC_INLINE void split(const uint8_t *old, const uint8_t *new_, uint64_t n, int width, int plane, uint8_t *symbols)
{
    if (old)
        for (uint64_t i = 0; i < n; i++)
            symbols[i] = (uint8_t)(old[i * (uint64_t)width + (uint64_t)plane] ^ new_[i * (uint64_t)width + (uint64_t)plane]);
    else
        for (uint64_t i = 0; i < n; i++) symbols[i] = new_[i * (uint64_t)width + (uint64_t)plane];
}

RLC_INLINE void join(const uint8_t *symbols, uint64_t n, int width, int plane, int xor_, uint8_t *base)
{
    if (xor_)
        for (uint64_t i = 0; i < n; i++) base[i * (uint64_t)width + (uint64_t)plane] ^= symbols[i];
    else
        for (uint64_t i = 0; i < n; i++) base[i * (uint64_t)width + (uint64_t)plane] = symbols[i];
}

/* With the width known, the loops become shuffles. */
#define FOR_WIDTH(call) \
    switch (width) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 4: call(4); break; \
    default: call(8); break; \
    }

static void split_any(const uint8_t *old, const uint8_t *new_, uint64_t n, int width, int plane, uint8_t *symbols)
{
#define SPLIT(w) split(old, new_, n, w, plane, symbols)
    FOR_WIDTH(SPLIT)
}

static void join_any(const uint8_t *symbols, uint64_t n, int width, int plane, int xor_, uint8_t *base)
{
#define JOIN(w) join(symbols, n, w, plane, xor_, base)
    FOR_WIDTH(JOIN)
}

static int width_ok(int width) { return width == 1 || width == 2 || width == 4 || width == 8; }

int64_t rlc_planes_encode(const uint8_t *old, const uint8_t *new_, uint64_t elements, int width, int log, uint64_t first,
                          uint64_t last, uint8_t *out, uint64_t capacity, uint32_t *lengths)
{
    if (!width_ok(width) || !rlc_range_ok(elements, log, first, last)) return RLC_FORMAT;
    uint64_t room = elements < (uint64_t)1 << log ? elements : (uint64_t)1 << log, written = 0;
    uint8_t *symbols = malloc(3 * room + 3 * RLC_SLACK);
    if (!symbols) return RLC_MEMORY;
    int64_t result = 0;
    for (uint64_t segment = first; segment < last && !result; segment++) {
        uint64_t n = rlc_segment_elements(elements, log, segment), begin = (segment << log) * (uint64_t)width;
        uint64_t started = written;
        for (int plane = 0; plane < width; plane++) {
            if (capacity - written < RLC_PLANE_HEADER + rlc_stream_bound(n)) {
                result = RLC_CAPACITY;
                break;
            }
            uint8_t mode;
            split_any(old ? old + begin : 0, new_ + begin, n, width, plane, symbols);
            size_t size = rlc_stream_encode(symbols, n, out + written + RLC_PLANE_HEADER, symbols + room + RLC_SLACK, &mode);
            rlc_store32(out + written, (uint32_t)size);
            rlc_store32(out + written + 4, mode);
            written += RLC_PLANE_HEADER + size;
        }
        lengths[segment - first] = (uint32_t)(written - started);
    }
    free(symbols);
    return result < 0 ? result : (int64_t)written;
}

/* All planes of a segment are decoded before the first is written. */
int64_t rlc_planes_apply(const uint8_t *data, uint64_t length, const uint32_t *lengths, uint64_t elements, int width,
                         int log, uint64_t first, uint64_t last, uint8_t *base, int xor_, uint64_t *done)
{
    *done = 0;
    if (!width_ok(width) || !rlc_range_ok(elements, log, first, last)) return RLC_FORMAT;
    uint64_t room = elements < (uint64_t)1 << log ? elements : (uint64_t)1 << log, at = 0;
    uint8_t *symbols = malloc((uint64_t)width * (room + RLC_SLACK));
    if (!symbols) return RLC_MEMORY;
    int64_t result = 0;
    for (uint64_t segment = first; segment < last; segment++, (*done)++) {
        uint64_t size = lengths[segment - first], n = rlc_segment_elements(elements, log, segment), used = 0;
        if (size > length - at) {
            result = RLC_TRUNCATED;
            break;
        }
        for (int plane = 0; plane < width && !result; plane++) {
            if (size - used < RLC_PLANE_HEADER) {
                result = RLC_TRUNCATED;
                break;
            }
            const uint8_t *p = data + at + used;
            uint64_t stream = rlc_load32(p), mode = rlc_load32(p + 4);
            used += RLC_PLANE_HEADER;
            if (stream > size - used || mode > RLC_MODE_RANS) {
                result = RLC_FORMAT;
                break;
            }
            result = rlc_stream_decode(p + RLC_PLANE_HEADER, stream, (int)mode, symbols + (uint64_t)plane * (room + RLC_SLACK), n);
            used += stream;
        }
        if (!result && used != size) result = RLC_FORMAT;
        if (result) break;
        uint8_t *begin = base + (segment << log) * (uint64_t)width;
        for (int plane = 0; plane < width; plane++)
            join_any(symbols + (uint64_t)plane * (room + RLC_SLACK), n, width, plane, xor_, begin);
        at += size;
    }
    if (!result && at != length) result = RLC_FORMAT;
    free(symbols);
    return result;
}
