// Mappings, and the copies between live tensors and canonical bytes.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>

#include "checksum.h"
#include "kvx.h"
#include "mapping.h"
#include "slot.h"

namespace kvx {
namespace {

constexpr uint32_t kMaxGroup =
    8;  // segments in lockstep: their rows and those ahead of them stay in the first cache

constexpr uint64_t kLine = 64;

// How the rows of a group travel: fragment by fragment to their places; put together in cache,
// because a fragment's end would touch a place off a word (for the sum) or off a line (for streaming); or
// likewise without looking ahead, which does not pay for tiny fragments.
enum class Route { kDirect, kStaged, kSmall };

// Bytes of row r of a segment; 0 behind its end.
inline uint64_t row_bytes(uint64_t segment_bytes, uint64_t r) {
  return r * kRowBytes >= segment_bytes ? 0 : std::min(kRowBytes, segment_bytes - r * kRowBytes);
}

}  // namespace
}  // namespace kvx

#define KVX_ISA_FILE "copy_kernels.h"
#include "isa.h"

namespace kvx {
namespace {

using RunGroup = void (*)(const Mapping &, const OwnedSegment *, uint32_t, const int64_t *, uint8_t *const *,
                          uint64_t *, Route);
constexpr const RunGroup *kRunGroup[] = KVX_FOR_EACH_ISA(kRunGroup);

// Standalone copies of so many bytes and more are written around the caches.
constexpr uint64_t kStreamBytes = uint64_t{16} << 20;
// Work for which another thread is started.
constexpr uint64_t kThreadBytes = uint64_t{1} << 20;

uint64_t grain(uint64_t bits) { return bits & (~bits + 1); }

uint32_t group_end(const Mapping &mapping, uint32_t first, uint32_t end) {
  uint32_t last = first + 1;
  while (last < end && last - first < kMaxGroup && mapping.segments[last].beside) ++last;
  return last;
}

// Copies segments [first, end), one group.
template <bool kGather>
void copy_group(const Mapping &mapping, uint32_t first, uint32_t end, const int64_t *block_ids,
                uint8_t *const *canonical, uint64_t *sums, bool stream) {
  uint64_t least = UINT64_MAX, fragments = 0, pages = 0, places = 0;
  bool joined = true;
  for (uint32_t s = first; s < end; ++s) {
    const OwnedSegment &segment = mapping.segments[s];
    least = std::min(least, segment.least_fragment);
    fragments |= segment.fragment_grain;
    pages |= segment.page_grain;
    places |= reinterpret_cast<uintptr_t>(canonical[s - first]);
    joined = joined && (s == first || segment.adjacent);
  }
  const bool lines = grain(fragments | kLine) == kLine;
  // A scatter may stream parts of lines where the group's next fragment at once fills the line up.
  const bool filled = joined && least * (end - first) >= 4 * kLine && grain(pages | 16) == 16;
  if (kGather) {
    stream =
        stream && isa() != Isa::kScalar && grain(places | kLine) == kLine;  // plain C++ has no such stores
  } else {
    stream = stream && (grain(pages | kLine) == kLine || filled);
  }
  uint64_t unused[kMaxGroup];
  if (kGather && stream && lines && sums == nullptr) sums = unused;  // faster, see copy_kernels.h
  const bool straight = kGather && stream ? lines : sums == nullptr || grain(fragments | 4) == 4;
  const Route route = least < kLine ? Route::kSmall : straight ? Route::kDirect : Route::kStaged;
  const int which = (kGather ? 1 : 0) | (sums != nullptr ? 2 : 0) | (stream ? 4 : 0);
  kRunGroup[static_cast<int>(isa())][which](mapping, &mapping.segments[first], end - first, block_ids,
                                            canonical, sums, route);
  if (!kGather) return;
  for (uint32_t s = first; s < end; ++s) {
    const OwnedSegment &segment = mapping.segments[s];
    std::memset(canonical[s - first] + segment.bytes, 0, segment.padded - segment.bytes);
  }
}

template <bool kGather>
void copy_segments(const Mapping &mapping, uint32_t first, uint32_t count, const int64_t *block_ids,
                   uint8_t *const *canonical, uint64_t *sums, bool stream) {
  for (uint32_t s = first, end; s < first + count; s = end) {
    end = group_end(mapping, s, first + count);
    copy_group<kGather>(mapping, s, end, block_ids, canonical + (s - first),
                        sums != nullptr ? sums + (s - first) : nullptr, stream);
  }
}

// ---- whole arrays of chunks -------------------------------------------------------------------------------

struct Batch {
  const Mapping &mapping;
  const int64_t *block_ids;
  uint64_t num_chunks;
  uint8_t *canonical;
  uint64_t chunk_stride;
  uint64_t *sums;
  bool stream;
  std::vector<uint32_t> groups;  // first ordinals, and the end
  std::atomic<uint64_t> next{0};
};

template <bool kGather>
void run_batch(Batch &batch) {
  const Mapping &mapping = batch.mapping;
  const uint64_t groups = batch.groups.size() - 1;
  for (;;) {
    const uint64_t unit = batch.next.fetch_add(1, std::memory_order_relaxed);
    const uint64_t chunk = unit / groups;
    if (chunk >= batch.num_chunks) return;
    const uint32_t first = batch.groups[unit % groups], end = batch.groups[unit % groups + 1];
    uint8_t *addresses[kMaxGroup];
    uint64_t sums[kMaxGroup];
    for (uint32_t s = first; s < end; ++s) {
      addresses[s - first] = batch.canonical + chunk * batch.chunk_stride +
                             segment_offset(mapping.layout, mapping.segments[s].segment);
    }
    copy_group<kGather>(mapping, first, end, batch.block_ids + chunk * mapping.layout.blocks_per_chunk,
                        addresses, batch.sums != nullptr ? sums : nullptr, batch.stream);
    if (batch.sums == nullptr) continue;
    for (uint32_t s = first; s < end; ++s) {
      batch.sums[chunk * mapping.layout.num_segments + mapping.segments[s].segment] = sums[s - first];
    }
  }
}

template <bool kGather>
int copy_chunks(const Mapping *mapping, const int64_t *block_ids, uint64_t num_chunks, uint8_t *canonical,
                uint64_t chunk_stride, uint64_t *sums, int threads) try {
  if (mapping == nullptr) return -EINVAL;
  if (num_chunks == 0) return 0;
  if (block_ids == nullptr || canonical == nullptr) return -EINVAL;
  const OwnedSegment &last = mapping->segments.back();
  const uint64_t used = segment_offset(mapping->layout, last.segment) + (kGather ? last.padded : last.bytes);
  if (num_chunks > 1 && chunk_stride < used) return -EINVAL;
  uint64_t ids, span;
  if (__builtin_mul_overflow(num_chunks, mapping->layout.blocks_per_chunk, &ids) ||
      __builtin_mul_overflow(num_chunks, std::max(chunk_stride, used), &span) ||
      check_blocks(*mapping, block_ids, ids) != 0) {
    return -EINVAL;
  }
  const uint64_t bytes = num_chunks * mapping->part_bytes;
  Batch batch{*mapping, block_ids, num_chunks, canonical, chunk_stride, sums, bytes >= kStreamBytes, {}, {}};
  const uint32_t end = static_cast<uint32_t>(mapping->segments.size());
  for (uint32_t s = 0; s < end; s = group_end(*mapping, s, end)) batch.groups.push_back(s);
  batch.groups.push_back(end);

  const uint64_t useful = std::min(num_chunks * (batch.groups.size() - 1), bytes / kThreadBytes);
  std::vector<std::thread> helpers;
  try {
    for (int t = 1; t < threads && static_cast<uint64_t>(t) < useful; ++t) {
      helpers.emplace_back([&batch] { run_batch<kGather>(batch); });
    }
  } catch (const std::exception &) {
    // Fewer threads, then.
  }
  run_batch<kGather>(batch);
  for (std::thread &helper : helpers) helper.join();
  return 0;
} catch (const std::bad_alloc &) {
  return -ENOMEM;
}

// ---- making a mapping -------------------------------------------------------------------------------------

// Resolves a run; false where it leaves its tensor list or the address space.
bool resolve(const kvx_run &run, const kvx_tensor *tensors, uint32_t num_tensors, PlanRun *out) {
  if (run.tensor >= num_tensors || run.fragment_size == 0 || run.num_fragments == 0) return false;
  const kvx_tensor &tensor = tensors[run.tensor];
  const uint64_t last_block = tensor.num_blocks > 0 ? tensor.num_blocks - 1 : 0;
  uint64_t bytes, blocks, stride, base, end;
  if (tensor.base == 0 || __builtin_mul_overflow(run.fragment_size, run.num_fragments, &bytes) ||
      __builtin_mul_overflow(last_block, tensor.block_stride, &blocks) ||
      __builtin_mul_overflow(run.num_fragments - 1, run.local_stride, &stride) ||
      __builtin_add_overflow(tensor.base, run.local_offset, &base) ||
      __builtin_add_overflow(base, blocks, &end) || __builtin_add_overflow(end, stride, &end) ||
      __builtin_add_overflow(end, run.fragment_size, &end)) {
    return false;
  }
  *out = {base, tensor.block_stride, run.local_stride, run.fragment_size, run.num_fragments};
  if (run.num_fragments == 1 || run.local_stride == run.fragment_size) {
    *out = {base, tensor.block_stride, bytes, bytes, 1};
  }
  return true;
}

// Puts the pieces of runs [first, end), all of one segment, in canonical order. They must tile its bytes
// exactly.
bool lay_out(const kvx_run *runs, uint64_t first, uint64_t end, uint64_t block_stride, uint32_t blocks,
             uint64_t bytes, std::vector<PlanPiece> *pieces) {
  struct Placed {
    uint64_t start, bytes;
    PlanPiece piece;
  };
  std::vector<Placed> placed;
  placed.reserve((end - first) * blocks);
  for (uint64_t r = first; r < end; ++r) {
    const uint64_t length = runs[r].fragment_size * runs[r].num_fragments;  // resolve() saw that this fits
    for (uint32_t b = 0; b < blocks; ++b) {
      uint64_t shift, start;
      if (__builtin_mul_overflow(block_stride, b, &shift) ||
          __builtin_add_overflow(runs[r].canonical_offset, shift, &start) || start > bytes ||
          length > bytes - start) {
        return false;
      }
      placed.push_back({start, length, {static_cast<uint32_t>(r), b}});
    }
  }
  std::sort(placed.begin(), placed.end(), [](const Placed &a, const Placed &b) { return a.start < b.start; });
  uint64_t at = 0;
  for (const Placed &p : placed) {
    if (p.start != at) return false;
    at += p.bytes;
    pieces->push_back(p.piece);
  }
  return at == bytes;
}

// The bounds of a segment's fragments, from its runs.
void describe(const PlanRun *first, const PlanRun *end, OwnedSegment *segment) {
  uint64_t sizes = 0, places = 0;
  segment->least_fragment = UINT64_MAX;
  for (const PlanRun *run = first; run != end; ++run) {
    segment->least_fragment = std::min(segment->least_fragment, run->fragment_size);
    sizes |= run->fragment_size;
    places |= run->base | run->block_stride | (run->num_fragments > 1 ? run->local_stride : 0);
  }
  segment->fragment_grain = grain(sizes);
  segment->page_grain = grain(sizes | places);
}

bool lies_beside(const PlanRun &a, const PlanRun &b) {
  const uint64_t apart = a.base < b.base ? b.base - a.base : a.base - b.base;
  return a.num_fragments > 1 && a.num_fragments == b.num_fragments && a.local_stride == b.local_stride &&
         a.block_stride == b.block_stride && apart < a.local_stride;
}

bool is_straight(const Mapping &mapping) {
  if (mapping.live || mapping.layout.blocks_per_chunk != 1) return false;
  for (const OwnedSegment &segment : mapping.segments) {
    const bool whole =
        segment.end_piece == segment.first_piece + 1 && segment.least_fragment == segment.bytes;
    if (!whole || segment.bytes != segment.padded || segment.page_grain % kMemoryAlignment != 0) return false;
  }
  return true;
}

int build(const kvx_run *runs, uint64_t num_runs, const uint32_t *segments, uint32_t num_segments,
          uint64_t canonical_block_stride, const kvx_tensor *tensors, uint32_t num_tensors,
          Mapping *mapping) {
  const kvx_slot_layout &layout = mapping->layout;
  mapping->runs.resize(num_runs);
  for (uint64_t r = 0; r < num_runs; ++r) {
    if (!resolve(runs[r], tensors, num_tensors, &mapping->runs[r])) return -EINVAL;
    mapping->block_limit = std::min(mapping->block_limit, tensors[runs[r].tensor].num_blocks);
  }
  uint64_t r = 0, first_of_last = 0;
  for (uint32_t i = 0; i < num_segments; ++i) {
    if (segments[i] >= layout.num_segments || (i > 0 && segments[i] <= segments[i - 1])) return -EINVAL;
    OwnedSegment segment = {};
    segment.segment = segments[i];
    segment.bytes = segment_length(layout, segments[i]);
    segment.padded = segment_padded(layout, segments[i]);
    segment.first_piece = mapping->pieces.size();
    const uint64_t first = r;
    for (; r < num_runs && runs[r].segment == segments[i]; ++r) {
      if (r > first && runs[r].canonical_offset < runs[r - 1].canonical_offset) return -EINVAL;
    }
    if (!lay_out(runs, first, r, canonical_block_stride, layout.blocks_per_chunk, segment.bytes,
                 &mapping->pieces)) {
      return -EINVAL;
    }
    segment.end_piece = mapping->pieces.size();
    describe(mapping->runs.data() + first, mapping->runs.data() + r, &segment);
    if (i > 0) {
      const PlanRun &before = mapping->runs[first_of_last];
      segment.beside = lies_beside(before, mapping->runs[first]);
      segment.adjacent = segment.beside && before.base + before.fragment_size == mapping->runs[first].base;
    }
    first_of_last = first;
    mapping->part_bytes += segment.bytes;
    mapping->segments.push_back(segment);
  }
  mapping->straight = is_straight(*mapping);
  return r == num_runs ? 0 : -EINVAL;  // a run of a segment that is not listed, or out of order
}

}  // namespace

void mapping_unref(Mapping *mapping) {
  if (mapping->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete mapping;
}

int check_blocks(const Mapping &mapping, const int64_t *block_ids, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) {
    if (block_ids[i] != -1 && static_cast<uint64_t>(block_ids[i]) >= mapping.block_limit) return -EINVAL;
  }
  return 0;
}

void gather_segments(const Mapping &mapping, uint32_t first, uint32_t count, const int64_t *block_ids,
                     uint8_t *const *dst, uint64_t *sums, bool stream) {
  copy_segments<true>(mapping, first, count, block_ids, dst, sums, stream);
}

void scatter_segments(const Mapping &mapping, uint32_t first, uint32_t count, const int64_t *block_ids,
                      const uint8_t *const *src, uint64_t *sums, bool stream) {
  copy_segments<false>(mapping, first, count, block_ids, const_cast<uint8_t *const *>(src), sums, stream);
}

}  // namespace kvx

extern "C" {

int kvx_mapping_new(const kvx_slot_layout *layout, const kvx_run *runs, uint64_t num_runs,
                    const uint32_t *segments, uint32_t num_segments, uint64_t canonical_block_stride,
                    const kvx_tensor *tensors, uint32_t num_tensors, int live, kvx_mapping **out) {
  if (layout == nullptr || runs == nullptr || segments == nullptr || tensors == nullptr || out == nullptr ||
      num_runs == 0 || num_segments == 0 || num_runs > UINT32_MAX || kvx::slot_check(*layout) != 0) {
    return -EINVAL;
  }
  kvx_mapping *mapping = nullptr;
  int result;
  try {
    mapping = new kvx_mapping{*layout, live != 0, UINT64_MAX, 0, {}, {}, {}, {1}};
    result = kvx::build(runs, num_runs, segments, num_segments, canonical_block_stride, tensors, num_tensors,
                        mapping);
  } catch (const std::exception &) {  // no memory, or a length that no vector has
    result = -ENOMEM;
  }
  if (result != 0) {
    delete mapping;
    return result;
  }
  *out = mapping;
  return 0;
}

void kvx_mapping_release(kvx_mapping *mapping) {
  if (mapping != nullptr) kvx::mapping_unref(mapping);
}

int kvx_gather(const kvx_mapping *mapping, const int64_t *block_ids, uint64_t num_chunks, void *out,
               uint64_t out_chunk_stride, uint64_t *sums, int threads) {
  return kvx::copy_chunks<true>(mapping, block_ids, num_chunks, static_cast<uint8_t *>(out), out_chunk_stride,
                                sums, threads);
}

int kvx_scatter(const kvx_mapping *mapping, const int64_t *block_ids, uint64_t num_chunks, const void *src,
                uint64_t src_chunk_stride, uint64_t *sums, int threads) {
  uint8_t *const from = static_cast<uint8_t *>(const_cast<void *>(src));  // a scatter only reads it
  return kvx::copy_chunks<false>(mapping, block_ids, num_chunks, from, src_chunk_stride, sums, threads);
}

}  // extern "C"
