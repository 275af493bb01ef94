/* The wall clock of the processes that load this first (LD_PRELOAD) is wrong by the seconds that the file CHAOS_CLOCK
   holds, an int64_t. The file is shared memory: when its number changes all their clocks jump, as a machine's would.
   The monotonic clock is as it is. Waits until a wall-clock time end when the wrong clock says so, as after a real
   jump; such times are known by their size, since a machine is not up for 30 years. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name, version) dlvsym(RTLD_NEXT, name, version)

static volatile const int64_t *shared;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *shared, PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) shared = page;
    if (fd >= 0) close(fd);
}

static int64_t wrong(void) { return shared ? *shared : 0; }

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += wrong();
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    (void)zone;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return at ? (*at = now.tv_sec) : now.tv_sec;
}

static struct timespec right(const struct timespec *until) {
    struct timespec at = *until;
    if (at.tv_sec > 1000000000) at.tv_sec -= wrong();
    return at;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = REAL("pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec at = right(until);
    return real(cond, mutex, &at);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec at = right(until);
    return real(sem, &at);
}
