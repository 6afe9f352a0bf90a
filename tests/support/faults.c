/* Faults below Python's file calls: preloaded, this library stands between a process and the C library's.
 *
 * A rule names calls, files and which of the matching calls it hits; those fail with an error of the system, or transfer
 * fewer bytes than asked for, as the system may at any time. What a short read did not deliver is overwritten: whoever
 * counts on it does not find the right bytes there by luck.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READS = 1, WRITES = 2, SYNCS = 4, TRUNCATES = 8, OPENS_DIRECT = 16, ONLY_DIRECT = 32 };
enum { MOST_RULES = 16, PAGE = 4096, GARBAGE = 0xA5 };

struct rule {
    int calls;      /* of the kinds above */
    char path[256]; /* part of the file's path */
    long first;     /* the first call it hits, from 1 */
    long count;     /* how many it hits; below 0: all that follow */
    int error;      /* errno; 0: a short transfer */
    long most;      /* bytes of a short transfer; below 0: half of what is asked for */
    long seen;      /* matching calls so far */
    long hits;
};

static struct rule rules[MOST_RULES];
static int rule_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Add a rule; returns its number. */
int faults_add(int calls, const char *path, long first, long count, int error, long most) {
    pthread_mutex_lock(&lock);
    int number = rule_count < MOST_RULES ? rule_count++ : -1;
    if (number >= 0) {
        struct rule *rule = &rules[number];
        memset(rule, 0, sizeof *rule);
        rule->calls = calls;
        snprintf(rule->path, sizeof rule->path, "%s", path);
        rule->first = first;
        rule->count = count;
        rule->error = error;
        rule->most = most;
    }
    pthread_mutex_unlock(&lock);
    return number;
}

void faults_clear(void) {
    pthread_mutex_lock(&lock);
    rule_count = 0;
    pthread_mutex_unlock(&lock);
}

long faults_seen(int number) { return rules[number].seen; }

long faults_hits(int number) { return rules[number].hits; }

/* Whether a call is hit; then *error and *most say how. The first rule that hits counts. */
static int hit(int call, const char *path, int direct, int *error, long *most) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < rule_count; i++) {
        struct rule *rule = &rules[i];
        if (!(rule->calls & call) || (rule->calls & ONLY_DIRECT && !direct) || !strstr(path, rule->path)) continue;
        rule->seen++;
        if (found || rule->seen < rule->first || (rule->count >= 0 && rule->seen >= rule->first + rule->count)) continue;
        rule->hits++;
        *error = rule->error;
        *most = rule->most;
        found = 1;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static int is_direct(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT);
}

static int hit_fd(int call, int fd, int *error, long *most) {
    char link[64], path[4096];
    if (!rule_count) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    int kept = errno, found = hit(call, path, is_direct(fd), error, most);
    errno = kept;
    return found;
}

static long shortened(long asked, long most) {
    long count = most < 0 ? asked / 2 : most;
    if (count > asked) count = asked;
    return count < 1 && asked > 0 ? 1 : count; /* 0 would be the end of the file */
}

static long total(const struct iovec *parts, int count) {
    long sum = 0;
    for (int i = 0; i < count; i++) sum += (long)parts[i].iov_len;
    return sum;
}

/* After a whole read of `got` bytes: pretend that it was short. */
static ssize_t cut_read(const struct iovec *parts, int count, ssize_t got, long most) {
    if (got <= 0) return got;
    long keep = shortened(got, most), at = 0;
    for (int i = 0; i < count; i++) {
        long length = (long)parts[i].iov_len;
        for (long j = 0; j < length && at + j < got; j++)
            if (at + j >= keep) ((unsigned char *)parts[i].iov_base)[j] = GARBAGE;
        at += length;
    }
    return keep;
}

/* Write fewer bytes. A direct descriptor takes whole pages only; the system itself may stop anywhere. */
static ssize_t cut_write(int fd, const struct iovec *parts, int count, off_t offset, long most) {
    long left = shortened(total(parts, count), most), done = 0;
    int other = -1;
    if (is_direct(fd) && left % PAGE) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        REAL(open64);
        other = real(link, O_WRONLY | O_CLOEXEC);
        if (other < 0) return -1;
    }
    REAL(pwrite64);
    for (int i = 0; i < count && left > 0; i++) {
        long length = (long)parts[i].iov_len < left ? (long)parts[i].iov_len : left;
        ssize_t put = real(other < 0 ? fd : other, parts[i].iov_base, (size_t)length, offset + done);
        if (put < 0) {
            if (!done) done = -1;
            break;
        }
        done += put;
        left -= put;
        if (put < length) break;
    }
    if (other >= 0) close(other);
    return done;
}

#define READ(name, parameters, arguments, parts, count) \
    ssize_t name parameters { \
        REAL(name); \
        int error; \
        long most; \
        if (!hit_fd(READS, fd, &error, &most)) return real arguments; \
        if (error) return errno = error, -1; \
        return cut_read(parts, count, real arguments, most); \
    }

#define WRITE(name, parameters, arguments, parts, count) \
    ssize_t name parameters { \
        REAL(name); \
        int error; \
        long most; \
        if (!hit_fd(WRITES, fd, &error, &most)) return real arguments; \
        if (error) return errno = error, -1; \
        return cut_write(fd, parts, count, offset, most); \
    }

READ(pread, (int fd, void *out, size_t n, off_t offset), (fd, out, n, offset), (&(struct iovec){out, n}), 1)
READ(pread64, (int fd, void *out, size_t n, off64_t offset), (fd, out, n, offset), (&(struct iovec){out, n}), 1)
READ(preadv, (int fd, const struct iovec *v, int c, off_t offset), (fd, v, c, offset), v, c)
READ(preadv64, (int fd, const struct iovec *v, int c, off64_t offset), (fd, v, c, offset), v, c)
READ(preadv2, (int fd, const struct iovec *v, int c, off_t offset, int flags), (fd, v, c, offset, flags), v, c)
READ(preadv64v2, (int fd, const struct iovec *v, int c, off64_t offset, int flags), (fd, v, c, offset, flags), v, c)

WRITE(pwrite, (int fd, const void *in, size_t n, off_t offset), (fd, in, n, offset), (&(struct iovec){(void *)in, n}), 1)
WRITE(pwrite64, (int fd, const void *in, size_t n, off64_t offset), (fd, in, n, offset), (&(struct iovec){(void *)in, n}), 1)
WRITE(pwritev, (int fd, const struct iovec *v, int c, off_t offset), (fd, v, c, offset), v, c)
WRITE(pwritev64, (int fd, const struct iovec *v, int c, off64_t offset), (fd, v, c, offset), v, c)
WRITE(pwritev2, (int fd, const struct iovec *v, int c, off_t offset, int flags), (fd, v, c, offset, flags), v, c)
WRITE(pwritev64v2, (int fd, const struct iovec *v, int c, off64_t offset, int flags), (fd, v, c, offset, flags), v, c)

/* What goes through a file's own position can only fail; its short transfers are Python's to mend. */
ssize_t write(int fd, const void *in, size_t n) {
    REAL(write);
    int error;
    long most;
    if (!hit_fd(WRITES, fd, &error, &most)) return real(fd, in, n);
    if (error) return errno = error, -1;
    return real(fd, in, (size_t)shortened((long)n, most));
}

ssize_t read(int fd, void *out, size_t n) {
    REAL(read);
    int error;
    long most;
    if (!hit_fd(READS, fd, &error, &most)) return real(fd, out, n);
    if (error) return errno = error, -1;
    return real(fd, out, (size_t)shortened((long)n, most));
}

#define FAIL(name, call, parameters, arguments) \
    int name parameters { \
        REAL(name); \
        int error; \
        long most; \
        if (hit_fd(call, fd, &error, &most)) return errno = error, -1; \
        return real arguments; \
    }

FAIL(fsync, SYNCS, (int fd), (fd))
FAIL(fdatasync, SYNCS, (int fd), (fd))
FAIL(ftruncate, TRUNCATES, (int fd, off_t length), (fd, length))
FAIL(ftruncate64, TRUNCATES, (int fd, off64_t length), (fd, length))

#define OPEN(name, parameters, last, path, arguments) \
    int name parameters { \
        REAL(name); \
        mode_t mode = 0; \
        int error; \
        long most; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, last); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        if (flags & O_DIRECT && rule_count && hit(OPENS_DIRECT, path, 1, &error, &most)) return errno = error, -1; \
        return real arguments; \
    }

OPEN(open, (const char *path, int flags, ...), flags, path, (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), flags, path, (path, flags, mode))
OPEN(openat, (int at, const char *path, int flags, ...), flags, path, (at, path, flags, mode))
OPEN(openat64, (int at, const char *path, int flags, ...), flags, path, (at, path, flags, mode))
