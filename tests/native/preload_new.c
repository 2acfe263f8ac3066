/* Preloaded into a test's process: of a thread that has called kvx_fail_new(n), the n-th operator new from then on finds
 * no memory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>

extern void *__libc_malloc(size_t bytes);
int kvx_news_failed;
static __thread int left;

void kvx_fail_new(int n) { left = n; }

static int from_new(void *caller) {
  Dl_info info;
  return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libstdc++");
}

void *malloc(size_t bytes) {
  if (!left || !from_new(__builtin_return_address(0)) || --left) return __libc_malloc(bytes);
  ++kvx_news_failed;
  errno = ENOMEM;
  return NULL;
}
