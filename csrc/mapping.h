// A rank's part of a slot over its live tensors, and the copies between the two (section 5 of kvx.h).
#ifndef KVX_MAPPING_H
#define KVX_MAPPING_H

#include <atomic>
#include <cstdint>
#include <vector>

#include "kvx.h"

namespace kvx {

// A run with its tensor resolved. Fragment f of block id b is at base + b * block_stride + f * local_stride.
// Fragments that touch in the tensor were joined into one.
struct PlanRun {
  uint64_t base;
  uint64_t block_stride;
  uint64_t local_stride;
  uint64_t fragment_size;
  uint64_t num_fragments;
};

// A run's bytes of one block of the chunk: consecutive canonical bytes. A segment is its pieces in order.
struct PlanPiece {
  uint32_t run;
  uint32_t block;
};

struct OwnedSegment {
  uint32_t segment;      // its number in the slot
  uint64_t bytes;        // payload
  uint64_t padded;       // with its padding: what gather writes
  uint64_t first_piece;  // [first_piece, end_piece) of Mapping::pieces
  uint64_t end_piece;
  uint64_t least_fragment;
  uint64_t fragment_grain;  // the power of two that divides every fragment ...
  uint64_t page_grain;      // ... and every fragment's address as well
  bool beside;    // its fragments lie between those of the segment before: one fetch serves both ...
  bool adjacent;  // ... and start where those end
};

}  // namespace kvx

// Immutable after kvx_mapping_new(), which gives it one reference.
struct kvx_mapping {
  kvx_slot_layout layout;
  bool live;             // tensors are read by others while a load runs
  uint64_t block_limit;  // block ids are below this: the least num_blocks of the tensors in use
  uint64_t part_bytes;   // payload of all owned segments
  std::vector<kvx::OwnedSegment> segments;  // ascending by number; an index here is an "ordinal"
  std::vector<kvx::PlanRun> runs;
  std::vector<kvx::PlanPiece> pieces;
  std::atomic<uint64_t> references{1};
  // Every segment is adjacent, aligned bytes of one block of host memory, without padding: what a transfer
  // can use as it is.
  bool straight = false;
};

namespace kvx {

using Mapping = kvx_mapping;

// For jobs that outlive the caller's reference. kvx_mapping_release() is mapping_unref().
inline void mapping_ref(Mapping *mapping) { mapping->references.fetch_add(1, std::memory_order_relaxed); }
void mapping_unref(Mapping *mapping);

// Memory of any larger alignment is good for direct I/O.
inline constexpr uint64_t kMemoryAlignment = 4096;

// Where the bytes of an owned segment of a straight mapping are; `block` is a block's id.
inline uint8_t *straight_bytes(const Mapping &mapping, uint32_t ordinal, int64_t block) {
  const PlanRun &run = mapping.runs[mapping.pieces[mapping.segments[ordinal].first_piece].run];
  return reinterpret_cast<uint8_t *>(run.base + static_cast<uint64_t>(block) * run.block_stride);
}

// 0 if each of the n ids is -1 or a block that every tensor of the mapping has, else -EINVAL. The copies
// below check nothing: ask here first.
int check_blocks(const Mapping &mapping, const int64_t *block_ids, uint64_t n);

// Writes the payload and the zero padding of the owned segments [first, first + count) to dst:
// segments[...].padded bytes each. block_ids: [blocks_per_chunk], -1 for an absent block, whose bytes become
// zero. dst: [count] addresses. sums: [count] or null. `stream`: dst is not read again soon and a cache would
// not hold it, so write around the caches. One call for many segments is faster than one call each: KV heads
// share a page in the NHD layouts, and its lines are then fetched once.
void gather_segments(const Mapping &mapping, uint32_t first, uint32_t count, const int64_t *block_ids,
                     uint8_t *const *dst, uint64_t *sums, bool stream);
// Copies the segments' payloads at src into the blocks; absent blocks are skipped, and src's bytes for them
// still count in the sums. `stream`: write the blocks around the caches; twice as fast where they are not in
// one, as live blocks seldom are, and src may be.
void scatter_segments(const Mapping &mapping, uint32_t first, uint32_t count, const int64_t *block_ids,
                      const uint8_t *const *src, uint64_t *sums, bool stream);

}  // namespace kvx

#endif
