/* The time of day, shifted for the processes that are started with this library (LD_PRELOAD).

   SHIFTED_CLOCK_S says by how many seconds. Only the time of day: clocks that count from the start
   of the machine stay, as on a machine whose clock is wrong. Deadlines in the time of day go to the
   kernel, which knows the true one, shifted back; they are told from the others by their size. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define FIRST_DAY_S 1000000000 /* no machine runs for so long */

static long shift_s(void) {
  static long shift;
  static int is_known;
  if (!is_known) {
    const char *text = getenv("SHIFTED_CLOCK_S");
    shift = text ? atol(text) : 0;
    is_known = 1;
  }
  return shift;
}

static int is_day(clockid_t clock) {
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

/* The deadline as the kernel knows it, in `into`. */
static const struct timespec *back(const struct timespec *at, struct timespec *into) {
  if (at == NULL || at->tv_sec < FIRST_DAY_S) return at;
  *into = *at;
  into->tv_sec -= shift_s();
  return into;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  long done = syscall(SYS_clock_gettime, clock, now);
  if (done == 0 && is_day(clock)) now->tv_sec += shift_s();
  return (int)done;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *into) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (into) *into = found.tv_sec;
  return found.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
  if (base != TIME_UTC) return 0;
  clock_gettime(CLOCK_REALTIME, now);
  return base;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *at, struct timespec *left) {
  struct timespec kept;
  int is_deadline = is_day(clock) && (flags & TIMER_ABSTIME);
  return NEXT(clock_nanosleep)(clock, flags, is_deadline ? back(at, &kept) : at, left);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict at) {
  struct timespec kept;
  return NEXT(sem_timedwait)(sem, back(at, &kept));
}

int sem_clockwait(sem_t *restrict sem, clockid_t clock, const struct timespec *restrict at) {
  struct timespec kept;
  return NEXT(sem_clockwait)(sem, clock, back(at, &kept));
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict lock, const struct timespec *restrict at) {
  struct timespec kept;
  return NEXT(pthread_mutex_timedlock)(lock, back(at, &kept));
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict lock,
                           const struct timespec *restrict at) {
  struct timespec kept;
  static __typeof__(&pthread_cond_timedwait) next;
  /* An older version of the same name takes another structure. */
  if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  return next(cond, lock, back(at, &kept));
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict lock,
                           clockid_t clock, const struct timespec *restrict at) {
  struct timespec kept;
  return NEXT(pthread_cond_clockwait)(cond, lock, clock, back(at, &kept));
}

static long raw(long number, long a, long b, long c, long d, long e, long f) {
  long done;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = f;
  __asm__ volatile("syscall"
                   : "=a"(done)
                   : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  if (done < 0 && done > -4096) {
    errno = (int)-done;
    return -1;
  }
  return done;
}

/* Some libraries wait on a futex themselves. */
long syscall(long number, ...) {
  va_list given;
  long a[6];
  struct timespec kept;
  va_start(given, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(given, long);
  va_end(given);
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME))
    a[3] = (long)back((const struct timespec *)a[3], &kept);
  return raw(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
