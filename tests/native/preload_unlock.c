/* Preloaded into a test's process: a thread that has called kvx_keep_next_lock() stops where libkvx is about to give a
 * lock back for the first time after that, and goes on once kvx_lock_go is set. Locks of others pass.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

int kvx_lock_kept, kvx_lock_go;
static __thread int armed;

void kvx_keep_next_lock(void) { armed = 1; }

static int from_libkvx(void *caller) {
  Dl_info info;
  return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libkvx");
}

int pthread_mutex_unlock(pthread_mutex_t *mutex) {
  static __typeof__(&pthread_mutex_unlock) real;
  if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, "pthread_mutex_unlock");
  if (armed && from_libkvx(__builtin_return_address(0))) {
    const struct timespec moment = {0, 1000000};
    armed = 0;
    __atomic_store_n(&kvx_lock_kept, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&kvx_lock_go, __ATOMIC_ACQUIRE)) nanosleep(&moment, NULL);
  }
  return real(mutex);
}
