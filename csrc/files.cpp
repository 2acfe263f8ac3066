// Files counted by reference, and the loops that move all bytes.
#include "files.h"

#include <new>

#include "calls.h"
#include "closer.h"

namespace {
constexpr std::chrono::milliseconds kClosePatience{1000};
}

uint64_t new_file_number() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

namespace kvx {

void file_unref(kvx_file *file, std::chrono::milliseconds patience) {
  if (file->references.fetch_sub(1, std::memory_order_acq_rel) == 1) close_file(file, patience);
}

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

int64_t file_preadv(kvx_file *file, const Span *to, uint32_t count, uint64_t offset, uint64_t *moved) {
  return transfer(file, false, to, count, offset, moved, [&](const Places &places, uint64_t at) {
    const Calls &table = calls(KVX_OP_PREAD);
    const ::iovec *first = places.data();
    return places.size() == 1 ? table.pread(file->fd, first->iov_base, first->iov_len, at)
                              : table.preadv(file->fd, first, places.size(), at);
  });
}

int64_t file_pwritev(kvx_file *file, const Span *from, uint32_t count, uint64_t offset, uint64_t *moved) {
  return transfer(file, true, from, count, offset, moved, [&](const Places &places, uint64_t at) {
    const Calls &table = calls(KVX_OP_PWRITE);
    const ::iovec *first = places.data();
    return places.size() == 1 ? table.pwrite(file->fd, first->iov_base, first->iov_len, at)
                              : table.pwritev(file->fd, first, places.size(), at);
  });
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
  if (file != nullptr) kvx::file_unref(file, kClosePatience);
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
