/* Preloaded into a test's process: writes down, in order, what it does to the files below KVX_RECORD_ROOT, LMDB's calls
 * included, for tests/store/powercut.py to replay. One call at a time, so that the order is the one it happened in.
 *
 *   C INO PATH     a file was made        W INO OFFSET LENGTH SYNC + bytes     T INO LENGTH   ftruncate
 *   M PATH         a directory was made   S INO   the file was flushed         F INO LENGTH   fallocate
 *   U PATH  R FROM TO                     D PATH  the directory was flushed    N TEXT         record_note(TEXT)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FDS 4096

static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static struct { char kind; int sync; unsigned long ino; char path[512]; } known[FDS];

static int below(const char *path) {
  const char *root = getenv("KVX_RECORD_ROOT");
  size_t n = root ? strlen(root) : 0;
  return n && strncmp(path, root, n) == 0 && (path[n] == 0 || path[n] == '/');
}

static void put(const void *bytes, size_t n) {
  if (log_fd < 0) log_fd = REAL(open)(getenv("KVX_RECORD_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  for (const char *at = bytes; n;) {
    ssize_t done = REAL(write)(log_fd, at, n);
    if (done <= 0) abort();
    at += done;
    n -= done;
  }
}

static void say(const char *format, ...) {
  char line[2048];
  va_list args;
  va_start(args, format);
  int n = vsnprintf(line, sizeof line, format, args);
  va_end(args);
  put(line, n);
}

void record_note(const char *text) {
  pthread_mutex_lock(&one);
  put("N ", 2);
  put(text, strlen(text));
  put("\n", 1);
  pthread_mutex_unlock(&one);
}

static int opened(const char *path, int flags, int mode) {
  struct stat status;
  pthread_mutex_lock(&one);
  int mine = below(path), fresh = mine && (flags & O_CREAT) && stat(path, &status) != 0;
  int fd = REAL(open)(path, flags, mode);
  if (mine && fd >= 0 && fd < FDS && fstat(fd, &status) == 0) {
    known[fd].kind = S_ISDIR(status.st_mode) ? 'D' : 'F';
    known[fd].sync = (flags & O_DSYNC) != 0;
    known[fd].ino = status.st_ino;
    snprintf(known[fd].path, sizeof known[fd].path, "%s", path);
    if (fresh) say("C %lu %s\n", known[fd].ino, path);
    if ((flags & O_TRUNC) && !fresh) say("T %lu 0\n", known[fd].ino);
  }
  pthread_mutex_unlock(&one);
  return fd;
}
int open(const char *path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  int mode = va_arg(args, int);
  va_end(args);
  return opened(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  int mode = va_arg(args, int);
  va_end(args);
  return opened(path, flags, mode);
}
int close(int fd) {
  pthread_mutex_lock(&one);
  if (fd >= 0 && fd < FDS) known[fd].kind = 0;
  int result = REAL(close)(fd);
  pthread_mutex_unlock(&one);
  return result;
}

static int mine(int fd) { return fd >= 0 && fd < FDS && known[fd].kind == 'F'; }

/* What was moved of these pieces. */
static void wrote(int fd, const struct iovec *v, int count, off_t at, ssize_t moved) {
  if (moved <= 0 || !mine(fd)) return;
  say("W %lu %ld %ld %d\n", known[fd].ino, (long)at, (long)moved, known[fd].sync);
  for (int i = 0; i < count && moved > 0; ++i) {
    size_t n = v[i].iov_len < (size_t)moved ? v[i].iov_len : (size_t)moved;
    put(v[i].iov_base, n);
    moved -= n;
  }
}

#define ONE_AT_A_TIME(type, call, after) \
  do {                                   \
    pthread_mutex_lock(&one);            \
    type result = call;                  \
    after;                               \
    pthread_mutex_unlock(&one);          \
    return result;                       \
  } while (0)

ssize_t pwritev(int fd, const struct iovec *v, int n, off_t at) {
  ONE_AT_A_TIME(ssize_t, REAL(pwritev)(fd, v, n, at), wrote(fd, v, n, at, result));
}
ssize_t pwritev64(int fd, const struct iovec *v, int n, off_t at) { return pwritev(fd, v, n, at); }
ssize_t pwrite(int fd, const void *buf, size_t n, off_t at) {
  struct iovec v = {(void *)buf, n};
  ONE_AT_A_TIME(ssize_t, REAL(pwrite)(fd, buf, n, at), wrote(fd, &v, 1, at, result));
}
ssize_t pwrite64(int fd, const void *buf, size_t n, off_t at) { return pwrite(fd, buf, n, at); }
ssize_t write(int fd, const void *buf, size_t n) {
  struct iovec v = {(void *)buf, n};
  if (!mine(fd)) return REAL(write)(fd, buf, n);
  off_t at = lseek(fd, 0, SEEK_CUR);
  ONE_AT_A_TIME(ssize_t, REAL(write)(fd, buf, n), wrote(fd, &v, 1, at, result));
}
ssize_t writev(int fd, const struct iovec *v, int n) {
  if (!mine(fd)) return REAL(writev)(fd, v, n);
  off_t at = lseek(fd, 0, SEEK_CUR);
  ONE_AT_A_TIME(ssize_t, REAL(writev)(fd, v, n), wrote(fd, v, n, at, result));
}
static void flushed(int fd, int result) {
  if (result != 0 || fd < 0 || fd >= FDS) return;
  if (known[fd].kind == 'F') say("S %lu\n", known[fd].ino);
}
int fdatasync(int fd) { /* of a directory it promises nothing */
  ONE_AT_A_TIME(int, REAL(fdatasync)(fd), flushed(fd, result));
}
int fsync(int fd) {
  ONE_AT_A_TIME(int, REAL(fsync)(fd), {
    flushed(fd, result);
    if (result == 0 && fd < FDS && known[fd].kind == 'D') say("D %s\n", known[fd].path);
  });
}
int ftruncate(int fd, off_t n) {
  ONE_AT_A_TIME(int, REAL(ftruncate)(fd, n), if (result == 0 && mine(fd)) say("T %lu %ld\n", known[fd].ino, (long)n));
}
int ftruncate64(int fd, off_t n) { return ftruncate(fd, n); }
int fallocate(int fd, int mode, off_t at, off_t n) {
  ONE_AT_A_TIME(int, REAL(fallocate)(fd, mode, at, n),
                if (result == 0 && mine(fd)) say("F %lu %ld\n", known[fd].ino, (long)(at + n)));
}
int fallocate64(int fd, int mode, off_t at, off_t n) { return fallocate(fd, mode, at, n); }
int rename(const char *from, const char *to) {
  ONE_AT_A_TIME(int, REAL(rename)(from, to), if (result == 0 && below(from)) say("R %s\t%s\n", from, to));
}
int unlink(const char *path) {
  ONE_AT_A_TIME(int, REAL(unlink)(path), if (result == 0 && below(path)) say("U %s\n", path));
}
int mkdir(const char *path, mode_t mode) {
  ONE_AT_A_TIME(int, REAL(mkdir)(path, mode), if (result == 0 && below(path)) say("M %s\n", path));
}
