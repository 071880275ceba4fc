/* Preloaded into a process that runs under callgrind, to count the instructions between count_begin and count_end.

   Two things that a process meets depend on how busy the machine is: how much time has passed whenever it asks for the
   time, and how much the server has sent whenever it reads. So while instructions are counted, the monotonic clock goes
   on by the same step with each question; and each wait for events ends when no more arrives, with all that the server
   was asked for. A thread that waits until a time of that clock is told the real time, or it would not wait. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

#define NANOSECONDS 1000000000LL
#define STEP_NANOSECONDS 5000
#define PAUSE_MICROSECONDS 10000

typedef int ask_clock(clockid_t, struct timespec *);
typedef int wait_events(int, struct epoll_event *, int, int);
typedef int wait_condition(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
typedef int wait_semaphore(sem_t *, clockid_t, const struct timespec *);

static int counting;
static int64_t counted_time;  /* what the clock shows while instructions are counted */
static int64_t behind;        /* by how much the clock is behind the real one afterwards */

static int64_t real_time(void) {
    static ask_clock *real;
    struct timespec time;
    if (!real) real = (ask_clock *)dlsym(RTLD_NEXT, "clock_gettime");
    real(CLOCK_MONOTONIC, &time);
    return time.tv_sec * NANOSECONDS + time.tv_nsec;
}

int clock_gettime(clockid_t id, struct timespec *time) {
    static ask_clock *real;
    int64_t shown;
    if (!real) real = (ask_clock *)dlsym(RTLD_NEXT, "clock_gettime");
    if (id != CLOCK_MONOTONIC) return real(id, time);
    shown = counting ? (counted_time += STEP_NANOSECONDS) : real_time() - behind;
    time->tv_sec = shown / NANOSECONDS;
    time->tv_nsec = shown % NANOSECONDS;
    return 0;
}

static int waiting_bytes(const struct epoll_event *events, int count) {
    int all = 0, number, bytes;
    for (number = 0; number < count; number++)
        if (!ioctl(events[number].data.fd, FIONREAD, &bytes)) all += bytes;
    return all;
}

int epoll_wait(int poll, struct epoll_event *events, int most, int timeout) {
    static wait_events *real;
    int found, before, now = 0;
    if (!real) real = (wait_events *)dlsym(RTLD_NEXT, "epoll_wait");
    usleep(PAUSE_MICROSECONDS);
    found = real(poll, events, most, timeout);
    do {
        before = now;
        usleep(PAUSE_MICROSECONDS);
        now = waiting_bytes(events, found);
    } while (now > before);
    return found;
}

/* The real time at which the clock will have come to a time that it was expected to show. */
static struct timespec real_until(const struct timespec *shown) {
    int64_t time = shown->tv_sec * NANOSECONDS + shown->tv_nsec;
    time += counting ? real_time() - counted_time : behind;
    return (struct timespec){.tv_sec = time / NANOSECONDS, .tv_nsec = time % NANOSECONDS};
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static wait_condition *real;
    struct timespec shifted = real_until(until);
    if (!real) real = (wait_condition *)dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = (wait_condition *)dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    return real(condition, mutex, &shifted);
}

int sem_clockwait(sem_t *semaphore, clockid_t id, const struct timespec *until) {
    static wait_semaphore *real;
    struct timespec shifted = id == CLOCK_MONOTONIC ? real_until(until) : *until;
    if (!real) real = (wait_semaphore *)dlsym(RTLD_NEXT, "sem_clockwait");
    return real(semaphore, id, &shifted);
}

void count_begin(void) {
    counted_time = real_time() - behind;
    counting = 1;
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

void count_end(void) {
    CALLGRIND_STOP_INSTRUMENTATION;
    if (!counting) return; /* a process that is counted from its start */
    counting = 0;
    behind = real_time() - counted_time;
}
