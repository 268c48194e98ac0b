/* Calls of the C library on files below one folder: listed, or failed, cut short or killed at a named one. Loaded with LD_PRELOAD,
   so that what Rust, C++ and NumPy do to files is met too. Off until `arm` is called; used by syscalls.py.

   A point is a call, a name below the folder (without process ids and random parts) and how many equal calls came before it: threads write in an
   order that varies. What is said to the disk is true to Linux: EINTR is returned once, a short call does its first half. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { OFF, LIST, FAIL, SHORT, KILL, TORN };  /* TORN: killed after the first half of a write */
enum { PROCEED, FAILED, HALF };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[4096], target[4096];
static size_t root_length;
static int action = OFF, number, lasting, listing = -1, fired;
static long remaining;      /* equal calls before the one that is meant */
static double period, last; /* seconds between two failures, for a disk that fails now and then */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

void arm(const char *folder, int list_to, const char *point, long earlier, int act, int error, int goes_on, double every) {
    snprintf(root, sizeof root, "%s", folder);
    snprintf(target, sizeof target, "%s", point);
    root_length = strlen(root);
    listing = list_to, remaining = earlier, number = error, lasting = goes_on, period = every, fired = 0, last = now();
    action = act;
}

int fired_count(void) { return fired; }

/* Whether a full disk, or one that is read-only, refuses it */
static int refused(const char *call) {
    static const char *takes_room[] = {"write", "create", "fsync", "rename", "mkdir", "link", "truncate"};
    static const char *frees_room[] = {"unlink", "rmdir", "chmod"};
    for (size_t i = 0; i < sizeof takes_room / sizeof *takes_room; i++)
        if (!strcmp(call, takes_room[i])) return 1;
    for (size_t i = 0; i < sizeof frees_room / sizeof *frees_room; i++)
        if (number == EROFS && !strcmp(call, frees_room[i])) return 1;
    return 0;
}

/* "write .tmp-config.toml": without the folder and the process id of a temporary name */
static int point_of(const char *call, const char *path, char *point, size_t size) {
    if (strncmp(path, root, root_length) || (path[root_length] && path[root_length] != '/')) return 0;
    size_t n = snprintf(point, size, "%s ", call);
    for (const char *p = path + root_length + (path[root_length] == '/'); *p && n + 6 < size;) {
        if (!strncmp(p, ".tmp-", 5)) {
            n += snprintf(point + n, size - n, ".tmp-");
            p += 5;
            const char *digits = p;
            while (*digits >= '0' && *digits <= '9') digits++;
            if (*digits == '-' && digits > p) p = digits + 1;
        } else if (!strncmp(p, ".tmp", 4) && strlen(p) == 10 && !strchr(p, '/')) {
            n += snprintf(point + n, size - n, ".tmp"); /* the random name of a temporary file of safetensors */
            p += 10;
        } else
            point[n++] = *p++;
    }
    point[n] = 0;
    return 1;
}

static int decide(const char *call, const char *path) {
    char point[4200];
    if (action == OFF || !point_of(call, path, point, sizeof point)) return PROCEED;
    int result = PROCEED, hit = 0;
    pthread_mutex_lock(&lock);
    if (action == LIST) {
        strcat(point, "\n");
        syscall(SYS_write, listing, point, strlen(point));
    } else if (period > 0) {
        static const int kinds[] = {ENOSPC, EIO, EINTR, EROFS, 0}; /* in turn; 0: a short call */
        if (now() - last >= period) last = now(), number = kinds[fired++ % 5], result = number ? FAILED : HALF;
    } else if ((lasting && fired && refused(call)) || (!strcmp(point, target) && remaining-- == 0)) {
        fired++, hit = 1;
        result = action == FAIL ? FAILED : HALF;
    }
    pthread_mutex_unlock(&lock);
    if (hit && action == KILL) {
        if (syscall(SYS_gettid) != getpid()) usleep(10000); /* another thread writes: let training run on for a few steps */
        kill(getpid(), SIGKILL);
    }
    if (result == FAILED) errno = number;
    return result;
}

static void after_half(void) {
    if (action == TORN) kill(getpid(), SIGKILL);
}

static const char *absolute(int folder, const char *name, char *path) {
    char link[64];
    if (name[0] == '/') return name;
    ssize_t n = 0;
    if (folder == AT_FDCWD) {
        n = getcwd(path, 2048) ? (ssize_t)strlen(path) : 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        n = syscall(SYS_readlink, link, path, 2048);
    }
    if (n < 0) n = 0;
    snprintf(path + n, 2048, *name ? "/%s" : "%s", name);
    return path;
}

static int of_file(const char *call, int file) {
    char path[4200];
    int before = errno;
    if (action == OFF) return PROCEED;
    int result = decide(call, absolute(file, "", path));
    if (result != FAILED) errno = before;
    return result;
}

static int of_name(const char *call, int folder, const char *name) {
    char path[4200];
    return action == OFF || !name ? PROCEED : decide(call, absolute(folder, name, path));
}

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define OPENS(name, words, folder, ...) \
    int name(__VA_ARGS__, int flags, ...) { \
        REAL(int, name, __VA_ARGS__, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        int mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, int) : 0; \
        va_end(rest); \
        const char *call = flags & O_ACCMODE || flags & O_CREAT ? "create" : "open"; \
        return of_name(call, folder, path) == FAILED ? -1 : real words; \
    }
OPENS(open, (path, flags, mode), AT_FDCWD, const char *path)
OPENS(open64, (path, flags, mode), AT_FDCWD, const char *path)
OPENS(openat, (folder, path, flags, mode), folder, int folder, const char *path)
OPENS(openat64, (folder, path, flags, mode), folder, int folder, const char *path)

FILE *fopen64(const char *path, const char *mode) {
    REAL(FILE *, fopen64, const char *, const char *);
    return of_name(strpbrk(mode, "wax+") ? "create" : "open", AT_FDCWD, path) == FAILED ? NULL : real(path, mode);
}

#define MOVES(name, call, words, half, ...) \
    ssize_t name(int file, __VA_ARGS__) { \
        REAL(ssize_t, name, int, __VA_ARGS__); \
        int decided = of_file(call, file); \
        if (decided == FAILED) return -1; \
        if (decided == PROCEED || count < 2) return real words; \
        ssize_t done = real half; \
        after_half(); \
        return done; \
    }
MOVES(write, "write", (file, data, count), (file, data, count / 2), const void *data, size_t count)
MOVES(read, "read", (file, data, count), (file, data, count / 2), void *data, size_t count)
MOVES(pwrite64, "write", (file, data, count, at), (file, data, count / 2, at), const void *data, size_t count, off64_t at)
MOVES(pread64, "read", (file, data, count, at), (file, data, count / 2, at), void *data, size_t count, off64_t at)
MOVES(pread, "read", (file, data, count, at), (file, data, count / 2, at), void *data, size_t count, off_t at)
MOVES(sendfile64, "write", (file, from, at, count), (file, from, at, count / 2), int from, off64_t *at, size_t count)

#define PLAIN(name, type, failure, check, words, ...) \
    type name(__VA_ARGS__) { \
        REAL(type, name, __VA_ARGS__); \
        return check == FAILED ? failure : real words; \
    }
/* Nothing loses its power here, so nobody has to wait for the disk: a killed process loses nothing that the system has. */
int fsync(int file) { return of_file("fsync", file) == FAILED ? -1 : 0; }
int fdatasync(int file) { return fsync(file); }
PLAIN(ftruncate64, int, -1, of_file("truncate", file), (file, size), int file, off64_t size)
PLAIN(mmap, void *, MAP_FAILED, (file < 0 ? PROCEED : of_file("mmap", file)), (at, size, way, flags, file, from), void *at,
      size_t size, int way, int flags, int file, off_t from)
PLAIN(mmap64, void *, MAP_FAILED, (file < 0 ? PROCEED : of_file("mmap", file)), (at, size, way, flags, file, from), void *at,
      size_t size, int way, int flags, int file, off64_t from)
PLAIN(rename, int, -1, of_name("rename", AT_FDCWD, from), (from, to), const char *from, const char *to)
PLAIN(renameat, int, -1, of_name("rename", a, from), (a, from, b, to), int a, const char *from, int b, const char *to)
PLAIN(renameat2, int, -1, of_name("rename", a, from), (a, from, b, to, flags), int a, const char *from, int b, const char *to,
      unsigned flags)
PLAIN(link, int, -1, of_name("link", AT_FDCWD, to), (from, to), const char *from, const char *to)
PLAIN(linkat, int, -1, of_name("link", b, to), (a, from, b, to, flags), int a, const char *from, int b, const char *to, int flags)
PLAIN(unlink, int, -1, of_name("unlink", AT_FDCWD, path), (path), const char *path)
PLAIN(unlinkat, int, -1, of_name("unlink", a, path), (a, path, flags), int a, const char *path, int flags)
PLAIN(rmdir, int, -1, of_name("rmdir", AT_FDCWD, path), (path), const char *path)
PLAIN(mkdir, int, -1, of_name("mkdir", AT_FDCWD, path), (path, mode), const char *path, mode_t mode)
PLAIN(chmod, int, -1, of_name("chmod", AT_FDCWD, path), (path, mode), const char *path, mode_t mode)
PLAIN(opendir, DIR *, NULL, of_name("list", AT_FDCWD, path), (path), const char *path)
PLAIN(fdopendir, DIR *, NULL, of_file("list", file), (file), int file)
