/* See pages.h. Every function returns 0 or a count, or one of the negative codes there. */
#include "pages.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_PAGES (1ull << 26)
#define MAX_PAGE_BYTES (1ull << 31) /* so that no size of a pool overflows */
#define SOMEBODY 255 /* of `last`: a tenant that is no more */
#define PATIENCE_NS 5000000 /* to wait for the lock, which is held for microseconds by whoever runs */

static uint64_t table_bytes(uint64_t pages) {
    uint64_t bytes = (sizeof(rlc_header) + 3 * pages + 63) & ~63ull;
    return bytes + 8 * pages;
}

/* Where page 0 is, where pages are in the file. */
static uint64_t data_begin(uint64_t pages, uint64_t page_bytes) {
    return (table_bytes(pages) + page_bytes - 1) / page_bytes * page_bytes;
}

static int is_shape(uint64_t pages, uint64_t page_bytes) {
    return pages && pages <= MAX_PAGES && page_bytes >= 4096 && page_bytes <= MAX_PAGE_BYTES && !(page_bytes & (page_bytes - 1));
}

static void lay_out(rlc_pool *pool) {
    uint8_t *base = (uint8_t *)pool->header;
    uint64_t pages = pool->header->pages;
    pool->owner = base + sizeof(rlc_header);
    pool->last = pool->owner + pages;
    pool->mapped = pool->last + pages;
    pool->lease = (uint64_t *)(base + ((sizeof(rlc_header) + 3 * pages + 63) & ~63ull));
}

/* An open-file-description lock on one byte far behind everything that is stored: of tenants' first ranks, of the keepers of
 * each rank's pages, of tenants' other ranks. */
static int byte_lock(int fd, int at, short type, int command) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = ((off_t)1 << 61) + at, .l_len = 1};
    return fcntl(fd, command, &lock) == 0 ? (int)lock.l_type : -1;
}

/* Whether anybody holds any of those bytes: of a ledger that cannot be read nobody knows which ones are its tenants'. */
static int any_byte_locked(int fd) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)1 << 61, .l_len = 0};
    return fcntl(fd, F_OFD_GETLK, &lock) || lock.l_type != F_UNLCK;
}

static int member_byte(int slot, int rank) { return rank ? RLC_TENANTS + RLC_RANKS * (slot + 1) + rank : slot; }

static int keeper_byte(const rlc_pool *pool) { return RLC_TENANTS + pool->rank; }

static int alive(const rlc_pool *pool, int slot, int rank) {
    if (slot == pool->slot && rank == pool->rank) return 1; /* our own lock does not conflict with us */
    return byte_lock(pool->fd, member_byte(slot, rank), F_WRLCK, F_OFD_GETLK) != F_UNLCK;
}

/* When this process started, in clock ticks since boot; 0: it is not there, or nothing of it runs any more (it waits for its
 * parent: its last thread has closed its files, the device's among them). */
static uint64_t started(int pid) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return 0;
    text[got] = 0;
    const char *at = strrchr(text, ')'); /* its name may hold anything */
    char state;
    long threads;
    unsigned long long since;
    if (!at || sscanf(at + 1,
                      " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu", &state, &threads,
                      &since) != 3)
        return 0;
    return (state == 'Z' || state == 'X') && threads <= 1 ? 0 : since;
}

static uint64_t pid_namespace(void) {
    struct stat facts;
    return stat("/proc/self/ns/pid", &facts) ? 0 : (uint64_t)facts.st_ino;
}

static int member_present(const rlc_pool *pool, int slot, int rank) {
    if (alive(pool, slot, rank)) return 1;
    const rlc_tenant *tenant = &pool->header->tenants[slot];
    if (pool->header->data || tenant->role == RLC_FREE || !tenant->started[rank]) return 0;
    if (pool->header->namespace != pid_namespace()) return 1; /* a watcher; those that see it will tell */
    return started(tenant->members[rank]) == tenant->started[rank];
}

/* How many ranks of a tenant may still use its pages. */
static int present(const rlc_pool *pool, int slot) {
    uint32_t attached = pool->header->tenants[slot].attached | 1; /* the first has its lock before it says so */
    int found = 0;
    for (int rank = 0; rank < RLC_RANKS; rank++)
        if (attached >> rank & 1) found += member_present(pool, slot, rank);
    return found;
}

static void recount(rlc_pool *pool) {
    rlc_header *header = pool->header;
    uint64_t used[RLC_TENANTS] = {0}, free_pages = 0;
    for (uint64_t page = 0; page < header->pages; page++) {
        uint8_t owner = pool->owner[page];
        if (!owner) free_pages++;
        else if (owner <= RLC_TENANTS) used[owner - 1]++;
    }
    for (int slot = 0; slot < RLC_TENANTS; slot++) header->tenants[slot].used = used[slot];
    header->free = free_pages;
}

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Nobody waits for a holder that was stopped in here: the caller is told, and decides about it. (pthread_mutex_clocklock would
 * wait by the monotonic clock too, but is not in the glibc 2.28 that wheels are built for.) */
static int take(rlc_pool *pool) {
    const struct timespec pause = {.tv_nsec = 10000};
    int code = pthread_mutex_trylock(&pool->header->lock);
    if (code == EBUSY) {
        int64_t until = monotonic_ns() + PATIENCE_NS;
        while ((code = pthread_mutex_trylock(&pool->header->lock)) == EBUSY && monotonic_ns() < until) nanosleep(&pause, NULL);
    }
    if (code == EBUSY) return RLC_POOL_STUCK;
    if (code == EOWNERDEAD) {
        recount(pool);
        pool->header->recoveries++;
        code = pthread_mutex_consistent(&pool->header->lock);
    }
    if (code) {
        errno = code;
        return RLC_POOL_SYSTEM;
    }
    __atomic_store_n(&pool->header->holder, (int32_t)getpid(), __ATOMIC_RELAXED);
    return 0;
}

static void give(rlc_pool *pool) {
    __atomic_store_n(&pool->header->holder, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&pool->header->lock);
}

/* Pages of tenants that are gone are free again. The lock is held. Idempotent: whoever dies in here leaves it to the next. */
static int reap(rlc_pool *pool) {
    int found = 0;
    for (int slot = 0; slot < RLC_TENANTS; slot++) {
        rlc_tenant *tenant = &pool->header->tenants[slot];
        if (tenant->role == RLC_FREE) continue;
        int left = present(pool, slot);
        if (left) {
            tenant->broken = left < __builtin_popcount(tenant->attached);
            continue;
        }
        for (uint64_t page = 0; page < pool->header->pages; page++) {
            if (pool->owner[page] != slot + 1) continue;
            pool->mapped[page] = 0;
            pool->lease[page] = 0;
            pool->last[page] = (uint8_t)(slot + 1);
            pool->owner[page] = 0;
        }
        tenant->role = RLC_FREE;
        pool->header->deaths++;
        found++;
    }
    if (found) recount(pool);
    return found;
}

static int map_file(rlc_pool *pool, uint64_t bytes) {
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, pool->fd, 0);
    if (base == MAP_FAILED) return RLC_POOL_SYSTEM;
    pool->header = base;
    pool->bytes = bytes;
    return 0;
}

EXPORT int rlc_pool_abi(void) { return RLC_POOL_ABI; }

EXPORT void rlc_pool_close(rlc_pool *pool) {
    if (pool->header) munmap(pool->header, pool->bytes);
    if (pool->fd >= 0) close(pool->fd);
    free(pool);
}

/* Make the file's content; the caller holds an exclusive flock on fd. */
static int fill(rlc_pool *pool, uint64_t pages, uint64_t page_bytes, int data, const char *device, uint64_t epoch,
                uint64_t ranks) {
    uint64_t table = table_bytes(pages), begin = data_begin(pages, page_bytes);
    if (ftruncate(pool->fd, 0) || ftruncate(pool->fd, (off_t)(data ? begin + ranks * pages * page_bytes : table)))
        return RLC_POOL_SYSTEM;
    int code = map_file(pool, table);
    if (code) return code;
    rlc_header *header = pool->header;
    header->magic = RLC_POOL_MAGIC;
    header->schema = RLC_POOL_SCHEMA;
    header->page_bytes = page_bytes;
    header->pages = pages;
    header->data = data ? begin : 0;
    header->epoch = epoch;
    header->free = pages;
    header->namespace = pid_namespace();
    header->ranks = ranks;
    strncpy(header->device[0], device, sizeof header->device[0] - 1);
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    code = pthread_mutex_init(&header->lock, &kind);
    pthread_mutexattr_destroy(&kind);
    if (code) {
        errno = code;
        return RLC_POOL_SYSTEM;
    }
    lay_out(pool);
    __atomic_store_n(&header->ready, 1, __ATOMIC_RELEASE);
    return 0;
}

static int check(rlc_pool *pool) {
    struct stat facts;
    if (fstat(pool->fd, &facts)) return RLC_POOL_SYSTEM;
    if (facts.st_uid != geteuid() || (facts.st_mode & 077)) return RLC_POOL_FOREIGN;
    if ((uint64_t)facts.st_size < sizeof(rlc_header)) return RLC_POOL_FOREIGN;
    int code = map_file(pool, sizeof(rlc_header));
    if (code) return code;
    rlc_header *header = pool->header;
    if (header->magic != RLC_POOL_MAGIC) return RLC_POOL_FOREIGN;
    if (header->schema != RLC_POOL_SCHEMA) return RLC_POOL_VERSION;
    uint64_t pages = header->pages, page_bytes = header->page_bytes, data = header->data, ranks = header->ranks;
    if (!__atomic_load_n(&header->ready, __ATOMIC_ACQUIRE) || !is_shape(pages, page_bytes)) return RLC_POOL_FOREIGN;
    if (!ranks || ranks > RLC_RANKS) return RLC_POOL_FOREIGN;
    uint64_t table = table_bytes(pages), begin = data_begin(pages, page_bytes);
    if ((data && data != begin) || (uint64_t)facts.st_size < (data ? begin + ranks * pages * page_bytes : table))
        return RLC_POOL_FOREIGN;
    for (int slot = 0; slot < RLC_TENANTS; slot++) {
        const rlc_tenant *tenant = &header->tenants[slot];
        if (tenant->role > RLC_ROLLOUT || tenant->name[sizeof tenant->name - 1]) return RLC_POOL_FOREIGN;
    }
    munmap(pool->header, pool->bytes);
    pool->header = NULL;
    if ((code = map_file(pool, table))) return code;
    lay_out(pool);
    for (uint64_t page = 0; page < pages; page++)
        if (pool->owner[page] > RLC_TENANTS) return RLC_POOL_FOREIGN;
    return 0;
}

/* Open the pool, or (pages > 0) make it. *made: whether we did. A file that nobody lives in is made anew where its shape
 * differs or its maker died before it was done; one with tenants in it must have our shape. */
EXPORT int rlc_pool_open(const char *path, uint64_t pages, uint64_t page_bytes, int data, const char *device,
                         uint64_t epoch, uint64_t ranks, int rank, int *made, rlc_pool **out) {
    if (pages && (!is_shape(pages, page_bytes) || !ranks || ranks > RLC_RANKS)) return RLC_POOL_SHAPE;
    if (rank < 0 || rank >= RLC_RANKS) return RLC_POOL_SHAPE;
    rlc_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return RLC_POOL_SYSTEM;
    pool->slot = -1;
    pool->rank = rank;
    *made = 0;
    pool->fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | (pages ? O_CREAT : 0), 0600);
    int code = 0;
    if (pool->fd < 0) code = errno == EACCES || errno == ELOOP ? RLC_POOL_FOREIGN : RLC_POOL_SYSTEM;
    else if (flock(pool->fd, LOCK_EX)) code = RLC_POOL_SYSTEM;
    if (!code) {
        struct stat facts, named;
        code = fstat(pool->fd, &facts) ? RLC_POOL_SYSTEM : 0;
        if (!code && (stat(path, &named) || named.st_ino != facts.st_ino)) { /* it was removed while we waited */
            errno = ESTALE;
            code = RLC_POOL_SYSTEM;
        }
        if (!code && facts.st_uid != geteuid()) code = RLC_POOL_FOREIGN;
        if (!code) {
            int settled = facts.st_size ? check(pool) : RLC_POOL_FOREIGN;
            int fits = !settled && (!pages || (pool->header->pages == pages && pool->header->page_bytes == page_bytes &&
                                               !pool->header->data == !data && pool->header->ranks == ranks &&
                                               !strncmp(pool->header->device[0], device, sizeof pool->header->device[0] - 1)));
            int live = settled ? any_byte_locked(pool->fd) : 0;
            for (int slot = 0; slot < RLC_TENANTS && !settled && !live; slot++) live = present(pool, slot);
            if (!fits && pages && live) code = settled == RLC_POOL_VERSION ? RLC_POOL_VERSION : RLC_POOL_SHAPE;
            else if (!fits && !pages) code = settled;
            else if (!fits) {
                if (pool->header) munmap(pool->header, pool->bytes);
                pool->header = NULL;
                /* what is not a pool at all is not ours to overwrite */
                if (facts.st_size && settled == RLC_POOL_FOREIGN) {
                    uint64_t magic = 0;
                    if (pread(pool->fd, &magic, sizeof magic, 0) != sizeof magic || (magic && magic != RLC_POOL_MAGIC))
                        code = RLC_POOL_FOREIGN;
                }
                if (!code) {
                    code = fill(pool, pages, page_bytes, data, device, epoch, ranks);
                    *made = !code;
                }
            }
        }
        flock(pool->fd, LOCK_UN);
    }
    if (code) {
        int kept = errno;
        rlc_pool_close(pool);
        errno = kept;
        return code;
    }
    *out = pool;
    return 0;
}

static void note_member(rlc_tenant *tenant, int rank, int pid) {
    tenant->members[rank] = pid;
    tenant->started[rank] = started(pid);
    tenant->attached |= 1u << rank;
}

/* Become a tenant, of several ranks its first. One serving tenant a pool. */
EXPORT int rlc_pool_join(rlc_pool *pool, const char *name, int role, int pid, uint64_t budget) {
    if (!pool->header->data && pool->header->namespace != pid_namespace()) return RLC_POOL_NAMESPACE;
    int code = take(pool);
    if (code) return code;
    reap(pool);
    int slot = -1;
    for (int index = RLC_TENANTS - 1; index >= 0; index--) {
        rlc_tenant *tenant = &pool->header->tenants[index];
        if (tenant->role == RLC_FREE) slot = index;
        else if (role == RLC_SERVING && tenant->role == RLC_SERVING) code = RLC_POOL_BUSY;
        else if (!strncmp(tenant->name, name, sizeof tenant->name - 1)) code = RLC_POOL_BUSY;
    }
    if (!code && slot < 0) code = RLC_POOL_FULL;
    if (!code && byte_lock(pool->fd, member_byte(slot, pool->rank), F_WRLCK, F_OFD_SETLK) < 0) code = RLC_POOL_SYSTEM;
    if (!code) {
        rlc_tenant *tenant = &pool->header->tenants[slot];
        uint64_t generation = tenant->generation + 1;
        for (uint64_t page = 0; page < pool->header->pages; page++) /* what another tenant of this slot left is not ours */
            if (pool->last[page] == slot + 1) pool->last[page] = SOMEBODY;
        memset(tenant, 0, sizeof *tenant);
        strncpy(tenant->name, name, sizeof tenant->name - 1);
        tenant->pid = pid;
        note_member(tenant, pool->rank, pid);
        tenant->generation = generation;
        tenant->budget = budget;
        tenant->role = (uint32_t)role; /* last: from here on it counts */
        pool->slot = slot;
        pool->generation = generation;
        code = slot;
    }
    give(pool);
    return code;
}

/* Be another rank of a tenant that has joined, with pages on `device`; or (`scheduler`) the process that decides for all ranks
 * and maps nothing: its end does not end the tenant. */
EXPORT int rlc_pool_attach(rlc_pool *pool, int slot, uint64_t generation, int pid, const char *device, int scheduler) {
    if (slot < 0 || slot >= RLC_TENANTS || (uint64_t)pool->rank >= pool->header->ranks) return RLC_POOL_SHAPE;
    int code = take(pool);
    if (code) return code;
    rlc_tenant *tenant = &pool->header->tenants[slot];
    char *here = pool->header->device[pool->rank];
    if (tenant->role == RLC_FREE || tenant->generation != generation) code = RLC_POOL_GONE;
    else if (scheduler) tenant->pid = pid;
    else if (*here && strncmp(here, device, 63)) code = RLC_POOL_SHAPE;
    else if (tenant->attached >> pool->rank & 1) code = RLC_POOL_BUSY;
    else if (byte_lock(pool->fd, member_byte(slot, pool->rank), F_WRLCK, F_OFD_SETLK) < 0) code = RLC_POOL_SYSTEM;
    else {
        strncpy(here, device, 63);
        note_member(tenant, pool->rank, pid);
    }
    if (!code) {
        pool->slot = slot;
        pool->generation = generation;
    }
    give(pool);
    return code;
}

static rlc_tenant *self(rlc_pool *pool) {
    if (pool->slot < 0) return NULL;
    rlc_tenant *tenant = &pool->header->tenants[pool->slot];
    return tenant->role == RLC_FREE || tenant->generation != pool->generation ? NULL : tenant;
}

/* Up to `count` free pages, or (`whole`) all of them or none; into `out`. Leased until `lease` (0: no lease). */
EXPORT int64_t rlc_pool_acquire(rlc_pool *pool, uint64_t count, int whole, uint64_t lease, uint64_t *out) {
    int code = take(pool);
    if (code) return code;
    rlc_header *header = pool->header;
    rlc_tenant *tenant = self(pool);
    int64_t found = RLC_POOL_GONE;
    if (tenant) {
        uint64_t room = header->free;
        if (tenant->role != RLC_SERVING) {
            uint64_t own = tenant->budget > tenant->used ? tenant->budget - tenant->used : 0;
            room = room > header->headroom ? room - header->headroom : 0;
            if (own < room) room = own;
        }
        if (tenant->broken) room = 0;
        uint64_t wanted = count <= room ? count : whole ? 0 : room;
        found = 0;
        uint64_t page = header->hint < header->pages ? header->hint : 0;
        for (uint64_t seen = 0; seen < header->pages && (uint64_t)found < wanted; seen++) {
            if (!pool->owner[page]) {
                pool->lease[page] = lease;
                pool->mapped[page] = 0;
                pool->owner[page] = (uint8_t)(pool->slot + 1);
                out[found++] = page;
                header->free--;
                tenant->used++;
            }
            page = page + 1 < header->pages ? page + 1 : 0;
        }
        header->hint = page;
    }
    give(pool);
    return found;
}

static int own_all(const rlc_pool *pool, const uint64_t *pages, uint64_t count) {
    for (uint64_t index = 0; index < count; index++)
        if (pages[index] >= pool->header->pages || pool->owner[pages[index]] != pool->slot + 1) return 0;
    return 1;
}

/* Give pages back; all of them must be ours, and none mapped, by any rank. */
EXPORT int rlc_pool_release(rlc_pool *pool, const uint64_t *pages, uint64_t count) {
    int code = take(pool);
    if (code) return code;
    rlc_tenant *tenant = self(pool);
    if (!tenant) code = RLC_POOL_GONE;
    else if (!own_all(pool, pages, count)) code = RLC_POOL_NOT_OWNER;
    for (uint64_t index = 0; !code && index < count; index++)
        if (pool->mapped[pages[index]]) code = RLC_POOL_MAPPED;
    for (uint64_t index = 0; !code && index < count; index++) {
        uint64_t page = pages[index];
        if (!pool->owner[page]) code = RLC_POOL_NOT_OWNER; /* named twice; those before it are released */
        else {
            pool->lease[page] = 0;
            pool->last[page] = (uint8_t)(pool->slot + 1);
            pool->owner[page] = 0;
            pool->header->free++;
            tenant->used--;
        }
    }
    give(pool);
    return code;
}

/* By this rank; the others may be at theirs at the same time. */
static int is_mapped(const rlc_pool *pool, uint64_t page) {
    return __atomic_load_n(&pool->mapped[page], __ATOMIC_ACQUIRE) >> pool->rank & 1;
}

static void note_mapped(const rlc_pool *pool, uint64_t page, int mapped) {
    uint8_t bit = (uint8_t)(1u << pool->rank);
    if (mapped) __atomic_fetch_or(&pool->mapped[page], bit, __ATOMIC_ACQ_REL);
    else __atomic_fetch_and(&pool->mapped[page], (uint8_t)~bit, __ATOMIC_ACQ_REL);
}

/* For pages that another library maps: note that ours are mapped now, or are not any more. All or none. */
EXPORT int rlc_pool_mark(rlc_pool *pool, const uint64_t *pages, uint64_t count, int mapped) {
    if (!self(pool)) return RLC_POOL_GONE;
    if (!own_all(pool, pages, count)) return RLC_POOL_NOT_OWNER;
    for (uint64_t index = 0; mapped && index < count; index++)
        if (is_mapped(pool, pages[index])) return RLC_POOL_MAPPED;
    for (uint64_t index = 0; index < count; index++) note_mapped(pool, pages[index], mapped);
    return 0;
}

/* Lease until `lease` (nanoseconds of CLOCK_MONOTONIC; 0: for good). */
EXPORT int rlc_pool_renew(rlc_pool *pool, const uint64_t *pages, uint64_t count, uint64_t lease) {
    int code = take(pool);
    if (code) return code;
    if (!self(pool)) code = RLC_POOL_GONE;
    else if (!own_all(pool, pages, count)) code = RLC_POOL_NOT_OWNER;
    for (uint64_t index = 0; !code && index < count; index++) pool->lease[pages[index]] = lease;
    give(pool);
    return code;
}

/* Our pages whose lease ended before `now`, at most `room` of them. */
EXPORT int64_t rlc_pool_expired(rlc_pool *pool, uint64_t now, uint64_t *out, uint64_t room) {
    int code = take(pool);
    if (code) return code;
    int64_t found = 0;
    for (uint64_t page = 0; page < pool->header->pages && (uint64_t)found < room; page++)
        if (pool->owner[page] == pool->slot + 1 && pool->lease[page] && pool->lease[page] < now) out[found++] = page;
    give(pool);
    return found;
}

/* Pages that we own, and that we may own; read before every step, so without the lock. */
EXPORT int rlc_pool_share(rlc_pool *pool, uint64_t out[2]) {
    const rlc_tenant *tenant = self(pool);
    if (!tenant) return RLC_POOL_GONE;
    out[0] = __atomic_load_n(&tenant->used, __ATOMIC_RELAXED);
    out[1] = __atomic_load_n(&tenant->budget, __ATOMIC_RELAXED);
    return 0;
}

/* Of any tenant, by whoever may decide it. Revisions only grow. */
EXPORT int rlc_pool_budget(rlc_pool *pool, int slot, uint64_t budget, uint64_t revision) {
    if (slot < 0 || slot >= RLC_TENANTS) return RLC_POOL_GONE;
    int code = take(pool);
    if (code) return code;
    rlc_tenant *tenant = &pool->header->tenants[slot];
    if (tenant->role == RLC_FREE) code = RLC_POOL_GONE;
    else if (revision <= tenant->revision) code = RLC_POOL_OLD;
    else {
        tenant->budget = budget;
        tenant->revision = revision;
    }
    give(pool);
    return code;
}

EXPORT int rlc_pool_headroom(rlc_pool *pool, uint64_t pages) {
    int code = take(pool);
    if (code) return code;
    pool->header->headroom = pages;
    give(pool);
    return 0;
}

/* Take back the pages of dead tenants. Returns how many tenants that were. */
EXPORT int rlc_pool_reap(rlc_pool *pool) {
    int code = take(pool);
    if (code) return code;
    code = reap(pool);
    give(pool);
    return code;
}

EXPORT int rlc_pool_leave(rlc_pool *pool) {
    int code = take(pool);
    if (code) return code;
    rlc_tenant *tenant = self(pool);
    if (!tenant) code = RLC_POOL_GONE;
    else if (tenant->used) code = RLC_POOL_MAPPED;
    else {
        tenant->role = RLC_FREE;
        byte_lock(pool->fd, member_byte(pool->slot, pool->rank), F_UNLCK, F_OFD_SETLK);
        pool->slot = -1;
    }
    give(pool);
    return code;
}

/* A consistent copy: the header without its lock, and the owner of every page. Null: not wanted. */
EXPORT int rlc_pool_snapshot(rlc_pool *pool, uint64_t numbers[9], rlc_tenant tenants[RLC_TENANTS], uint8_t *owner,
                             uint64_t *lease) {
    int code = take(pool);
    if (code) return code;
    const rlc_header *header = pool->header;
    uint64_t found[9] = {header->pages,  header->page_bytes, header->free, header->headroom, header->epoch,
                         header->deaths, header->recoveries, header->data, header->ranks};
    memcpy(numbers, found, sizeof found);
    memcpy(tenants, header->tenants, sizeof header->tenants);
    if (owner) memcpy(owner, pool->owner, header->pages);
    if (lease) memcpy(lease, pool->lease, 8 * header->pages);
    give(pool);
    return 0;
}

/* Become the process that keeps the memory of this rank's pages, one of each; for as long as it lives. */
EXPORT int rlc_pool_keep(rlc_pool *pool) {
    return byte_lock(pool->fd, keeper_byte(pool), F_WRLCK, F_OFD_SETLK) < 0 ? RLC_POOL_BUSY : 0;
}

/* Whether another process is that. */
EXPORT int rlc_pool_kept(const rlc_pool *pool) { return byte_lock(pool->fd, keeper_byte(pool), F_WRLCK, F_OFD_GETLK) != F_UNLCK; }

/* What this rank's pages are, as the first who had them said, for all who join; empty: nobody has. */
EXPORT int rlc_pool_device(const rlc_pool *pool, char out[64]) {
    memcpy(out, pool->header->device[pool->rank], 64);
    return 0;
}

/* Who holds the lock now; 0: nobody. */
EXPORT int rlc_pool_holder(const rlc_pool *pool) { return __atomic_load_n(&pool->header->holder, __ATOMIC_RELAXED); }

/* Plain words without the lock: a wish of people or of another process. `add`: to what is there. */
EXPORT int rlc_pool_control(rlc_pool *pool, int index, uint64_t value, int add) {
    if (index < 0 || index >= RLC_CONTROLS) return RLC_POOL_SHAPE;
    if (add) __atomic_fetch_add(&pool->header->control[index], value, __ATOMIC_RELEASE);
    else __atomic_store_n(&pool->header->control[index], value, __ATOMIC_RELEASE);
    return 0;
}

EXPORT int rlc_pool_controls(const rlc_pool *pool, uint64_t out[RLC_CONTROLS]) {
    for (int index = 0; index < RLC_CONTROLS; index++)
        out[index] = __atomic_load_n(&pool->header->control[index], __ATOMIC_ACQUIRE);
    return 0;
}

/* Publish our state, read every tick by others: a seqlock with one writer, so that nobody waits. */
EXPORT int rlc_pool_publish(rlc_pool *pool, const uint64_t words[RLC_WORDS]) {
    rlc_tenant *tenant = self(pool);
    if (!tenant) return RLC_POOL_GONE;
    uint64_t sequence = __atomic_load_n(&tenant->sequence, __ATOMIC_RELAXED);
    sequence |= 1; /* also after a writer that died in here */
    __atomic_store_n(&tenant->sequence, sequence, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    for (int word = 0; word < RLC_WORDS; word++) __atomic_store_n(&tenant->words[word], words[word], __ATOMIC_RELAXED);
    __atomic_store_n(&tenant->sequence, sequence + 1, __ATOMIC_RELEASE);
    return 0;
}

/* 1: read; 0: being written, or nobody is there. */
EXPORT int rlc_pool_read(const rlc_pool *pool, int slot, uint64_t words[RLC_WORDS]) {
    if (slot < 0 || slot >= RLC_TENANTS) return RLC_POOL_GONE;
    const rlc_tenant *tenant = &pool->header->tenants[slot];
    for (int attempt = 0; attempt < 64; attempt++) {
        uint64_t before = __atomic_load_n(&tenant->sequence, __ATOMIC_ACQUIRE);
        if (!before || before & 1) continue;
        for (int word = 0; word < RLC_WORDS; word++) words[word] = __atomic_load_n(&tenant->words[word], __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (__atomic_load_n(&tenant->sequence, __ATOMIC_RELAXED) == before) return tenant->role != RLC_FREE;
    }
    return 0;
}

/* -- host memory: pages of the file, mapped into a range of addresses that is reserved once ---------------------------- */

EXPORT int rlc_range_reserve(uint64_t bytes, void **out) {
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return RLC_POOL_SYSTEM;
    *out = base;
    return 0;
}

EXPORT int rlc_range_free(void *base, uint64_t bytes) { return munmap(base, bytes) ? RLC_POOL_SYSTEM : 0; }

/* Page `pages[i]` of the pool appears at `places[i]` of the range (in pages). Scrubbed first where `scrub` and somebody else
 * had it before us. On an error those before it are mapped: returns how many. */
EXPORT int64_t rlc_range_map(rlc_pool *pool, uint8_t *base, const uint64_t *places, const uint64_t *pages, uint64_t count,
                             int scrub) {
    uint64_t size = pool->header->page_bytes, data = pool->header->data;
    if (!data || !self(pool)) return RLC_POOL_GONE;
    if (!own_all(pool, pages, count)) return RLC_POOL_NOT_OWNER;
    for (uint64_t index = 0; index < count; index++)
        if (is_mapped(pool, pages[index])) return RLC_POOL_MAPPED;
    if ((uint64_t)pool->rank >= pool->header->ranks) return RLC_POOL_SHAPE;
    for (uint64_t index = 0; index < count; index++) {
        off_t offset = (off_t)(data + (pool->rank * pool->header->pages + pages[index]) * size);
        if (scrub && pool->last[pages[index]] && pool->last[pages[index]] != pool->slot + 1 &&
            fallocate(pool->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, (off_t)size))
            return RLC_POOL_SYSTEM;
        note_mapped(pool, pages[index], 1);
        void *at = mmap(base + places[index] * size, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pool->fd, offset);
        if (at == MAP_FAILED) {
            note_mapped(pool, pages[index], 0);
            return index ? (int64_t)index : RLC_POOL_SYSTEM;
        }
    }
    return (int64_t)count;
}

/* What touches the range there afterwards faults. */
EXPORT int rlc_range_unmap(rlc_pool *pool, uint8_t *base, const uint64_t *places, const uint64_t *pages, uint64_t count) {
    uint64_t size = pool->header->page_bytes;
    if (!self(pool)) return RLC_POOL_GONE;
    if (!own_all(pool, pages, count)) return RLC_POOL_NOT_OWNER;
    for (uint64_t index = 0; index < count; index++) {
        void *at = mmap(base + places[index] * size, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) return RLC_POOL_SYSTEM;
        note_mapped(pool, pages[index], 0);
    }
    return 0;
}

/* Return the memory of free pages to the system, at most `count`; they stay in the pool. */
EXPORT int64_t rlc_pool_trim(rlc_pool *pool, uint64_t count) {
    int code = take(pool);
    if (code) return code;
    int64_t done = 0;
    uint64_t size = pool->header->page_bytes, data = pool->header->data;
    for (uint64_t page = 0; data && page < pool->header->pages && (uint64_t)done < count; page++) {
        if (pool->owner[page] || !pool->last[page]) continue;
        for (uint64_t rank = 0; done >= 0 && rank < pool->header->ranks && rank < RLC_RANKS; rank++) {
            off_t offset = (off_t)(data + (rank * pool->header->pages + page) * size);
            if (fallocate(pool->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, (off_t)size)) done = RLC_POOL_SYSTEM;
        }
        if (done < 0) break;
        pool->last[page] = 0; /* reads as zeros from here on */
        done++;
    }
    give(pool);
    return done;
}
