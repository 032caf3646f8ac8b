/* What the fuzzers share. A fuzzer is LLVMFuzzerTestOneInput, which holds a property or fails, and fuzz_make, which makes inputs
 * that are worth a try. With libFuzzer (clang -fsanitize=fuzzer,address,undefined) its mutations begin from them; else fuzz_main.c
 * tries nothing but them:
 *
 *     FUZZER ITERATIONS SEED      tries so many made inputs, prints "N inputs"
 *     FUZZER --replay FILE...     tries what is in these files
 *
 * Exit code 0: nothing found. Anything else, or a sanitizer's report: a defect. Run it with
 * ASAN_OPTIONS=max_allocation_size_mb=16, so that memory out of proportion to the input is a defect, too.
 */
#ifndef RLC_FUZZ_H
#define RLC_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { FUZZ_ROOM = 1 << 16 }; /* bytes of the largest input */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
/* An input of at most FUZZ_ROOM bytes, from the random numbers below; returns its size. */
size_t fuzz_make(uint8_t *data);

static uint64_t fuzz_state;

static inline uint64_t fuzz_next(void) /* splitmix64 */
{
    uint64_t z = (fuzz_state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static inline uint64_t fuzz_below(uint64_t limit) { return limit ? fuzz_next() % limit : 0; }

static inline void fuzz_fail(const char *what)
{
    fprintf(stderr, "fuzz: %s\n", what);
    abort();
}

#ifdef FUZZ_LIBFUZZER
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed)
{
    static uint8_t made[FUZZ_ROOM];
    fuzz_state = seed;
    if (fuzz_below(2)) return LLVMFuzzerMutate(data, size, most);
    size = fuzz_make(made);
    if (size > most) size = most;
    for (size_t i = 0; i < size; i++) data[i] = made[i];
    return size;
}
#else
int main(int count, char **words)
{
    static uint8_t data[FUZZ_ROOM];
    if (count >= 3 && words[1][0] == '-') {
        for (int i = 2; i < count; i++) {
            FILE *file = fopen(words[i], "rb");
            if (!file) fuzz_fail(words[i]);
            size_t size = fread(data, 1, sizeof data, file);
            fclose(file);
            LLVMFuzzerTestOneInput(data, size);
        }
        printf("%d inputs\n", count - 2);
        return 0;
    }
    if (count != 3) fuzz_fail("usage: ITERATIONS SEED, or --replay FILE...");
    uint64_t iterations = strtoull(words[1], 0, 10), state = strtoull(words[2], 0, 10) << 32;
    for (uint64_t i = 0; i < iterations; i++) {
        fuzz_state = state + i;
        size_t size = fuzz_make(data);
        LLVMFuzzerTestOneInput(data, size);
    }
    printf("%llu inputs\n", (unsigned long long)iterations);
    return 0;
}
#endif

#endif
