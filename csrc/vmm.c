/* See vmm.h. Every function returns 0 or a count, or one of the negative codes there; rlc_cuda_why() has the words for it. Calls
 * for many pages are one call from Python, and one call to the driver where the driver takes a run of pages. */
#include "vmm.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* -- of the driver's interface (cuda.h) -------------------------------------------------------------------------------- */

enum { OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, VMM_SUPPORTED = 102, FD_SUPPORTED = 103, PINNED = 1,
       ON_DEVICE = 1, AS_FD = 1, READ_WRITE = 3 };

typedef uint64_t address;
typedef uint64_t handle;
typedef struct {
    int type, id;
} location;
typedef struct {
    int type, handle_types;
    location place;
    void *win32;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} allocation;
typedef struct {
    location place;
    int flags;
} access_desc;

_Static_assert(sizeof(allocation) == 32 && sizeof(access_desc) == 12, "as in cuda.h");

struct rlc_cuda {
    void *library, *context, *stream;
    int device, retained;
    uint64_t page_bytes, granularity;
    char name[128], uuid[64];
    int (*cuInit)(unsigned);
    int (*cuGetErrorName)(int, const char **);
    int (*cuDeviceGetCount)(int *);
    int (*cuDeviceGet)(int *, int);
    int (*cuDeviceGetName)(char *, int, int);
    int (*cuDeviceGetUuid_v2)(unsigned char *, int);
    int (*cuDeviceGetAttribute)(int *, int, int);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuDevicePrimaryCtxRelease_v2)(int);
    int (*cuDevicePrimaryCtxGetState)(int, unsigned *, int *);
    int (*cuCtxPushCurrent_v2)(void *);
    int (*cuCtxPopCurrent_v2)(void **);
    int (*cuCtxSynchronize)(void);
    int (*cuStreamCreate)(void **, unsigned);
    int (*cuStreamDestroy_v2)(void *);
    int (*cuStreamSynchronize)(void *);
    int (*cuMemsetD8Async)(address, unsigned char, size_t, void *);
    int (*cuMemGetAllocationGranularity)(size_t *, const allocation *, int);
    int (*cuMemAddressReserve)(address *, size_t, size_t, address, unsigned long long);
    int (*cuMemAddressFree)(address, size_t);
    int (*cuMemCreate)(handle *, size_t, const allocation *, unsigned long long);
    int (*cuMemRelease)(handle);
    int (*cuMemMap)(address, size_t, size_t, handle, unsigned long long);
    int (*cuMemUnmap)(address, size_t);
    int (*cuMemSetAccess)(address, size_t, const access_desc *, size_t);
    int (*cuMemExportToShareableHandle)(void *, handle, int, unsigned long long);
    int (*cuMemImportFromShareableHandle)(handle *, void *, int);
};

static const struct {
    const char *name;
    size_t at;
} FUNCTIONS[] = {
#define FUNCTION(name) {#name, offsetof(struct rlc_cuda, name)}
    FUNCTION(cuInit), FUNCTION(cuGetErrorName), FUNCTION(cuDeviceGetCount), FUNCTION(cuDeviceGet), FUNCTION(cuDeviceGetName),
    FUNCTION(cuDeviceGetUuid_v2), FUNCTION(cuDeviceGetAttribute), FUNCTION(cuDevicePrimaryCtxRetain),
    FUNCTION(cuDevicePrimaryCtxRelease_v2), FUNCTION(cuDevicePrimaryCtxGetState), FUNCTION(cuCtxPushCurrent_v2),
    FUNCTION(cuCtxPopCurrent_v2), FUNCTION(cuCtxSynchronize), FUNCTION(cuStreamCreate), FUNCTION(cuStreamDestroy_v2),
    FUNCTION(cuStreamSynchronize), FUNCTION(cuMemsetD8Async), FUNCTION(cuMemGetAllocationGranularity),
    FUNCTION(cuMemAddressReserve), FUNCTION(cuMemAddressFree), FUNCTION(cuMemCreate), FUNCTION(cuMemRelease), FUNCTION(cuMemMap),
    FUNCTION(cuMemUnmap), FUNCTION(cuMemSetAccess), FUNCTION(cuMemExportToShareableHandle),
    FUNCTION(cuMemImportFromShareableHandle),
};

/* -- errors ------------------------------------------------------------------------------------------------------------ */

static __thread char why[512];

EXPORT const char *rlc_cuda_why(void) { return why; }

/* The code for what the driver returned from `call`. */
static int refused(const rlc_cuda *cuda, const char *call, int result) {
    const char *name = NULL;
    if (cuda->cuGetErrorName(result, &name) || !name) name = "an error without a name";
    snprintf(why, sizeof why, "%s: %s (%d)", call, name, result);
    return result == OUT_OF_MEMORY ? RLC_CUDA_MEMORY : RLC_CUDA_DRIVER;
}

/* -- the device -------------------------------------------------------------------------------------------------------- */

static allocation wanted(const rlc_cuda *cuda) {
    allocation found = {.type = PINNED, .handle_types = AS_FD, .place = {ON_DEVICE, cuda->device}};
    return found;
}

/* What is written above by hand, to be compared with NVIDIA's own: the numbers in their order, what is asked of an allocation on
 * device 5, and of access to it. */
EXPORT void rlc_cuda_written(int numbers[8], unsigned char properties[32], unsigned char access[12]) {
    const int found[8] = {OUT_OF_MEMORY, INVALID_CONTEXT, VMM_SUPPORTED, FD_SUPPORTED, PINNED, ON_DEVICE, AS_FD, READ_WRITE};
    const rlc_cuda five = {.device = 5};
    const allocation asked = wanted(&five);
    const access_desc both = {{ON_DEVICE, 5}, READ_WRITE};
    memcpy(numbers, found, sizeof found);
    memcpy(properties, &asked, sizeof asked);
    memcpy(access, &both, sizeof both);
}

/* The device's primary context is this thread's until leave(), whichever it had: one of another device, or none. */
static int enter(rlc_cuda *cuda) {
    int result;
    if (!cuda->retained) {
        if ((result = cuda->cuDevicePrimaryCtxRetain(&cuda->context, cuda->device)))
            return refused(cuda, "cuDevicePrimaryCtxRetain", result);
        cuda->retained = 1;
    }
    if ((result = cuda->cuCtxPushCurrent_v2(cuda->context))) return refused(cuda, "cuCtxPushCurrent_v2", result);
    return 0;
}

static void leave(rlc_cuda *cuda) {
    void *ours;
    cuda->cuCtxPopCurrent_v2(&ours);
}

/* `result`, of `call`; where the driver wants a context for it, and the thread has none of its own, the call again with one.
 * The manual asks for none in what is called so; a driver may. */
#define IN_CONTEXT(result, cuda, call)                              \
    do {                                                            \
        (result) = (call);                                          \
        if ((result) == INVALID_CONTEXT && !enter(cuda)) {          \
            (result) = (call);                                      \
            leave(cuda);                                            \
        }                                                           \
    } while (0)

EXPORT void rlc_cuda_close(rlc_cuda *cuda) {
    if (cuda->stream && !enter(cuda)) {
        cuda->cuStreamDestroy_v2(cuda->stream);
        leave(cuda);
    }
    if (cuda->retained) cuda->cuDevicePrimaryCtxRelease_v2(cuda->device);
    if (cuda->library) dlclose(cuda->library);
    free(cuda);
}

static int find_device(rlc_cuda *cuda, int ordinal, uint64_t page_bytes) {
    int result, count = 0, supported = 0;
    unsigned char id[16];
    if ((result = cuda->cuInit(0))) return refused(cuda, "cuInit", result), RLC_CUDA_NONE;
    if ((result = cuda->cuDeviceGetCount(&count))) return refused(cuda, "cuDeviceGetCount", result), RLC_CUDA_NONE;
    if (ordinal < 0 || ordinal >= count) {
        snprintf(why, sizeof why, "there is no device %d, the driver sees %d", ordinal, count);
        return RLC_CUDA_NONE;
    }
    if ((result = cuda->cuDeviceGet(&cuda->device, ordinal))) return refused(cuda, "cuDeviceGet", result);
    if ((result = cuda->cuDeviceGetName(cuda->name, sizeof cuda->name, cuda->device)))
        return refused(cuda, "cuDeviceGetName", result);
    if ((result = cuda->cuDeviceGetUuid_v2(id, cuda->device))) return refused(cuda, "cuDeviceGetUuid_v2", result);
    char *at = cuda->uuid;
    for (int byte = 0; byte < 16; byte++)
        at += sprintf(at, "%s%02x", byte == 4 || byte == 6 || byte == 8 || byte == 10 ? "-" : "", id[byte]);
    const int needs[] = {VMM_SUPPORTED, FD_SUPPORTED};
    const char *names[] = {"virtual memory management", "memory handles as file descriptors"};
    for (int index = 0; index < 2; index++) {
        if ((result = cuda->cuDeviceGetAttribute(&supported, needs[index], cuda->device)))
            return refused(cuda, "cuDeviceGetAttribute", result);
        if (!supported) {
            snprintf(why, sizeof why, "%s has no %s", cuda->name, names[index]);
            return RLC_CUDA_NONE;
        }
    }
    allocation prop = wanted(cuda);
    size_t granularity = 0;
    if ((result = cuda->cuMemGetAllocationGranularity(&granularity, &prop, 0)))
        return refused(cuda, "cuMemGetAllocationGranularity", result);
    cuda->granularity = granularity;
    if (!page_bytes || !granularity || page_bytes % granularity) {
        snprintf(why, sizeof why, "pages of %llu bytes: %s maps multiples of %zu bytes", (unsigned long long)page_bytes,
                 cuda->name, granularity);
        return RLC_CUDA_SIZE;
    }
    return 0;
}

/* Load the driver's library and look at one of its devices. Makes no context: that costs memory of the device. */
EXPORT int rlc_cuda_open(const char *library, int ordinal, uint64_t page_bytes, rlc_cuda **out) {
    rlc_cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda) {
        snprintf(why, sizeof why, "no memory");
        return RLC_CUDA_DRIVER;
    }
    cuda->page_bytes = page_bytes;
    cuda->library = dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE); /* the driver has threads in it */
    int code = 0;
    if (!cuda->library) {
        snprintf(why, sizeof why, "%s", dlerror());
        code = RLC_CUDA_MISSING;
    }
    for (size_t index = 0; !code && index < sizeof FUNCTIONS / sizeof *FUNCTIONS; index++) {
        void *found = dlsym(cuda->library, FUNCTIONS[index].name);
        if (!found) {
            snprintf(why, sizeof why, "%s has no %s", library, FUNCTIONS[index].name);
            code = RLC_CUDA_MISSING;
        }
        memcpy((char *)cuda + FUNCTIONS[index].at, &found, sizeof found);
    }
    if (!code) code = find_device(cuda, ordinal, page_bytes);
    if (code) {
        rlc_cuda_close(cuda);
        return code;
    }
    *out = cuda;
    return 0;
}

EXPORT int rlc_cuda_facts(const rlc_cuda *cuda, uint64_t *granularity, char name[128], char uuid[64]) {
    *granularity = cuda->granularity;
    memcpy(name, cuda->name, 128);
    memcpy(uuid, cuda->uuid, 64);
    return 0;
}

/* -- physical pages ---------------------------------------------------------------------------------------------------- */

/* All that can be; what was wrong first is told. */
EXPORT int rlc_cuda_release(rlc_cuda *cuda, const handle *handles, uint64_t count) {
    int worst = 0, result;
    for (uint64_t index = 0; index < count; index++) {
        IN_CONTEXT(result, cuda, cuda->cuMemRelease(handles[index]));
        if (result && !worst) worst = refused(cuda, "cuMemRelease", result);
    }
    return worst;
}

/* `count` pages, all or none. *made: how many there was room for. */
EXPORT int rlc_cuda_create(rlc_cuda *cuda, uint64_t count, handle *out, uint64_t *made) {
    allocation prop = wanted(cuda);
    for (*made = 0; *made < count; ++*made) {
        int result;
        IN_CONTEXT(result, cuda, cuda->cuMemCreate(&out[*made], cuda->page_bytes, &prop, 0));
        if (result) {
            rlc_cuda_release(cuda, out, *made);
            return refused(cuda, "cuMemCreate", result);
        }
    }
    return 0;
}

EXPORT int rlc_cuda_export(rlc_cuda *cuda, handle page, int *fd) {
    int result;
    IN_CONTEXT(result, cuda, cuda->cuMemExportToShareableHandle(fd, page, AS_FD, 0));
    return result ? refused(cuda, "cuMemExportToShareableHandle", result) : 0;
}

/* All or none; the descriptors stay the caller's. */
EXPORT int rlc_cuda_import(rlc_cuda *cuda, const int *fds, uint64_t count, handle *out) {
    for (uint64_t index = 0; index < count; index++) {
        int result;
        IN_CONTEXT(result, cuda, cuda->cuMemImportFromShareableHandle(&out[index], (void *)(uintptr_t)fds[index], AS_FD));
        if (result) {
            rlc_cuda_release(cuda, out, index);
            return refused(cuda, "cuMemImportFromShareableHandle", result);
        }
    }
    return 0;
}

/* -- the range --------------------------------------------------------------------------------------------------------- */

EXPORT int rlc_cuda_reserve(rlc_cuda *cuda, uint64_t bytes, address *out) {
    int result;
    IN_CONTEXT(result, cuda, cuda->cuMemAddressReserve(out, bytes, cuda->page_bytes, 0, 0));
    return result ? refused(cuda, "cuMemAddressReserve", result) : 0;
}

EXPORT int rlc_cuda_free(rlc_cuda *cuda, address base, uint64_t bytes) {
    int result;
    IN_CONTEXT(result, cuda, cuda->cuMemAddressFree(base, bytes));
    return result ? refused(cuda, "cuMemAddressFree", result) : 0;
}

/* How many of `places` from `first` on follow each other. */
static uint64_t run(const uint64_t *places, uint64_t first, uint64_t count) {
    uint64_t length = 1;
    while (first + length < count && places[first + length] == places[first] + length) length++;
    return length;
}

static int unmap(rlc_cuda *cuda, address base, const uint64_t *places, uint64_t count) {
    int worst = 0;
    for (uint64_t at = 0; at < count;) {
        uint64_t length = run(places, at, count);
        int result;
        IN_CONTEXT(result, cuda, cuda->cuMemUnmap(base + places[at] * cuda->page_bytes, length * cuda->page_bytes));
        if (result && !worst) worst = refused(cuda, "cuMemUnmap", result);
        at += length;
    }
    return worst;
}

/* `handles[i]`, or where there are none `one` everywhere, at `places[i]`, which have nothing; all or none. */
static int map(rlc_cuda *cuda, address base, const uint64_t *places, const handle *handles, handle one, uint64_t count) {
    const access_desc both = {{ON_DEVICE, cuda->device}, READ_WRITE};
    uint64_t size = cuda->page_bytes, done = 0;
    int code = 0;
    for (; !code && done < count; done += !code) {
        int result;
        IN_CONTEXT(result, cuda, cuda->cuMemMap(base + places[done] * size, size, 0, handles ? handles[done] : one, 0));
        if (result) code = refused(cuda, "cuMemMap", result);
    }
    for (uint64_t at = 0; !code && at < count;) {
        uint64_t length = run(places, at, count);
        int result;
        IN_CONTEXT(result, cuda, cuda->cuMemSetAccess(base + places[at] * size, length * size, &both, 1));
        if (result) code = refused(cuda, "cuMemSetAccess", result);
        at += length;
    }
    if (code) { /* keep the words of what went wrong first */
        char kept[sizeof why];
        memcpy(kept, why, sizeof why);
        if (unmap(cuda, base, places, done)) strncat(kept, "; and not all of it was undone", sizeof kept - strlen(kept) - 1);
        memcpy(why, kept, sizeof why);
    }
    return code;
}

/* Where `dummy` is a page, it stands behind every place that has no other: a kernel that reads by an old block table reads
 * that page, and does not end the process. */

/* The dummy at all of these places, which have nothing yet. */
EXPORT int rlc_cuda_fill(rlc_cuda *cuda, address base, const uint64_t *places, uint64_t count, handle dummy) {
    return map(cuda, base, places, NULL, dummy, count);
}

/* Without a dummy, what touches these places afterwards is an illegal address to the device. */
EXPORT int rlc_cuda_unmap(rlc_cuda *cuda, address base, const uint64_t *places, uint64_t count, handle dummy) {
    int code = unmap(cuda, base, places, count);
    return code || !dummy ? code : map(cuda, base, places, NULL, dummy, count);
}

/* `handles[i]` appears at `places[i]` of the range (in pages), all or none. */
EXPORT int rlc_cuda_map(rlc_cuda *cuda, address base, const uint64_t *places, const handle *handles, uint64_t count,
                        handle dummy) {
    int code = dummy ? unmap(cuda, base, places, count) : 0;
    if (!code) code = map(cuda, base, places, handles, 0, count);
    if (code && dummy) {
        char kept[sizeof why];
        memcpy(kept, why, sizeof why);
        if (map(cuda, base, places, NULL, dummy, count))
            strncat(kept, "; and not all of it was undone", sizeof kept - strlen(kept) - 1);
        memcpy(why, kept, sizeof why);
    }
    return code;
}

/* Zeros at these places, which are mapped; they are there when it returns. */
EXPORT int rlc_cuda_zero(rlc_cuda *cuda, address base, const uint64_t *places, uint64_t count) {
    int code = enter(cuda), result;
    if (code) return code;
    if (!cuda->stream && (result = cuda->cuStreamCreate(&cuda->stream, 1 /* waits for no other stream */)))
        code = refused(cuda, "cuStreamCreate", result);
    for (uint64_t at = 0; !code && at < count;) {
        uint64_t length = run(places, at, count), size = cuda->page_bytes;
        if ((result = cuda->cuMemsetD8Async(base + places[at] * size, 0, length * size, cuda->stream)))
            code = refused(cuda, "cuMemsetD8Async", result);
        at += length;
    }
    if (!code && (result = cuda->cuStreamSynchronize(cuda->stream))) code = refused(cuda, "cuStreamSynchronize", result);
    leave(cuda);
    return code;
}

/* Returns when all that this process told the device to do is done. Makes no context: without one there is nothing to do. */
EXPORT int rlc_cuda_settle(rlc_cuda *cuda) {
    unsigned flags;
    int active = 0, result = cuda->cuDevicePrimaryCtxGetState(cuda->device, &flags, &active), code;
    if (result) return refused(cuda, "cuDevicePrimaryCtxGetState", result);
    if (!active) return 0;
    if ((code = enter(cuda))) return code;
    if ((result = cuda->cuCtxSynchronize())) code = refused(cuda, "cuCtxSynchronize", result);
    leave(cuda);
    return code;
}
