// The copy loop of host rows, included by isa.h once for each instruction set. No include guard on purpose.

namespace kvx {
namespace {
namespace KVX_ISA {

// Copies n bytes, and fetches as many at `ahead` meanwhile: fragments lie a stride apart that no hardware
// prefetcher follows, and a fetch from where nothing is does nothing. With kStream the whole vectors of `to`
// are written around the caches.
template <bool kStream>
KVX_TARGET inline void copy_bytes(uint8_t *to, const uint8_t *from, uint64_t n, const uint8_t *ahead) {
  if (n < kVec) {
    __builtin_prefetch(ahead);
    return copy_part(to, from, n);
  }
  uint64_t i = 0;
  if (kStream) {
    i = -reinterpret_cast<uintptr_t>(to) % kVec;
    if (i > 0) copy_part(to, from, i);
  }
  for (; i + 64 <= n; i += 64) {
    __builtin_prefetch(ahead + i);
    for (uint64_t j = i; j < i + 64; j += kVec) {
      if (kStream) {
        stream(to + j, load(from + j));
      } else {
        store(to + j, load(from + j));
      }
    }
  }
  for (; i + kVec <= n; i += kVec) store(to + i, load(from + i));
  if (i < n) store(to + n - kVec, load(from + n - kVec));  // some of it twice
}

// The fragments of a page.
template <bool kGather, bool kStream>
KVX_TARGET void copy_page(const kvx_row_run *run, const kvx_row_run *end, uint8_t *local,
                          uint8_t *canonical) {
  for (; run != end; ++run) {
    uint8_t *near = local + run->local_offset, *far = canonical + run->canonical_offset;
    const uint64_t size = run->fragment_size;
    const uint64_t step = kGather ? run->local_stride : run->canonical_stride;
    const uint64_t ahead = (size < kFetchAhead ? kFetchAhead / size : 1) * step;
    for (uint64_t f = 0; f < run->num_fragments; ++f) {
      const uint8_t *const from = kGather ? near : far;
      copy_bytes<kStream>(kGather ? far : near, from, size, from + ahead);
      near += run->local_stride;
      far += run->canonical_stride;
    }
  }
}

KVX_TARGET void end_stream() { fence(); }

// Bit 0: gather, bit 1: stream.
using CopyPage = void (*)(const kvx_row_run *, const kvx_row_run *, uint8_t *, uint8_t *);
constexpr CopyPage kCopyPage[] = {copy_page<false, false>, copy_page<true, false>, copy_page<false, true>,
                                  copy_page<true, true>};

}  // namespace KVX_ISA
}  // namespace
}  // namespace kvx
