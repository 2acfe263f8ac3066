#include "plan.h"

#include <algorithm>
#include <map>

namespace kvx {

Plan::Plan(const std::vector<kvx_mapping *> &parts, const uint8_t *writes, uint64_t limit, bool every_owner)
    : layout_(parts.front()->layout) {
  add_items(parts, writes, every_owner);
  cut(limit);
  shares_ = shares_of(0, num_segments_);
}

void Plan::add_items(const std::vector<kvx_mapping *> &parts, const uint8_t *writes, bool every_owner) {
  std::map<uint32_t, std::vector<Owner>> by_segment;
  for (uint32_t part = 0; part < parts.size(); ++part) {
    if (writes && !writes[part]) continue;
    for (uint32_t ordinal = 0; ordinal < parts[part]->segments.size(); ++ordinal) {
      std::vector<Owner> &owners = by_segment[parts[part]->segments[ordinal].segment];
      if (every_owner || owners.empty()) owners.push_back({part, ordinal});
    }
  }
  const uint64_t payload_stride = kvx_slot_payload_stride(&layout_);
  for (auto &[segment, owners] : by_segment) {
    const uint64_t start = segment * layout_.segment_stride;
    const uint64_t bytes = std::min(layout_.segment_stride, payload_stride - start);
    items_.push_back({false, segment, start, staging_bytes_, bytes});
    owners_.push_back(std::move(owners));
    staging_bytes_ += bytes;
    payload_bytes_ += segment_length(segment);
  }
  num_segments_ = static_cast<uint32_t>(items_.size());
  for (uint32_t i = 0; i < num_segments_; ++i) {
    const uint32_t page = items_[i].index / layout_.segments_per_trailer;
    if (items_.back().trailer && items_.back().index == page) continue;
    items_.push_back(
        {true, page, payload_stride + uint64_t{page} * layout_.alignment, staging_bytes_, layout_.alignment});
    staging_bytes_ += layout_.alignment;
  }
}

void Plan::cut(uint64_t limit) {
  for (uint32_t i = 0; i < items_.size(); ++i) {
    const Item &item = items_[i];
    Piece *last = pieces_.empty() ? nullptr : &pieces_.back();
    const bool adjacent = last && last->slot_offset + last->bytes == item.slot_offset;
    if (adjacent && (item.trailer || last->bytes + item.bytes <= limit)) {
      last->bytes += item.bytes;
      ++last->num_items;
    } else {
      pieces_.push_back({i, 1, item.slot_offset, item.staging_offset, item.bytes, {}});
    }
  }
  for (Piece &piece : pieces_)
    piece.shares = shares_of(piece.first_item, std::min(piece.first_item + piece.num_items, num_segments_));
}

std::vector<Share> Plan::shares_of(uint32_t first_item, uint32_t end_item) const {
  std::vector<Share> out;
  for (uint32_t item = first_item; item < end_item; ++item) {
    for (const Owner &owner : owners_[item]) {
      const auto open = std::find_if(out.begin(), out.end(), [&](const Share &share) {
        return share.part == owner.part && share.first_ordinal + share.count == owner.ordinal &&
               share.first_item + share.count == item;
      });
      if (open != out.end())
        ++open->count;
      else
        out.push_back({owner.part, owner.ordinal, item, 1});
    }
  }
  return out;
}

uint64_t Plan::segment_length(uint32_t segment) const {
  return segment + 1 == layout_.num_segments ? layout_.last_segment_bytes : layout_.segment_bytes;
}

}  // namespace kvx
