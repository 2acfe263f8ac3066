// How a worker's bytes reach a file.
#ifndef KVX_BACKEND_H
#define KVX_BACKEND_H

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "files.h"

namespace kvx {

// A transfer that was begun. It stays where it is, and so do its places, until it was finished or dropped.
struct Transfer {
  kvx_file *file = nullptr;
  bool write = false;
  const Span *places = nullptr;
  uint32_t count = 0;
  uint64_t offset = 0;
  uint64_t moved = 0;   // set by finish()
  uint32_t ticket = 0;  // the backend's own
};

// One for each worker, used by its thread alone.
class Backend {
 public:
  virtual ~Backend() = default;
  // Transfers that may be begun at once.
  virtual uint32_t depth() const = 0;
  // Begins a transfer; moves nothing yet. A file may be registered by it.
  virtual void begin(Transfer &transfer) = 0;
  // Hands to the kernel what was begun, for who does something else before finish(), which does so too.
  virtual void go() = 0;
  // Waits until it is done. As file_preadv and file_pwritev.
  virtual int64_t finish(Transfer &transfer) = 0;
  // Nobody wants what was begun and not finished; returns when nothing touches its memory any more. What has
  // not reached the kernel yet is not done at all.
  virtual void drop(Transfer &transfer) = 0;
  // Where the worker's staging is; nullptr: it has none, and gives up what it had when this returns.
  virtual void set_staging(uint8_t *base, uint64_t bytes) = 0;
};

// What all rings of an engine take.
struct RingUse {
  std::atomic<uint64_t> rings{0}, registered_bytes{0};
  std::atomic<int> buffers_error{0}, files_error{0};  // -errno of the latest refusal to register
};

std::unique_ptr<Backend> posix_backend();
// nullptr where there is no ring to be had: *error is -errno, and *why says it.
std::unique_ptr<Backend> uring_backend(uint32_t depth, RingUse &use, int *error, std::string *why);

}  // namespace kvx

#endif
