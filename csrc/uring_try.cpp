// kvx_uring_try(): whether transfers of a file can go by io_uring, found out by doing it.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#include "backend.h"
#include "calls.h"
#include "job.h"

namespace kvx {
namespace {

constexpr uint32_t kParts = 4;  // under way at once

// Pages of a test, aligned for direct I/O.
class Pages {
 public:
  explicit Pages(uint64_t bytes) : bytes_(bytes) {
    void *at = nullptr;
    if (calls(KVX_OP_MMAP).mmap(bytes, &at) == 0) data_ = static_cast<uint8_t *>(at);
  }
  ~Pages() {
    if (data_) unmap(data_, bytes_);
  }
  Pages(const Pages &) = delete;
  Pages &operator=(const Pages &) = delete;
  uint8_t *data() const { return data_; }

 private:
  uint8_t *data_ = nullptr;
  const uint64_t bytes_;
};

void fill(uint8_t *data, uint64_t bytes) {
  uint64_t state = now_ns() | 1;
  for (uint64_t i = 0; i < bytes; ++i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    data[i] = static_cast<uint8_t>(state);
  }
}

// All parts at once. 0, or -errno.
int64_t move(Backend &backend, kvx_file *file, bool write, uint8_t *data, uint64_t bytes) {
  const uint64_t part = bytes / kParts;
  Span places[kParts];
  Transfer transfers[kParts];
  int64_t worst = 0;
  for (uint32_t i = 0; i < kParts; ++i) {
    places[i] = {data + i * part, part};
    transfers[i] = {file, write, &places[i], 1, i * part};
    backend.begin(transfers[i]);
  }
  for (Transfer &transfer : transfers) {
    const int64_t answer = backend.finish(transfer);
    if (worst == 0) worst = answer < 0 ? answer : static_cast<uint64_t>(answer) == part ? 0 : -EIO;
  }
  return worst;
}

int give_up(int64_t error, const char *what, std::string *why) {
  *why = std::string(what) + ": [Errno " + std::to_string(-error) + "] " +
         std::strerror(static_cast<int>(-error));
  return static_cast<int>(error);
}

int try_uring(kvx_file *file, uint64_t bytes, std::string *why) {
  if (bytes == 0 || bytes % kParts) return give_up(-EINVAL, "the size of the test", why);
  Pages pages(2 * bytes);  // after it the ring is gone, and nothing of the kernel's
  if (!pages.data()) return give_up(-ENOMEM, "memory for a test", why);
  RingUse use;
  int error = 0;
  const std::unique_ptr<Backend> backend = uring_backend(kParts, use, &error, why);
  if (!backend) return error;
  uint8_t *const out = pages.data(), *const back = out + bytes;
  backend->set_staging(out, 2 * bytes);
  fill(out, bytes);
  if (const int64_t answer = move(*backend, file, true, out, bytes)) return give_up(answer, "a write", why);
  if (const int64_t answer = move(*backend, file, false, back, bytes)) return give_up(answer, "a read", why);
  if (use.rings == 0) return give_up(-EIO, "io_uring_enter was refused", why);
  if (std::memcmp(out, back, bytes) != 0) return give_up(-EIO, "a read gave other bytes", why);
  std::memset(back, 0, bytes);
  uint64_t moved;
  const int64_t got = file_pread(file, back, bytes, 0, &moved);
  if (got < 0) return give_up(got, "a pread of what was written", why);
  if (moved != bytes || std::memcmp(out, back, bytes) != 0)
    return give_up(-EIO, "a write left other bytes", why);
  if (use.buffers_error) give_up(use.buffers_error, "buffers are not registered", why);
  if (use.files_error) give_up(use.files_error, "files are not registered", why);
  return 0;
}

}  // namespace
}  // namespace kvx

extern "C" int kvx_uring_try(kvx_file *file, uint64_t bytes, char *why) {
  std::string text;
  int answer;
  try {
    answer = kvx::try_uring(file, bytes, &text);
  } catch (const std::bad_alloc &) {
    answer = -ENOMEM;
  }
  std::snprintf(why, KVX_WHY_BYTES, "%s", text.c_str());
  return answer;
}
