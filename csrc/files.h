// Open files counted by reference (section 3 of kvx.h).
#ifndef KVX_FILES_H
#define KVX_FILES_H

#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <string>

#include "kvx.h"

// A number that no other file of this process has, or had.
uint64_t new_file_number();

// kvx_file_adopt() makes one with one reference, which kvx_file_release() drops. Whoever starts a transfer on
// another thread takes its own with file_ref() first. After the last file_unref() the descriptor is closed.
struct kvx_file {
  int fd;
  bool direct;
  std::string label;
  std::atomic<uint64_t> references{1};
  std::atomic<bool> enrolled{false};  // rings know it, by its number (enrolment.h)
  const uint64_t number = new_file_number();
};

namespace kvx {

// Memory that a transfer goes to, or comes from.
struct Span {
  uint8_t *data;
  uint64_t bytes;
};

inline void file_ref(kvx_file *file) { file->references.fetch_add(1, std::memory_order_relaxed); }
// Waits for the close, if one follows, `patience` at most: closer.h.
void file_unref(kvx_file *file, std::chrono::milliseconds patience = {});

// The largest number of bytes that one call is asked to move.
inline constexpr uint64_t kMaxTransfer = uint64_t{1} << 30;

uint64_t total(const Span *places, uint32_t count);

// Bytes [start, start + length) of some places, as far as one call takes them.
class Places {
 public:
  Places() = default;
  Places(const Span *places, uint32_t count, uint64_t start, uint64_t length) {
    for (; count > 0 && length > 0 && used_ < kMost; ++places, --count) {
      if (start >= places->bytes) {
        start -= places->bytes;
        continue;
      }
      const uint64_t n = std::min(places->bytes - start, length);
      iov_[used_++] = {places->data + start, n};
      bytes_ += n;
      start = 0, length -= n;
    }
  }
  const ::iovec *data() const { return iov_; }
  int size() const { return used_; }
  uint64_t bytes() const { return bytes_; }

 private:
  static constexpr int kMost = 64;  // a row and its trailers are two
  ::iovec iov_[kMost];
  int used_ = 0;
  uint64_t bytes_ = 0;
};

// The power of two that a direct request is aligned to, or 1 where a transfer may go on from any byte.
uint64_t boundary(const kvx_file *file, const Span *places, uint32_t count, uint64_t offset);

// The loop behind all transfers: `call(places, offset)` moves bytes once, and answers as a system call does.
// The answer is what file_preadv and file_pwritev give.
template <class Call>
int64_t transfer(const kvx_file *file, bool write, const Span *places, uint32_t count, uint64_t offset,
                 uint64_t *moved, Call call) {
  const uint64_t n = total(places, count), align = boundary(file, places, count, offset);
  uint64_t done = 0;   // moved for certain
  uint64_t start = 0;  // where the next call begins: <= done
  *moved = 0;
  while (done < n) {
    const int64_t got = call(Places(places, count, start, std::min(n - start, kMaxTransfer)), offset + start);
    if (got == -EINTR) continue;
    if (got < 0) return got;
    const uint64_t end = start + static_cast<uint64_t>(got);
    if (end <= done) break;
    *moved = done = end;
    start = done < n ? done & ~(align - 1) : done;
  }
  return write && done < n ? -EIO : static_cast<int64_t>(done);
}

// The loops behind kvx_file_pread() and kvx_file_pwrite(); `moved` must not be null.
// A read returns less than n only at the end of the file. A write that stops making progress is -EIO: a
// non-negative answer of file_pwrite is always n. EINTR is retried. With O_DIRECT, a transfer that stops off
// the alignment of its request goes on from the boundary before it; no progress from there is the end of the
// file.
int64_t file_pread(kvx_file *file, void *buf, uint64_t n, uint64_t offset, uint64_t *moved);
int64_t file_pwrite(kvx_file *file, const void *buf, uint64_t n, uint64_t offset, uint64_t *moved);
// The same over several places in turn, in one call where it moves everything.
int64_t file_preadv(kvx_file *file, const Span *to, uint32_t count, uint64_t offset, uint64_t *moved);
int64_t file_pwritev(kvx_file *file, const Span *from, uint32_t count, uint64_t offset, uint64_t *moved);

}  // namespace kvx

#endif
