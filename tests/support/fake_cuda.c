/* A libcuda for tests without a GPU: the virtual memory management of the driver, over a file that stands for the device.
 *
 * Memory is a file (FAKE_CUDA_DEVICE, whose size is the device's), in units of the granularity (FAKE_CUDA_GRANULARITY). An
 * allocation is an open file description that holds a lock on its units, so it is free again when the last handle, exported
 * descriptor and mapping of it is gone, in whatever process and however that ended: as with the driver. Content survives.
 * Addresses are reserved without access; a mapping has none before cuMemSetAccess. What the driver refuses is refused.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, ILLEGAL_ADDRESS = 700 };
enum { MAX = 1 << 16 };

typedef struct {
    int type, id;
} location;
typedef struct {
    int type, handle_types;
    location place;
    void *win32;
    unsigned char flags[8];
} allocation;
typedef struct {
    uint64_t at, size;
} extent;
typedef struct {
    extent where;
    int access;
} mapping;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int device = -1, device_kept, devices = 1, context;
static uint64_t unit = 2 << 20, units;
static int fds[MAX];         /* handle - 1 -> description of the allocation, 0: none */
static extent ranges[64];    /* reserved */
static mapping mapped[MAX];  /* size 0: unused */
static uint64_t mappings;    /* of `mapped` that were ever used */
static int calls[16];
static int fail_call = -1, fail_after, fail_with;
static __thread void *stack[8]; /* contexts of this thread, the current one on top */
static __thread int depth;
static int wants_context;      /* every call that takes memory wants one */
static int working, settled;   /* kernels run; how often they were waited for */

enum { CREATE, RELEASE, MAP, UNMAP, ACCESS, EXPORT_, IMPORT, MEMSET };
static const char *const NAMES[] = {"cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess",
                                    "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemsetD8Async"};

/* -- what tests ask ---------------------------------------------------------------------------------------------------- */

static int index_of(const char *name) {
    for (int index = 0; index <= MEMSET; index++)
        if (!strcmp(NAMES[index], name)) return index;
    return -1;
}

int fake_cuda_calls(const char *name) { return calls[index_of(name)]; }
void fake_cuda_fail(const char *name, int after, int with) { fail_call = index_of(name), fail_after = after, fail_with = with; }
/* This thread's context is one of another device from here on; kernels of this process run. */
void fake_cuda_elsewhere(void) { stack[depth++] = &device; }
int fake_cuda_depth(void) { return depth; }
void fake_cuda_work(void) { working = 1, device_kept++; }
int fake_cuda_settled(void) { return settled; }
int fake_cuda_open_handles(void) {
    int found = 0;
    for (int index = 0; index < MAX; index++) found += fds[index] != 0;
    return found;
}
int fake_cuda_mappings(void) {
    int found = 0;
    for (uint64_t index = 0; index < mappings; index++) found += mapped[index].where.size != 0;
    return found;
}

/* As in a process that has just loaded it. */
void fake_cuda_reset(void) {
    for (int index = 0; index < MAX; index++) {
        if (fds[index]) close(fds[index]);
        fds[index] = 0;
    }
    for (uint64_t index = 0; index < mappings; index++)
        if (mapped[index].where.size) munmap((void *)mapped[index].where.at, mapped[index].where.size);
    if (device >= 0) close(device);
    memset(mapped, 0, sizeof mapped);
    memset(ranges, 0, sizeof ranges);
    memset(calls, 0, sizeof calls);
    mappings = 0, device = -1, depth = 0, device_kept = 0, fail_call = -1, unit = 2 << 20, working = settled = 0;
}

static int told(int call) {
    calls[call]++;
    if (device < 0) return NOT_INITIALIZED;
    if (wants_context && (!depth || stack[depth - 1] != &context)) return INVALID_CONTEXT;
    if (call == fail_call && fail_after-- == 0) {
        fail_call = -1;
        return fail_with;
    }
    return OK;
}

/* -- the device -------------------------------------------------------------------------------------------------------- */

int cuGetErrorName(int error, const char **name) {
    static const struct { int error; const char *name; } known[] = {
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"}, {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}};
    for (unsigned index = 0; index < sizeof known / sizeof *known; index++)
        if (known[index].error == error) return *name = known[index].name, OK;
    return INVALID_VALUE;
}

/* By which NVIDIA's cuda-bindings find the others. */
int cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long long flags, int *status) {
    char newer[128];
    Dl_info here;
    (void)version, (void)flags;
    snprintf(newer, sizeof newer, "%s_v2", name);
    void *self = dladdr((void *)cuGetProcAddress_v2, &here) ? dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    *out = self ? dlsym(self, newer) : NULL;
    if (self && !*out) *out = dlsym(self, name);
    if (status) *status = !*out;
    return *out ? OK : 500;
}

int cuInit(unsigned flags) {
    const char *path = getenv("FAKE_CUDA_DEVICE"), *size = getenv("FAKE_CUDA_GRANULARITY");
    struct stat facts;
    if (flags) return INVALID_VALUE;
    if (device >= 0) return OK;
    if (!path) return NO_DEVICE;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &facts)) return NO_DEVICE;
    if (size) unit = strtoull(size, NULL, 10);
    units = (uint64_t)facts.st_size / unit;
    wants_context = getenv("FAKE_CUDA_WANTS_CONTEXT") != NULL;
    device = fd;
    return OK;
}

int cuDriverGetVersion(int *version) { return *version = 12080, OK; }
int cuDeviceGetCount(int *count) { return *count = devices, device < 0 ? NOT_INITIALIZED : OK; }
int cuDeviceGet(int *found, int ordinal) { return *found = ordinal, ordinal == 0 ? OK : INVALID_DEVICE; }
int cuDeviceGetName(char *name, int length, int which) {
    snprintf(name, (size_t)length, "a fake device");
    return which == 0 ? OK : INVALID_DEVICE;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int which) {
    struct stat facts;
    if (which || fstat(device, &facts)) return INVALID_DEVICE;
    memset(uuid, 0, 16);
    memcpy(uuid, &facts.st_ino, sizeof facts.st_ino);
    return OK;
}
int cuDeviceGetAttribute(int *value, int attribute, int which) {
    const char *lacks = getenv("FAKE_CUDA_LACKS");
    *value = (attribute == 102 || attribute == 103) && (!lacks || atoi(lacks) != attribute);
    return which == 0 ? OK : INVALID_DEVICE;
}
int cuDevicePrimaryCtxRetain(void **found, int which) { return *found = &context, device_kept++, which == 0 ? OK : INVALID_DEVICE; }
int cuDevicePrimaryCtxGetState(int which, unsigned *flags, int *active) {
    return *flags = 0, *active = device_kept > 0, which == 0 ? OK : INVALID_DEVICE;
}
int cuDevicePrimaryCtxRelease_v2(int which) { return device_kept-- > 0 && which == 0 ? OK : INVALID_CONTEXT; }
int cuCtxPushCurrent_v2(void *wanted) { return depth < 8 ? (stack[depth++] = wanted, OK) : INVALID_CONTEXT; }
int cuCtxPopCurrent_v2(void **found) { return depth ? (*found = stack[--depth], OK) : INVALID_CONTEXT; }
static int ours(void) { return depth && stack[depth - 1] == &context && device_kept > 0; }
int cuCtxSynchronize(void) { return ours() ? (working = 0, settled++, OK) : INVALID_CONTEXT; }
int cuStreamCreate(void **stream, unsigned flags) { return *stream = &context, ours() && flags == 1 ? OK : INVALID_CONTEXT; }
int cuStreamDestroy_v2(void *stream) { return stream == &context && ours() ? OK : INVALID_CONTEXT; }
int cuStreamSynchronize(void *stream) { return stream == &context && ours() ? OK : INVALID_CONTEXT; }

static int right(const allocation *wanted) {
    return wanted->type == 1 && wanted->handle_types == 1 && wanted->place.type == 1 && wanted->place.id == 0 && !wanted->win32;
}
int cuMemGetAllocationGranularity(size_t *found, const allocation *wanted, int option) {
    return *found = unit, right(wanted) && option == 0 ? OK : INVALID_VALUE;
}

/* -- memory ------------------------------------------------------------------------------------------------------------ */

/* The units of an allocation, kept in the offset of its open file description, which all duplicates share. */
static extent units_of(int fd) {
    uint64_t said = (uint64_t)lseek(fd, 0, SEEK_CUR);
    return (extent){said >> 16, said & 0xffff};
}

static int keep(uint64_t *handle, int fd) {
    for (int index = 0; index < MAX; index++) {
        if (fds[index]) continue;
        fds[index] = fd;
        *handle = (uint64_t)index + 1;
        return OK;
    }
    return OUT_OF_MEMORY;
}

static int description(uint64_t handle) { return handle && handle <= MAX ? fds[handle - 1] : 0; }

int cuMemCreate(uint64_t *handle, size_t size, const allocation *wanted, unsigned long long flags) {
    int code = told(CREATE);
    if (code) return code;
    if (!right(wanted) || flags || !size || size % unit) return INVALID_VALUE;
    uint64_t need = size / unit;
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", device);
    int fd = open(path, O_RDWR | O_CLOEXEC); /* a description of its own */
    if (fd < 0) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    code = OUT_OF_MEMORY;
    for (uint64_t first = 0; first + need <= units; first += need) {
        struct flock taken = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)first, .l_len = (off_t)need};
        if (fcntl(fd, F_OFD_SETLK, &taken)) continue;
        lseek(fd, (off_t)(first << 16 | need), SEEK_SET);
        code = keep(handle, fd);
        break;
    }
    pthread_mutex_unlock(&lock);
    if (code) close(fd);
    return code;
}

int cuMemRelease(uint64_t handle) {
    int code = told(RELEASE), fd = description(handle);
    if (code || !fd) return code ? code : INVALID_VALUE;
    pthread_mutex_lock(&lock);
    close(fd);
    fds[handle - 1] = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags) {
    int code = told(EXPORT_), fd = description(handle);
    if (code || !fd || type != 1 || flags) return code ? code : INVALID_VALUE;
    return (*(int *)out = fcntl(fd, F_DUPFD_CLOEXEC, 0)) < 0 ? OUT_OF_MEMORY : OK;
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *os, int type) {
    int code = told(IMPORT), fd = (int)(intptr_t)os;
    struct stat ours, theirs;
    if (code) return code;
    if (type != 1 || fstat(device, &ours) || fstat(fd, &theirs) || ours.st_ino != theirs.st_ino) return INVALID_VALUE;
    if (!units_of(fd).size) return INVALID_VALUE;
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    code = keep(handle, own);
    pthread_mutex_unlock(&lock);
    if (code) close(own);
    return code;
}

/* -- addresses --------------------------------------------------------------------------------------------------------- */

static int inside(extent inner, extent outer) { return inner.at >= outer.at && inner.at + inner.size <= outer.at + outer.size; }
static int apart(extent one, extent other) { return one.at + one.size <= other.at || other.at + other.size <= one.at; }

static int reserved(extent wanted) {
    for (int index = 0; index < 64; index++)
        if (ranges[index].size && inside(wanted, ranges[index])) return 1;
    return 0;
}

/* Bytes of `wanted` that are mapped by mappings that lie wholly in it; ~0: one lies across its border. */
static uint64_t covered(extent wanted) {
    uint64_t found = 0;
    for (uint64_t index = 0; index < mappings; index++) {
        extent where = mapped[index].where;
        if (!where.size || apart(where, wanted)) continue;
        if (!inside(where, wanted)) return ~0ull;
        found += where.size;
    }
    return found;
}

static int bare(uint64_t at, uint64_t size, int fixed, void **out) {
    void *found = mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (fixed ? MAP_FIXED : 0), -1, 0);
    if (out) *out = found;
    return found == MAP_FAILED ? OUT_OF_MEMORY : OK;
}

int cuMemAddressReserve(uint64_t *out, size_t size, size_t alignment, uint64_t wanted, unsigned long long flags) {
    void *found;
    if (!size || size % unit || (alignment & (alignment - 1)) || wanted || flags) return INVALID_VALUE;
    if (bare(0, size + alignment, 0, &found)) return OUT_OF_MEMORY;
    uint64_t at = ((uint64_t)found + alignment - (alignment ? 1 : 0)) & ~(uint64_t)(alignment ? alignment - 1 : 0);
    if (at > (uint64_t)found) munmap(found, at - (uint64_t)found);
    munmap((void *)(at + size), (uint64_t)found + alignment - at);
    for (int index = 0; index < 64; index++) {
        if (ranges[index].size) continue;
        ranges[index] = (extent){at, size};
        *out = at;
        return OK;
    }
    return OUT_OF_MEMORY;
}

int cuMemAddressFree(uint64_t at, size_t size) {
    for (int index = 0; index < 64; index++) {
        if (ranges[index].at != at || ranges[index].size != size || !size) continue;
        if (covered((extent){at, size})) return INVALID_VALUE;
        ranges[index].size = 0;
        munmap((void *)at, size);
        return OK;
    }
    return INVALID_VALUE;
}

int cuMemMap(uint64_t at, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    int code = told(MAP), fd = description(handle);
    extent where = {at, size};
    if (code) return code;
    if (!fd || offset || flags || !size || at % unit || size != units_of(fd).size * unit) return INVALID_VALUE;
    if (!reserved(where) || covered(where)) return INVALID_VALUE;
    if (mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, (off_t)(units_of(fd).at * unit)) == MAP_FAILED)
        return OUT_OF_MEMORY;
    uint64_t index = 0;
    while (index < mappings && mapped[index].where.size) index++;
    if (index == MAX) return OUT_OF_MEMORY;
    mapped[index] = (mapping){where, 0};
    if (index == mappings) mappings++;
    return OK;
}

int cuMemUnmap(uint64_t at, size_t size) {
    int code = told(UNMAP);
    extent where = {at, size};
    if (code) return code;
    if (!size || covered(where) != size) return INVALID_VALUE;
    if (working) return ILLEGAL_ADDRESS; /* a kernel touches it */
    if (bare(at, size, 1, NULL)) return OUT_OF_MEMORY;
    for (uint64_t index = 0; index < mappings; index++)
        if (mapped[index].where.size && inside(mapped[index].where, where)) mapped[index].where.size = 0;
    return OK;
}

int cuMemSetAccess(uint64_t at, size_t size, const int *desc, size_t count) {
    int code = told(ACCESS);
    extent where = {at, size};
    if (code) return code;
    if (count != 1 || desc[0] != 1 || desc[1] != 0 || desc[2] != 3 || covered(where) != size) return INVALID_VALUE;
    for (uint64_t index = 0; index < mappings; index++)
        if (mapped[index].where.size && inside(mapped[index].where, where)) mapped[index].access = 1;
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? OUT_OF_MEMORY : OK;
}

int cuMemsetD8Async(uint64_t at, unsigned char value, size_t count, void *stream) {
    int code = told(MEMSET);
    if (code) return code;
    if (!ours() || stream != &context) return INVALID_CONTEXT;
    if (covered((extent){at, count}) != count) return INVALID_VALUE;
    memset((void *)at, value, count);
    return OK;
}
