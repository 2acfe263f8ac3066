// The table through which calls on a store's files go, and what wraps it.
#ifndef KVX_CALLS_H
#define KVX_CALLS_H

#include <sys/uio.h>

#include <cstdint>

#include "kvx.h"

namespace kvx {

// Bytes of a file that a request to a ring moves.
struct Extent {
  uint64_t offset, bytes;
};

// What rules for pread and pwrite want of a request that a ring carries.
struct Fate {
  kvx_fault rule = {};
  uint64_t releases = 0;
  bool is_plain() const { return rule.action == 0; }
};

// io_uring (uring_calls.cpp).
struct UringCalls {
  int (*setup)(uint32_t entries, void *params);
  int (*enroll)(int ring, uint32_t opcode, void *argument, uint32_t count);  // io_uring_register
  // Hands the next `count` requests to the kernel, those over `extents`, and waits for `wait_for`
  // completions.
  int (*enter)(int ring, const Extent *extents, uint32_t count, uint32_t wait_for);
  // No call, but a place for rules: a request has completed with `result`, and answers what this says.
  int64_t (*complete)(int64_t result, Extent extent, const ::iovec *places);
  // Another: a request is about to be made. `op`: KVX_OP_PREAD or KVX_OP_PWRITE.
  Fate (*fate)(kvx_op op, Extent extent);
};
extern const UringCalls kUringLibc, kUringFaulty;

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
  const UringCalls *uring;
};

// The C library's table, whatever the rules: for who has asked them already.
const Calls &plain_calls();

// Counts a call of `op` and gives the table to make it with: calls(KVX_OP_PREAD).pread(...).
const Calls &calls(kvx_op op);

// The memory that Calls::mmap gave. Not in the table: giving back cannot fail.
void unmap(void *address, uint64_t length);

}  // namespace kvx

#endif
