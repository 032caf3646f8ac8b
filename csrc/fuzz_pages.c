/* Fuzzer of the page ledger (fuzz.h says how it is run): a pool's file with a tenant in it, damaged, is opened and used.
 *
 * An input is a list of records of six bytes: either a word that is written into the file (where, which, how), or a call that is
 * made when it has been opened. Whatever the file holds, it is refused, or no call leaves the memory that it was given: the
 * table's, and arrays of exactly the size they may have. What is not damaged is the mutex, which the C library trusts.
 */
#include "pages.h"
#include "fuzz.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int rlc_pool_open(const char *, uint64_t, uint64_t, int, const char *, uint64_t, uint64_t, int, int *, rlc_pool **);
int rlc_pool_attach(rlc_pool *, int, uint64_t, int, const char *, int);
void rlc_pool_close(rlc_pool *);
int rlc_pool_join(rlc_pool *, const char *, int, int, uint64_t);
int64_t rlc_pool_acquire(rlc_pool *, uint64_t, int, uint64_t, uint64_t *);
int rlc_pool_release(rlc_pool *, const uint64_t *, uint64_t);
int rlc_pool_mark(rlc_pool *, const uint64_t *, uint64_t, int);
int rlc_pool_renew(rlc_pool *, const uint64_t *, uint64_t, uint64_t);
int64_t rlc_pool_expired(rlc_pool *, uint64_t, uint64_t *, uint64_t);
int rlc_pool_budget(rlc_pool *, int, uint64_t, uint64_t);
int rlc_pool_reap(rlc_pool *);
int rlc_pool_leave(rlc_pool *);
int rlc_pool_snapshot(rlc_pool *, uint64_t[9], rlc_tenant[RLC_TENANTS], uint8_t *, uint64_t *);
int rlc_pool_device(const rlc_pool *, char[64]);
int rlc_pool_publish(rlc_pool *, const uint64_t[RLC_WORDS]);
int rlc_pool_read(const rlc_pool *, int, uint64_t[RLC_WORDS]);
int rlc_range_reserve(uint64_t, void **);
int rlc_range_free(void *, uint64_t);
int64_t rlc_range_map(rlc_pool *, uint8_t *, const uint64_t *, const uint64_t *, uint64_t, int);
int rlc_range_unmap(rlc_pool *, uint8_t *, const uint64_t *, const uint64_t *, uint64_t);
int64_t rlc_pool_trim(rlc_pool *, uint64_t);

enum { PAGES = 6, PAGE = 4096, RECORD = 6, CALLS = 15 };
static const uint64_t EDGES[] = {0, 1, 2, 3, 5, 6, 7, 17, 255, 4095, 4096, 8192, 1ull << 20, 1ull << 26, (1ull << 26) + 1,
                                 1ull << 36, 1ull << 38, 1ull << 52, 1ull << 61, 1ull << 63, ~0ull};
enum { EDGE_COUNT = sizeof EDGES / sizeof *EDGES };

static char path[128];
static uint8_t *whole;
static size_t bytes;

/* The file of a pool that nobody has damaged, with the tenant that left it. */
static void begin(void)
{
    const char *folder = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/fuzz-pages-%d", folder ? folder : "/tmp", (int)getpid());
    uint64_t pages[PAGES];
    int made;
    rlc_pool *pool;
    unlink(path);
    if (rlc_pool_open(path, PAGES, PAGE, 1, "cpu", 1, 2, 0, &made, &pool)) fuzz_fail("no pool could be made");
    if (rlc_pool_join(pool, "one", RLC_SERVING, (int)getpid(), 0) < 0) fuzz_fail("no tenant could join");
    if (rlc_pool_acquire(pool, 3, 1, 5, pages) != 3) fuzz_fail("no pages could be had");
    struct stat facts;
    if (fstat(pool->fd, &facts)) fuzz_fail("no size");
    bytes = (size_t)facts.st_size;
    whole = malloc(bytes);
    if (!whole || pread(pool->fd, whole, bytes, 0) != (ssize_t)bytes) fuzz_fail("not read");
    rlc_pool_close(pool);
}

static void call(rlc_pool *pool, const uint8_t *record, uint64_t *pages, uint8_t *range)
{
    uint64_t count = record[1] % (PAGES + 1), edge = EDGES[record[2] % EDGE_COUNT], places[PAGES];
    for (int i = 0; i < PAGES; i++) places[i] = (uint64_t)i;
    switch (record[0] % CALLS) {
    case 0: rlc_pool_join(pool, record[1] & 1 ? "one" : "two", 1 + record[1] % 2, (int)getpid(), edge); break;
    case 1: if (pool->header->pages >= count) rlc_pool_acquire(pool, count, record[3] & 1, edge, pages); break;
    case 2: rlc_pool_release(pool, pages, count); break;
    case 3: rlc_pool_mark(pool, pages, count, record[3] & 1); break;
    case 4: rlc_pool_renew(pool, pages, count, edge); break;
    case 5: rlc_pool_expired(pool, edge, pages, PAGES); break;
    case 6: rlc_pool_budget(pool, record[1] % 18 - 1, edge, edge); break;
    case 7: rlc_pool_reap(pool); break;
    case 8: rlc_pool_leave(pool); break;
    case 9: pages[record[1] % PAGES] = edge; break;
    case 10: {
        uint64_t words[RLC_WORDS] = {edge};
        rlc_pool_publish(pool, words);
        rlc_pool_read(pool, record[1] % 18 - 1, words);
        break;
    }
    case 11: rlc_range_map(pool, range, places, pages, count, record[3] & 1); break;
    case 12: rlc_range_unmap(pool, range, places, pages, count); break;
    case 13: rlc_pool_attach(pool, record[1] % 18 - 1, edge, (int)getpid(), "cpu", record[3] & 1); break;
    default: rlc_pool_trim(pool, edge);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!whole) begin();
    uint8_t *file = malloc(bytes);
    if (!file) fuzz_fail("no memory");
    memcpy(file, whole, bytes);
    size_t length = bytes, lock = offsetof(rlc_header, lock), behind = lock + sizeof(pthread_mutex_t);
    size_t table = sizeof(rlc_header) + 3 * PAGES + 64 + 8 * PAGES;
    for (size_t at = 0; at + RECORD <= size; at += RECORD) {
        const uint8_t *record = data + at;
        if (record[0] & 0x80) continue; /* a call */
        size_t where = (size_t)(record[1] | record[2] << 8) % table;
        uint64_t word = record[0] & 0x40 ? record[3] * 0x0101010101010101ull : EDGES[record[3] % EDGE_COUNT];
        size_t wide = (size_t)1 << (record[4] % 4);
        if (record[5] == 255) length = where; /* cut */
        else if (where + wide <= bytes && (where + wide <= lock || where >= behind)) memcpy(file + where, &word, wide);
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600), made;
    if (fd < 0 || write(fd, file, length) != (ssize_t)length) fuzz_fail("not written");
    close(fd);
    free(file);
    rlc_pool *pool;
    int makes = size && data[0] & 1;
    int code = rlc_pool_open(path, makes ? PAGES : 0, makes ? PAGE : 0, 1, "cpu", 2, 2, size > 1 ? data[1] & 1 : 0, &made, &pool);
    if (code) return 0;
    uint64_t most = pool->header->pages, size_of_one = pool->header->page_bytes;
    if (most > 1 << 16 || most * size_of_one > 1 << 24) fuzz_fail("a pool that is larger than its file");
    uint64_t numbers[9], *pages = calloc(PAGES, sizeof *pages), *leases = malloc(8 * most);
    rlc_tenant tenants[RLC_TENANTS];
    uint8_t *owners = malloc(most);
    char device[64];
    void *range = 0;
    if (!pages || !leases || !owners || rlc_range_reserve(PAGES * size_of_one, &range)) fuzz_fail("no memory");
    for (size_t at = 0; at + RECORD <= size; at += RECORD)
        if (data[at] & 0x80) call(pool, data + at, pages, range);
    rlc_pool_snapshot(pool, numbers, tenants, owners, leases);
    rlc_pool_device(pool, device);
    for (int slot = 0; slot < RLC_TENANTS; slot++)
        if (tenants[slot].role > RLC_ROLLOUT) fuzz_fail("a role that there is not");
    rlc_range_free(range, PAGES * size_of_one);
    rlc_pool_close(pool);
    free(pages), free(leases), free(owners);
    return 0;
}

size_t fuzz_make(uint8_t *data)
{
    size_t records = 1 + fuzz_below(12);
    for (size_t at = 0; at < records * RECORD; at++) data[at] = (uint8_t)fuzz_next();
    for (size_t at = 0; at < records; at++)
        if (fuzz_below(2)) data[at * RECORD + 2] &= (uint8_t)(fuzz_below(2) ? 0 : 15); /* the beginning of the header, or all */
    return records * RECORD;
}
