// Files counted by reference, and the loops that move all bytes.
#include "files.h"

#include <cerrno>
#include <new>

#include "calls.h"

namespace kvx {

void file_unref(kvx_file *file) {
  if (file->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  calls(KVX_OP_CLOSE).close(file->fd);
  delete file;
}

namespace {

// The power of two that a direct request is aligned to, or 1 where a transfer may go on from any byte.
uint64_t boundary(const kvx_file *file, const void *buf, uint64_t n, uint64_t offset) {
  if (!file->direct) return 1;
  const uint64_t bits = reinterpret_cast<uintptr_t>(buf) | n | offset | (uint64_t{1} << 16);
  return bits & (~bits + 1);
}

// Loops `call(done, length)` over [0, n). Returns what was moved, or -errno with *moved set.
template <class Call>
int64_t transfer(uint64_t n, uint64_t align, uint64_t *moved, Call call) {
  uint64_t done = 0;   // moved for certain
  uint64_t start = 0;  // where the next call begins: <= done
  *moved = 0;
  while (done < n) {
    const uint64_t length = n - start < kMaxTransfer ? n - start : kMaxTransfer;
    const int64_t got = call(start, length);
    if (got == -EINTR) continue;
    if (got < 0) return got;
    const uint64_t end = start + static_cast<uint64_t>(got);
    if (end <= done) break;
    *moved = done = end;
    start = done < n ? done & ~(align - 1) : done;
  }
  return static_cast<int64_t>(done);
}

}  // namespace

int64_t file_pread(kvx_file *file, void *buf, uint64_t n, uint64_t offset, uint64_t *moved) {
  return transfer(n, boundary(file, buf, n, offset), moved, [&](uint64_t start, uint64_t length) {
    return calls(KVX_OP_PREAD).pread(file->fd, static_cast<uint8_t *>(buf) + start, length, offset + start);
  });
}

int64_t file_pwrite(kvx_file *file, const void *buf, uint64_t n, uint64_t offset, uint64_t *moved) {
  const int64_t done =
      transfer(n, boundary(file, buf, n, offset), moved, [&](uint64_t start, uint64_t length) {
        return calls(KVX_OP_PWRITE)
            .pwrite(file->fd, static_cast<const uint8_t *>(buf) + start, length, offset + start);
      });
  return done >= 0 && static_cast<uint64_t>(done) < n ? -EIO : done;
}

}  // namespace kvx

extern "C" {

kvx_file *kvx_file_adopt(int fd, const char *label, int direct) {
  try {
    return new kvx_file{fd, direct != 0, label != nullptr ? label : "", {1}};
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void kvx_file_release(kvx_file *file) {
  if (file != nullptr) kvx::file_unref(file);
}

int64_t kvx_file_pread(kvx_file *file, void *buf, uint64_t n, uint64_t offset, uint64_t *moved) {
  uint64_t ignored;
  return kvx::file_pread(file, buf, n, offset, moved != nullptr ? moved : &ignored);
}

int64_t kvx_file_pwrite(kvx_file *file, const void *buf, uint64_t n, uint64_t offset, uint64_t *moved) {
  uint64_t ignored;
  return kvx::file_pwrite(file, buf, n, offset, moved != nullptr ? moved : &ignored);
}

}  // extern "C"
