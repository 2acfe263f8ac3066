/* Preloaded into a test's process: makes LMDB's own calls on data.mdb fail, or kills the process at one of them.
 * (kvxfer's calls go through its own table; LMDB's do not.)
 *
 *   KVX_LMDB_FAULT=OP:ACTION:N   OP: write (pwrite, pwritev, writev, write), sync (fdatasync, fsync), truncate
 *                                ACTION: an errno; kill-before; kill-after; kill-half (half of the bytes, then SIGKILL);
 *                                hang (until kvx_lmdb_released is set, then as it should be)
 *                                N: from the N-th call on (1 is the first); kill and hang act at the N-th
 *   KVX_LMDB_FAULT_LIMIT=M       an errno hits at most M calls
 *   KVX_LMDB_ARMED=PATH          counts and acts only while this file exists
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

long kvx_lmdb_calls, kvx_lmdb_hits; /* since the process started; a fork has its own */
volatile long kvx_lmdb_released;

static int on_index(int fd) {
  char link[64], target[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, target, sizeof target - 1);
  if (n < 8) return 0;
  target[n] = 0;
  if (n > 12 && strcmp(target + n - 4, ".tmp") == 0) target[n -= 4] = 0; /* being written anew */
  return strcmp(target + n - 8, "data.mdb") == 0;
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

enum { PASS, FAIL, KILL_AFTER, KILL_HALF };

static int decide(const char *op, int fd) {
  const char *rule = getenv("KVX_LMDB_FAULT"), *armed = getenv("KVX_LMDB_ARMED"), *limit = getenv("KVX_LMDB_FAULT_LIMIT");
  char kind[16], action[16];
  long from;
  if (!rule || sscanf(rule, "%15[^:]:%15[^:]:%ld", kind, action, &from) != 3) return PASS;
  if (strcmp(kind, op) != 0 || !on_index(fd) || (armed && access(armed, F_OK) != 0)) return PASS;
  long n = ++kvx_lmdb_calls;
  if (strncmp(action, "kill", 4) == 0) {
    if (n != from) return PASS;
    ++kvx_lmdb_hits;
    if (strcmp(action, "kill-before") == 0) die();
    return strcmp(action, "kill-half") == 0 ? KILL_HALF : KILL_AFTER;
  }
  if (strcmp(action, "hang") == 0) {
    if (n != from) return PASS;
    ++kvx_lmdb_hits;
    while (!kvx_lmdb_released) usleep(1000);
    return PASS;
  }
  if (n < from || (limit && kvx_lmdb_hits >= atol(limit))) return PASS;
  ++kvx_lmdb_hits;
  errno = atoi(action);
  return FAIL;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define MOVE(op, fd, bytes, half, whole)    \
  do {                                      \
    int verdict = decide(op, fd);           \
    if (verdict == FAIL) return -1;         \
    if (verdict == KILL_HALF) {             \
      half;                                 \
      die();                                \
    }                                       \
    __typeof__(whole) result = whole;       \
    if (verdict == KILL_AFTER) die();       \
    return result;                          \
  } while (0)

ssize_t pwrite(int fd, const void *buf, size_t n, off_t at) {
  MOVE("write", fd, n, (void)!REAL(pwrite)(fd, buf, n / 2, at), REAL(pwrite)(fd, buf, n, at));
}
ssize_t pwrite64(int fd, const void *buf, size_t n, off_t at) {
  return pwrite(fd, buf, n, at);
}
ssize_t write(int fd, const void *buf, size_t n) {
  MOVE("write", fd, n, (void)!REAL(write)(fd, buf, n / 2), REAL(write)(fd, buf, n));
}
ssize_t writev(int fd, const struct iovec *v, int n) {
  MOVE("write", fd, n, (void)!REAL(write)(fd, v[0].iov_base, v[0].iov_len / 2), REAL(writev)(fd, v, n));
}
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t at) {
  MOVE("write", fd, n, (void)!REAL(pwrite)(fd, v[0].iov_base, v[0].iov_len / 2, at), REAL(pwritev)(fd, v, n, at));
}
int fdatasync(int fd) {
  MOVE("sync", fd, 0, (void)0, REAL(fdatasync)(fd));
}
int fsync(int fd) {
  MOVE("sync", fd, 0, (void)0, REAL(fsync)(fd));
}
int ftruncate(int fd, off_t n) {
  MOVE("truncate", fd, 0, (void)0, REAL(ftruncate)(fd, n));
}
