/* Which instruction set the hot loops use: the best one of this CPU, found once when the library is loaded. */
#include "delta.h"

static int best_level(void)
{
#if RLC_X86
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
          __builtin_cpu_supports("popcnt")))
        return RLC_PORTABLE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return RLC_LEVEL_AVX512;
    return RLC_LEVEL_AVX2;
#else
    return RLC_PORTABLE;
#endif
}

static int current = RLC_PORTABLE;

__attribute__((constructor)) static void choose(void) { current = best_level(); }

int rlc_level(void) { return __atomic_load_n(&current, __ATOMIC_RELAXED); }

int rlc_delta_abi(void) { return RLC_ABI; }

int rlc_delta_best(void) { return best_level(); }

int rlc_delta_use(int level)
{
    int best = best_level();
    int use = level < RLC_PORTABLE ? RLC_PORTABLE : level > best ? best : level;
    __atomic_store_n(&current, use, __ATOMIC_RELAXED);
    return use;
}
