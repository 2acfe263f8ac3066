// Files counted by reference, and the loops that move all bytes.
#include "files.h"

#include <sys/uio.h>

#include <algorithm>
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
uint64_t boundary(const kvx_file *file, const Span *places, uint32_t count, uint64_t offset) {
  if (!file->direct) return 1;
  uint64_t bits = offset | (uint64_t{1} << 16);
  for (uint32_t i = 0; i < count; ++i) bits |= reinterpret_cast<uintptr_t>(places[i].data) | places[i].bytes;
  return bits & (~bits + 1);
}

uint64_t total(const Span *places, uint32_t count) {
  uint64_t n = 0;
  for (uint32_t i = 0; i < count; ++i) n += places[i].bytes;
  return n;
}

// Bytes [start, start + length) of some places, as far as one call takes them.
class Places {
 public:
  Places(const Span *places, uint32_t count, uint64_t start, uint64_t length) {
    for (; count > 0 && length > 0 && used_ < kMost; ++places, --count) {
      if (start >= places->bytes) {
        start -= places->bytes;
        continue;
      }
      const uint64_t n = std::min(places->bytes - start, length);
      iov_[used_++] = {places->data + start, n};
      start = 0, length -= n;
    }
  }
  const ::iovec *data() const { return iov_; }
  int size() const { return used_; }

 private:
  static constexpr int kMost = 64;  // a row and its trailers are two
  ::iovec iov_[kMost];
  int used_ = 0;
};

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

int64_t file_preadv(kvx_file *file, const Span *to, uint32_t count, uint64_t offset, uint64_t *moved) {
  return transfer(
      total(to, count), boundary(file, to, count, offset), moved, [&](uint64_t start, uint64_t length) {
        const Places places(to, count, start, length);
        const Calls &table = calls(KVX_OP_PREAD);
        const ::iovec *first = places.data();
        return places.size() == 1 ? table.pread(file->fd, first->iov_base, first->iov_len, offset + start)
                                  : table.preadv(file->fd, first, places.size(), offset + start);
      });
}

int64_t file_pwritev(kvx_file *file, const Span *from, uint32_t count, uint64_t offset, uint64_t *moved) {
  const uint64_t n = total(from, count);
  const int64_t done =
      transfer(n, boundary(file, from, count, offset), moved, [&](uint64_t start, uint64_t length) {
        const Places places(from, count, start, length);
        const Calls &table = calls(KVX_OP_PWRITE);
        const ::iovec *first = places.data();
        return places.size() == 1 ? table.pwrite(file->fd, first->iov_base, first->iov_len, offset + start)
                                  : table.pwritev(file->fd, first, places.size(), offset + start);
      });
  return done >= 0 && static_cast<uint64_t>(done) < n ? -EIO : done;
}

int64_t file_pread(kvx_file *file, void *buf, uint64_t n, uint64_t offset, uint64_t *moved) {
  const Span to{static_cast<uint8_t *>(buf), n};
  return file_preadv(file, &to, 1, offset, moved);
}

int64_t file_pwrite(kvx_file *file, const void *buf, uint64_t n, uint64_t offset, uint64_t *moved) {
  const Span from{static_cast<uint8_t *>(const_cast<void *>(buf)), n};  // which a write only reads
  return file_pwritev(file, &from, 1, offset, moved);
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

int kvx_file_fd(const kvx_file *file) { return file->fd; }

int64_t kvx_file_pread(kvx_file *file, void *buf, uint64_t n, uint64_t offset, uint64_t *moved) {
  uint64_t ignored;
  return kvx::file_pread(file, buf, n, offset, moved != nullptr ? moved : &ignored);
}

int64_t kvx_file_pwrite(kvx_file *file, const void *buf, uint64_t n, uint64_t offset, uint64_t *moved) {
  uint64_t ignored;
  return kvx::file_pwrite(file, buf, n, offset, moved != nullptr ? moved : &ignored);
}

}  // extern "C"
