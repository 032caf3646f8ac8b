/* The page ledger of a device's KV pool: which tenant owns which physical page, in shared memory that outlives any of them.
 *
 * One file holds the header, the table of tenants, the owner, lease and mapping of every page, and (host backend) the pages
 * themselves behind it. `owner` is the truth; every count is derived from it and rebuilt when a process died with the lock.
 * A tenant holds an open-file-description lock on a byte of the file for as long as it lives: the kernel drops it with the
 * process, whatever ended it and in whatever PID namespace it was. Where pages are memory of a device (`data` is 0), the lock is
 * not enough: a process that dies may drop it before its kernels have stopped, so its pages wait until it is gone altogether,
 * which only processes of one PID namespace see of each other: others cannot join.
 *
 * An engine of several ranks is one tenant. A page is then as many pieces of memory as there are ranks, one of each rank's own
 * device (in the file: one part per rank), and has one owner for all of them. Each rank's process is a member of the tenant, with
 * a lock of its own, and notes what it has mapped by a bit of its own: a page is released when no rank has it mapped, and the
 * pages of a tenant are free when no rank of it is left.
 */
#ifndef RLC_PAGES_H
#define RLC_PAGES_H

#include <pthread.h>
#include <stdint.h>

#define RLC_POOL_ABI 6
#define RLC_POOL_SCHEMA 5
#define RLC_POOL_MAGIC 0x314c4f4f50564b52ull /* "RKVPOOL1" */
#define RLC_TENANTS 16
#define RLC_RANKS 8 /* of an engine: bits of `mapped` */
#define RLC_WORDS 14 /* of a tenant's published state */
#define RLC_CONTROLS 8 /* what people and other processes ask of the serving tenant */

enum {
    RLC_POOL_BUSY = -10,     /* EEXIST, or a role that is taken */
    RLC_POOL_FOREIGN = -11,  /* another user's file, or not a pool */
    RLC_POOL_VERSION = -12,  /* another schema */
    RLC_POOL_SHAPE = -13,    /* pages or page size out of range */
    RLC_POOL_FULL = -14,     /* no tenant slot */
    RLC_POOL_NOT_OWNER = -15,
    RLC_POOL_MAPPED = -16,   /* a page that is still mapped cannot be released */
    RLC_POOL_GONE = -17,     /* the slot is not a live tenant's */
    RLC_POOL_OLD = -18,      /* a budget of an older revision */
    RLC_POOL_SYSTEM = -19,   /* errno says what */
    RLC_POOL_STUCK = -20,    /* the ledger's lock is held for too long; nothing was done */
    RLC_POOL_NAMESPACE = -21 /* process numbers mean others here: nobody could tell when a tenant is gone */
};

enum { RLC_FREE = 0, RLC_SERVING = 1, RLC_ROLLOUT = 2 };

typedef struct {
    uint32_t role; /* RLC_FREE: nobody */
    int32_t pid;   /* who decides, in the tenant's own namespace; for people and for the guardian */
    char name[64];
    uint64_t generation; /* of the slot: one more at each join */
    uint64_t budget;     /* pages it may own; ignored for the serving tenant */
    uint64_t revision;   /* of the budget */
    uint64_t used;       /* derived */
    uint64_t sequence;   /* of `words`: odd while they are written */
    uint64_t words[RLC_WORDS];
    uint64_t started[RLC_RANKS]; /* of each rank's process, in clock ticks since boot: a process number may be used again */
    int32_t members[RLC_RANKS];  /* their process numbers */
    uint32_t attached;           /* which ranks are there, by bits */
    uint32_t broken;             /* a rank is gone and others are not: it gets no pages any more */
} rlc_tenant;

typedef struct {
    uint64_t magic;
    uint32_t schema;
    uint32_t ready; /* set last by the creator */
    uint64_t page_bytes;
    uint64_t pages;
    uint64_t data; /* offset of page 0; 0: pages are not in this file */
    uint64_t epoch;
    uint64_t headroom; /* pages that a rollout tenant's acquire leaves free */
    uint64_t recoveries;
    uint64_t deaths;
    uint64_t hint;
    uint64_t free; /* derived */
    uint64_t control[RLC_CONTROLS];
    int32_t holder; /* who holds the lock, 0: nobody; in its own namespace */
    char device[RLC_RANKS][64]; /* of each rank's pages */
    uint64_t ranks;             /* of every engine in it */
    uint64_t namespace; /* of process numbers: the maker's */
    pthread_mutex_t lock;
    rlc_tenant tenants[RLC_TENANTS];
    /* uint8_t owner[pages] (0: free, else slot + 1); uint8_t last[pages]; uint8_t mapped[pages]; uint64_t lease[pages] */
} rlc_header;

typedef struct {
    int fd;
    int slot; /* -1: a watcher */
    int rank; /* whose pages this process maps */
    uint64_t generation;
    uint64_t bytes; /* that are mapped of the file */
    rlc_header *header;
    uint8_t *owner, *last, *mapped;
    uint64_t *lease;
} rlc_pool;

#endif
