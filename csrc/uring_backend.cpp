// Transfers by a ring, several at once. Each is looped as a blocking one is (files.h); a ring that the kernel
// has refused is left for blocking calls.
#include <array>
#include <cerrno>

#include "backend.h"
#include "faults.h"
#include "ring.h"

namespace kvx {
namespace {

class UringBackend final : public Backend {
 public:
  UringBackend(std::unique_ptr<Ring> ring, uint32_t depth, RingUse &use)
      : ring_(std::move(ring)), depth_(depth), use_(use) {
    ++use_.rings;
    if (ring_->files_error() < 0) use_.files_error = ring_->files_error();
  }
  ~UringBackend() override {
    set_staging(nullptr, 0);
    if (counted_) --use_.rings;
  }

  uint32_t depth() const override { return depth_; }

  void begin(Transfer &t) override {
    for (t.ticket = 0; used_[t.ticket]; ++t.ticket) {
    }
    const uint64_t most = std::min(total(t.places, t.count), kMaxTransfer);
    prepare(t, Places(t.places, t.count, 0, most), t.offset);
    Request &request = requests_[t.ticket];
    if (request.fate.is_plain() && !ring_->broken()) ring_->push(request);
    used_[t.ticket] = true;
  }

  void go() override { ring_->hand_over(); }

  int64_t finish(Transfer &t) override {
    bool first = true;
    const int64_t answer = transfer(t.file, t.write, t.places, t.count, t.offset, &t.moved,
                                    [&](const Places &places, uint64_t offset) {
                                      if (!first) prepare(t, places, offset);
                                      first = false;
                                      return meet(requests_[t.ticket]);
                                    });
    used_[t.ticket] = false;
    return answer;
  }

  void drop(Transfer &t) override {
    Request &request = requests_[t.ticket];
    ring_->withdraw();
    if (request.state == Request::kTaken) ring_->wait(request);
    used_[t.ticket] = false;
  }

  void set_staging(uint8_t *base, uint64_t bytes) override {
    int error;
    use_.registered_bytes -= enrolled_;
    enrolled_ = ring_->enroll(base, bytes, &error) ? bytes : 0;
    use_.registered_bytes += enrolled_;
    if (error < 0) use_.buffers_error = error;
  }

 private:
  void prepare(const Transfer &t, const Places &places, uint64_t offset) {
    const kvx_op op = t.write ? KVX_OP_PWRITE : KVX_OP_PREAD;
    const Fate fate = calls(op).uring->fate(op, {offset, places.bytes()});
    requests_[t.ticket] = {t.file, t.write, offset, places, fate, Request::kIdle, 0};
  }

  // What rules want of a request, and the request.
  int64_t meet(Request &request) {
    const kvx_fault &rule = request.fate.rule;
    if (request.fate.is_plain()) return carry(request);
    const int64_t got = faulty({rule, request.fate.releases}, [&](uint64_t limit) {
      if (limit >= request.places.bytes()) return carry(request);
      const auto cut = request.write ? cut_pwritev : cut_preadv;
      return cut(request.file->fd, request.places.data(), request.places.size(), request.offset, limit);
    });
    const bool flips = rule.action == KVX_FAULT_FLIP && got > 0 && rule.arg < static_cast<uint64_t>(got);
    if (flips) flip(request.places.data(), rule.arg);
    return got;
  }

  int64_t carry(Request &request) {
    if (request.state == Request::kIdle && !ring_->broken()) ring_->push(request);
    if (request.state != Request::kIdle) ring_->wait(request);
    if (ring_->broken() && counted_) counted_ = false, --use_.rings;
    // EAGAIN is no answer of a file's: the kernel could not do it by a ring.
    if (request.state == Request::kDone && request.answer != -EAGAIN) return request.answer;
    const Calls &table = plain_calls();
    const auto call = request.write ? table.pwritev : table.preadv;
    return call(request.file->fd, request.places.data(), request.places.size(), request.offset);
  }

  const std::unique_ptr<Ring> ring_;
  const uint32_t depth_;
  RingUse &use_;
  std::array<Request, KVX_MAX_DEPTH> requests_;
  std::array<bool, KVX_MAX_DEPTH> used_ = {};
  uint64_t enrolled_ = 0;
  bool counted_ = true;
};

}  // namespace

std::unique_ptr<Backend> uring_backend(uint32_t depth, RingUse &use, int *error, std::string *why) {
  std::unique_ptr<Ring> ring = Ring::make(KVX_MAX_DEPTH, error, why);
  return ring ? std::make_unique<UringBackend>(std::move(ring), depth, use) : nullptr;
}

}  // namespace kvx
