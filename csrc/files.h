// Open files counted by reference (section 3 of kvx.h).
#ifndef KVX_FILES_H
#define KVX_FILES_H

#include <atomic>
#include <cstdint>
#include <string>

#include "kvx.h"

// kvx_file_adopt() makes one with one reference, which kvx_file_release() drops. Whoever starts a transfer on
// another thread takes its own with file_ref() first. The last file_unref() closes the descriptor.
struct kvx_file {
  int fd;
  bool direct;
  std::string label;
  std::atomic<uint64_t> references{1};
};

namespace kvx {

// Memory that a transfer goes to, or comes from.
struct Span {
  uint8_t *data;
  uint64_t bytes;
};

inline void file_ref(kvx_file *file) { file->references.fetch_add(1, std::memory_order_relaxed); }
void file_unref(kvx_file *file);

// The largest number of bytes that one call is asked to move.
inline constexpr uint64_t kMaxTransfer = uint64_t{1} << 30;

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
