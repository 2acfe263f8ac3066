// Slot arithmetic (docs/format.md, "A slot"): the twin of kvxfer/slot.py.
#ifndef KVX_SLOT_H
#define KVX_SLOT_H

#include <cstdint>

#include "kvx.h"

namespace kvx {

inline constexpr uint64_t kMaxSegmentBytes = uint64_t{16} << 30;

// `unit` is a power of two.
inline uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) & ~(unit - 1); }

// Payload bytes of a segment, without padding.
inline uint64_t segment_length(const kvx_slot_layout &layout, uint32_t segment) {
  return segment + 1 == layout.num_segments ? layout.last_segment_bytes : layout.segment_bytes;
}
// Bytes that a segment takes in the slot, with its padding.
inline uint64_t segment_padded(const kvx_slot_layout &layout, uint32_t segment) {
  return round_up(segment_length(layout, segment), layout.alignment);
}
inline uint64_t segment_offset(const kvx_slot_layout &layout, uint32_t segment) {
  return segment * layout.segment_stride;
}

inline uint64_t payload_bytes(const kvx_slot_layout &layout) {
  return (layout.num_segments - uint64_t{1}) * layout.segment_bytes + layout.last_segment_bytes;
}
inline uint64_t payload_stride(const kvx_slot_layout &layout) {
  return (layout.num_segments - uint64_t{1}) * layout.segment_stride +
         round_up(layout.last_segment_bytes, layout.alignment);
}

inline uint32_t num_trailers(const kvx_slot_layout &layout) {
  return static_cast<uint32_t>((uint64_t{layout.num_segments} + layout.segments_per_trailer - 1) /
                               layout.segments_per_trailer);
}
// Where a trailer page is in the slot.
inline uint64_t trailer_offset(const kvx_slot_layout &layout, uint32_t trailer) {
  return payload_stride(layout) + uint64_t{trailer} * layout.alignment;
}
// The segments of a trailer page.
inline uint32_t trailer_first(const kvx_slot_layout &layout, uint32_t trailer) {
  return trailer * layout.segments_per_trailer;
}
inline uint32_t trailer_count(const kvx_slot_layout &layout, uint32_t trailer) {
  const uint32_t rest = layout.num_segments - trailer_first(layout, trailer);
  return rest < layout.segments_per_trailer ? rest : layout.segments_per_trailer;
}

inline uint64_t slot_bytes(const kvx_slot_layout &layout) {
  return trailer_offset(layout, num_trailers(layout));
}

// 0, or -EINVAL where a field is out of the format's bounds or a slot would not fit 2^63 bytes.
int slot_check(const kvx_slot_layout &layout);

}  // namespace kvx

#endif
