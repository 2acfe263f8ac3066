// Blocking calls, one at a time.
#include "backend.h"

namespace kvx {
namespace {

class PosixBackend final : public Backend {
 public:
  uint32_t depth() const override { return 1; }
  void begin(Transfer &) override {}
  int64_t finish(Transfer &t) override {
    return t.write ? file_pwritev(t.file, t.places, t.count, t.offset, &t.moved)
                   : file_preadv(t.file, t.places, t.count, t.offset, &t.moved);
  }
  void go() override {}
  void drop(Transfer &) override {}
  void set_staging(uint8_t *, uint64_t) override {}
};

}  // namespace

std::unique_ptr<Backend> posix_backend() { return std::make_unique<PosixBackend>(); }

}  // namespace kvx
