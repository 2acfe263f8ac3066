// The table through which calls on a store's files go, and what wraps it.
#ifndef KVX_CALLS_H
#define KVX_CALLS_H

#include <sys/uio.h>

#include <cstdint>

#include "kvx.h"

namespace kvx {

// One entry for each kvx_op. All return >= 0 or -errno and make exactly one system call; none retries.
// `dioalign` is a second face of KVX_OP_FSTAT (it asks statx), `preadv`, `pwritev` and `fdatasync` are second
// faces of KVX_OP_PREAD, KVX_OP_PWRITE and KVX_OP_FSYNC: counted and faulted as those.
struct Calls {
  int (*open)(const char *path, int flags, int mode);
  int (*close)(int fd);
  int64_t (*pread)(int fd, void *buf, uint64_t n, uint64_t offset);
  int64_t (*pwrite)(int fd, const void *buf, uint64_t n, uint64_t offset);
  int64_t (*preadv)(int fd, const ::iovec *to, int count, uint64_t offset);
  int64_t (*pwritev)(int fd, const ::iovec *from, int count, uint64_t offset);
  int (*fallocate)(int fd, uint64_t length);
  int (*ftruncate)(int fd, uint64_t length);
  int (*fsync)(int fd);
  int (*fdatasync)(int fd);
  int64_t (*size)(int fd);
  int (*dioalign)(int fd, uint32_t *memory_align, uint32_t *offset_align);
  int (*unlink)(const char *path);
  int (*rename)(const char *from, const char *to);
  int (*mkdir)(const char *path, int mode);
  int (*lock)(int fd, uint64_t offset, int operation);
  // Private anonymous memory, readable and writable: staging. 0 and *out, or -errno.
  int (*mmap)(uint64_t length, void **out);
};

// Counts a call of `op` and gives the table to make it with: calls(KVX_OP_PREAD).pread(...).
const Calls &calls(kvx_op op);

// The memory that Calls::mmap gave. Not in the table: giving back cannot fail.
void unmap(void *address, uint64_t length);

}  // namespace kvx

#endif
