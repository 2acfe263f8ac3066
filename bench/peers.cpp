// What kvxfer is measured against: memcpy, pread and pwrite on so many threads, with nothing around them.
// Built by peers.py when the bench runs; in Python the interpreter's lock would slow small transfers down.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// Runs work(t) for t in [0, threads), the last one in the caller.
template <class Work>
void on_threads(int threads, Work work) {
  std::vector<std::thread> others;
  for (int t = 0; t + 1 < threads; ++t) others.emplace_back(work, t);
  work(threads - 1);
  for (std::thread &other : others) other.join();
}

}  // namespace

extern "C" {

// One memcpy a thread, each of an equal share.
void peer_memcpy(uint8_t *to, const uint8_t *from, uint64_t n, int threads) {
  const uint64_t share = (n / threads + 4095) / 4096 * 4096;
  on_threads(threads, [=](int t) {
    const uint64_t begin = std::min(n, share * t), end = t + 1 == threads ? n : std::min(n, begin + share);
    std::memcpy(to + begin, from + begin, end - begin);
  });
}

struct peer_call {
  int64_t fd;
  uint64_t offset, address, bytes;
};

// Makes the calls in order, each on the first thread that is free. With `staging` (as many `stride` bytes as
// threads) every byte goes by way of the thread's own: what a design that keeps private buffers pays for them
// alone. 0, or the errno of one that failed.
int peer_transfer(const peer_call *calls, uint64_t n, int threads, int write, uint8_t *staging,
                  uint64_t stride) {
  std::atomic<uint64_t> next{0};
  std::atomic<int> error{0};
  on_threads(threads, [&](int t) {
    for (uint64_t i; !error && (i = next.fetch_add(1)) < n;) {
      const peer_call &call = calls[i];
      auto *const place = reinterpret_cast<uint8_t *>(call.address);
      uint8_t *const at = staging ? staging + t * stride : place;
      const int fd = static_cast<int>(call.fd);
      if (staging && write) std::memcpy(at, place, call.bytes);
      for (uint64_t done = 0; done < call.bytes;) {
        const uint64_t left = call.bytes - done, offset = call.offset + done;
        const ssize_t moved =
            write ? pwrite(fd, at + done, left, offset) : pread(fd, at + done, left, offset);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) {
          error = moved < 0 ? errno : EIO;
          return;
        }
        done += moved;
      }
      if (staging && !write) std::memcpy(place, at, call.bytes);
    }
  });
  return error;
}
}
