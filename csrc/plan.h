// Which bytes of a slot a set of parts moves, and where they lie in staging.
#pragma once

#include <cstdint>
#include <vector>

#include "kvx.h"
#include "mapping.h"

namespace kvx {

// A segment or a trailer page, at its place in the slot and in staging.
struct Item {
  bool trailer;
  uint32_t index;  // segment number, or trailer page number
  uint64_t slot_offset;
  uint64_t staging_offset;
  uint64_t bytes;  // padded to the alignment
};

// Segments [first_item, first_item + count) of a plan, which are the segments from `first_ordinal` of one
// part.
struct Share {
  uint32_t part, first_ordinal, first_item, count;
};

// Items that are contiguous in the slot and in staging: one transfer.
struct Piece {
  uint32_t first_item, num_items;
  uint64_t slot_offset, staging_offset, bytes;
  std::vector<Share> shares;  // of its segments
};

// Items are the distinct segments of the parts in ascending order, then the trailer pages that hold their
// sums. Staging is packed in that order, so whatever is contiguous in the slot is contiguous in staging.
class Plan {
 public:
  // Transfers of at most about `limit` bytes, cut only between segments; a trailer joins what it follows.
  // `writes`, if given, selects the parts that count ([parts.size()]). `every_owner`: a segment that several
  // parts hold is in the shares of each (loads), or of the first only (stores).
  Plan(const std::vector<kvx_mapping *> &parts, const uint8_t *writes, uint64_t limit, bool every_owner);

  const kvx_slot_layout &layout() const { return layout_; }
  const std::vector<Item> &items() const { return items_; }
  uint32_t num_segments() const { return num_segments_; }  // the first items
  const std::vector<Piece> &pieces() const { return pieces_; }
  const std::vector<Share> &shares() const { return shares_; }  // of all segments
  uint64_t payload_bytes() const { return payload_bytes_; }
  uint64_t staging_bytes() const { return staging_bytes_; }
  uint64_t segment_length(uint32_t segment) const;

 private:
  struct Owner {
    uint32_t part, ordinal;
  };
  void add_items(const std::vector<kvx_mapping *> &parts, const uint8_t *writes, bool every_owner);
  void cut(uint64_t limit);
  std::vector<Share> shares_of(uint32_t first_item, uint32_t end_item) const;

  kvx_slot_layout layout_;
  std::vector<Item> items_;
  std::vector<std::vector<Owner>> owners_;
  std::vector<Piece> pieces_;
  std::vector<Share> shares_;
  uint32_t num_segments_ = 0;
  uint64_t payload_bytes_ = 0;
  uint64_t staging_bytes_ = 0;
};

}  // namespace kvx
