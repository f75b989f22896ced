/* Loaded into every process of a run (LD_PRELOAD): file operations that fail, and clocks that jump, while they run.
 *
 * SOAK_CONTROL names a file that benchmarks/soaking/shim.py writes and every process maps. Calls of the C library
 * are replaced, so what escapes it is not hit: pages of a mapped file, and the C library's own stdio (bash's printf).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* The same layout as in shim.py. */
struct control {
  volatile int32_t error;        /* errno; 0: no operation fails */
  volatile uint32_t per_million; /* how many operations of a million fail */
  volatile uint32_t kinds;       /* bits of the operations that fail */
  volatile uint32_t unused;
  volatile int64_t clock_ns[5]; /* how far the clocks of the head node and node1 to node4 are ahead */
  volatile uint64_t failed[5];  /* operations that have failed, by kind */
  char root[256];               /* only files below it */
  char spared[256];             /* except those below this one */
};
enum { OPEN, READ, WRITE, SYNC, RENAME };

static struct control *control;
static int node;

__attribute__((constructor)) static void set_up(void) {
  const char *path = getenv("SOAK_CONTROL"), *name = getenv("SLURMD_NODENAME");
  if (!path) return;
  if (name && !strncmp(name, "node", 4) && name[4] >= '1' && name[4] <= '4') node = name[4] - '0';
  int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  syscall(SYS_close, file);
  if (mapped != MAP_FAILED) control = mapped;
}

static int is_below(const char *path, const char *directory) {
  size_t length = strlen(directory);
  return length && !strncmp(path, directory, length) && (path[length] == '/' || !path[length]);
}

static int is_unlucky(int kind, const char *path) {
  static __thread uint64_t state;
  if (!path || !is_below(path, control->root) || is_below(path, control->spared)) return 0;
  if (!state) state = ((uint64_t)syscall(SYS_gettid) << 32) ^ (uint64_t)(uintptr_t)&state ^ (uint64_t)time(NULL);
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  if (state % 1000000 >= control->per_million) return 0;
  __atomic_fetch_add(&control->failed[kind], 1, __ATOMIC_RELAXED);
  errno = control->error;
  return 1;
}

static int is_active(int kind) { return control && control->error && (control->kinds >> kind & 1); }

static int fails(int kind, const char *path) { return is_active(kind) && is_unlucky(kind, path); }

static int fails_of(int kind, int file) {
  char link[40], path[512];
  if (!is_active(kind)) return 0;
  int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
  errno = before;
  if (length <= 0) return 0;
  path[length] = 0;
  return is_unlucky(kind, path);
}

#define NEXT(name) \
  static typeof(&name) next; \
  if (!next) next = (typeof(&name))dlsym(RTLD_NEXT, #name)

#define OPENS(name) \
  int name(const char *path, int flags, ...) { \
    NEXT(name); \
    va_list arguments; \
    va_start(arguments, flags); \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0; \
    va_end(arguments); \
    return fails(OPEN, path) ? -1 : next(path, flags, mode); \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name) \
  int name(int directory, const char *path, int flags, ...) { \
    NEXT(name); \
    va_list arguments; \
    va_start(arguments, flags); \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0; \
    va_end(arguments); \
    return fails(OPEN, path) ? -1 : next(directory, path, flags, mode); \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

#define FILE_CALL(kind, type, name, parameters, arguments) \
  type name parameters { \
    NEXT(name); \
    return fails_of(kind, file) ? -1 : next arguments; \
  }
FILE_CALL(READ, ssize_t, read, (int file, void *buffer, size_t count), (file, buffer, count))
FILE_CALL(READ, ssize_t, pread, (int file, void *buffer, size_t count, off_t at), (file, buffer, count, at))
FILE_CALL(READ, ssize_t, pread64, (int file, void *buffer, size_t count, off64_t at), (file, buffer, count, at))
FILE_CALL(WRITE, ssize_t, write, (int file, const void *buffer, size_t count), (file, buffer, count))
FILE_CALL(WRITE, ssize_t, pwrite, (int file, const void *buffer, size_t count, off_t at), (file, buffer, count, at))
FILE_CALL(WRITE, ssize_t, pwrite64, (int file, const void *buffer, size_t count, off64_t at), (file, buffer, count, at))
FILE_CALL(WRITE, ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count))
FILE_CALL(WRITE, ssize_t, sendfile, (int file, int from, off_t *at, size_t count), (file, from, at, count))
FILE_CALL(WRITE, ssize_t, sendfile64, (int file, int from, off64_t *at, size_t count), (file, from, at, count))
FILE_CALL(SYNC, int, fsync, (int file), (file))
FILE_CALL(SYNC, int, fdatasync, (int file), (file))

int rename(const char *from, const char *to) {
  NEXT(rename);
  return fails(RENAME, to) ? -1 : next(from, to);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
  NEXT(renameat);
  return fails(RENAME, to) ? -1 : next(from_directory, from, to_directory, to);
}

/* Clocks: what a process reads is ahead; a time it waits for is taken back to the kernel's clock. */

static int64_t ahead(void) { return control ? control->clock_ns[node] : 0; }

static struct timespec moved(struct timespec moment, int64_t by) {
  int64_t nanoseconds = moment.tv_nsec + by % 1000000000;
  moment.tv_sec += by / 1000000000;
  if (nanoseconds < 0) nanoseconds += 1000000000, moment.tv_sec--;
  if (nanoseconds >= 1000000000) nanoseconds -= 1000000000, moment.tv_sec++;
  moment.tv_nsec = nanoseconds;
  return moment;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  NEXT(clock_gettime);
  int status = next(clock, now);
  if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *now = moved(*now, ahead());
  return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *stored) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (stored) *stored = now.tv_sec;
  return now.tv_sec;
}

/* A monotonic clock counts from the machine's start: it never comes near this many seconds. */
static int is_realtime(const struct timespec *until) { return until->tv_sec > 500000000; }

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static typeof(&pthread_cond_timedwait) next;
  if (!next) next = (typeof(next))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!is_realtime(until)) return next(condition, mutex, until);
  struct timespec kernel = moved(*until, -ahead());
  return next(condition, mutex, &kernel);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
  NEXT(sem_timedwait);
  struct timespec kernel = moved(*until, -ahead());
  return next(semaphore, &kernel);
}
