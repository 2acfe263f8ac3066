// Slot arithmetic's C face, and trailer pages: built and taken apart field by field, trusting nothing.
#include "trailer.h"

#include <cerrno>
#include <cstring>

#include "checksum.h"
#include "slot.h"

namespace kvx {
namespace {

constexpr char kMagic[] = "KVXTRLR1";
constexpr uint32_t kVersion = 1;

// Offsets of the fields in a trailer page.
enum : uint32_t {
  kAtMagic = 0,
  kAtVersion = 8,
  kAtFirstSegment = 12,
  kAtSegmentCount = 16,
  kAtNumSegments = 20,
  kAtBlocks = 24,
  kAtKeyBytes = 28,
  kAtGeneration = 32,
  kAtPayloadBytes = 40,
  kAtSegmentBytes = 48,
  kAtMask = 56,
  kAtDigest = 88,
  kAtKey = 120,
  kAtZero = 184,
  kAtSums = 256,
  kAtCrc = 4092,
};
static_assert(kAtSums + 8 * KVX_TRAILER_SUMS <= kAtCrc && kAtCrc + 4 == KVX_TRAILER_BYTES, "page is full");

template <class T>
T load(const uint8_t *page, uint32_t at) {
  T value = 0;
  for (uint32_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(page[at + i]) << (8 * i);
  return value;
}
template <class T>
void store(uint8_t *page, uint32_t at, T value) {
  for (uint32_t i = 0; i < sizeof(T); ++i) page[at + i] = static_cast<uint8_t>(value >> (8 * i));
}

bool all_zero(const uint8_t *bytes, uint64_t n) {
  uint8_t any = 0;
  for (uint64_t i = 0; i < n; ++i) any |= bytes[i];
  return any == 0;
}

// What holds for the fields of every page, whoever made it.
bool consistent(const kvx_trailer &t) {
  if (t.key_bytes < 1 || t.key_bytes > KVX_MAX_KEY) return false;
  if (t.blocks_per_chunk < 1 || t.blocks_per_chunk > KVX_MAX_BLOCKS) return false;
  if (t.segment_count < 1 || t.segment_count > KVX_TRAILER_SUMS) return false;
  if (t.first_segment >= t.num_segments || t.segment_count > t.num_segments - t.first_segment) return false;
  if (t.segment_bytes < 1 || t.segment_bytes > kMaxSegmentBytes) return false;
  // All segments but the last are full and the last is not empty.
  uint64_t full;
  if (__builtin_mul_overflow(uint64_t{t.num_segments}, t.segment_bytes, &full)) return false;
  if (t.payload_bytes > full || t.payload_bytes <= full - t.segment_bytes) return false;
  for (uint32_t b = t.blocks_per_chunk; b < KVX_MAX_BLOCKS; ++b) {
    if (t.mask[b / 64] >> (b % 64) & 1) return false;
  }
  return true;
}

}  // namespace

int slot_check(const kvx_slot_layout &layout) {
  if (layout.alignment < 4096 || (layout.alignment & (layout.alignment - 1)) != 0) return -EINVAL;
  if (layout.blocks_per_chunk < 1 || layout.blocks_per_chunk > KVX_MAX_BLOCKS) return -EINVAL;
  if (layout.num_segments < 1) return -EINVAL;
  if (layout.segments_per_trailer != 1 && layout.segments_per_trailer != KVX_TRAILER_SUMS) return -EINVAL;
  if (layout.last_segment_bytes < 1 || layout.last_segment_bytes > layout.segment_bytes) return -EINVAL;
  if (layout.segment_bytes > kMaxSegmentBytes) return -EINVAL;
  if (layout.segment_stride != round_up(layout.segment_bytes, layout.alignment)) return -EINVAL;
  int64_t most;
  const uint64_t each = layout.segment_stride + layout.alignment;  // a segment and a trailer page
  return __builtin_mul_overflow(each, layout.num_segments, &most) ? -EINVAL : 0;
}

int trailer_verify(const void *page, uint64_t page_bytes, const kvx_slot_layout &layout, uint32_t trailer,
                   const Identity &identity, kvx_trailer *fields, uint64_t *sums) {
  if (kvx_trailer_parse(page, page_bytes, fields, sums) != KVX_OK) return KVX_BAD_TRAILER;
  if (fields->num_segments != layout.num_segments || fields->segment_bytes != layout.segment_bytes ||
      fields->payload_bytes != payload_bytes(layout) || fields->blocks_per_chunk != layout.blocks_per_chunk) {
    return KVX_BAD_TRAILER;
  }
  const bool same = fields->first_segment == trailer_first(layout, trailer) &&
                    fields->segment_count == trailer_count(layout, trailer) &&
                    fields->generation == identity.generation && fields->key_bytes == identity.key_bytes &&
                    std::memcmp(fields->key, identity.key, identity.key_bytes) == 0 &&
                    std::memcmp(fields->namespace_digest, identity.namespace_digest, 32) == 0;
  return same ? KVX_OK : KVX_FOREIGN;
}

void trailer_fill(const kvx_slot_layout &layout, uint32_t trailer, const Identity &identity,
                  const uint64_t *mask, kvx_trailer *fields) {
  *fields = {};
  std::memcpy(fields->namespace_digest, identity.namespace_digest, 32);
  fields->key_bytes = identity.key_bytes < KVX_MAX_KEY ? identity.key_bytes : KVX_MAX_KEY;
  std::memcpy(fields->key, identity.key, fields->key_bytes);
  fields->first_segment = trailer_first(layout, trailer);
  fields->segment_count = trailer_count(layout, trailer);
  fields->num_segments = layout.num_segments;
  fields->blocks_per_chunk = layout.blocks_per_chunk;
  fields->generation = identity.generation;
  fields->payload_bytes = payload_bytes(layout);
  fields->segment_bytes = layout.segment_bytes;
  std::memcpy(fields->mask, mask, sizeof(fields->mask));
}

void mask_of(const int64_t *block_ids, uint32_t blocks_per_chunk, uint64_t mask[4]) {
  std::memset(mask, 0, 4 * sizeof(uint64_t));
  for (uint32_t b = 0; b < blocks_per_chunk; ++b) {
    if (block_ids[b] != -1) mask[b / 64] |= uint64_t{1} << (b % 64);
  }
}

bool mask_covers(const uint64_t mask[4], const int64_t *block_ids, uint32_t blocks_per_chunk) {
  for (uint32_t b = 0; b < blocks_per_chunk; ++b) {
    if (block_ids[b] != -1 && !(mask[b / 64] >> (b % 64) & 1)) return false;
  }
  return true;
}

}  // namespace kvx

extern "C" {

uint64_t kvx_slot_payload_stride(const kvx_slot_layout *layout) { return kvx::payload_stride(*layout); }
uint32_t kvx_slot_trailers(const kvx_slot_layout *layout) { return kvx::num_trailers(*layout); }
uint64_t kvx_slot_bytes(const kvx_slot_layout *layout) { return kvx::slot_bytes(*layout); }

int kvx_trailer_seal(const kvx_trailer *fields, const uint64_t *sums, void *page, uint64_t page_bytes) {
  using namespace kvx;
  if (fields == nullptr || sums == nullptr || page == nullptr || page_bytes < KVX_TRAILER_BYTES)
    return -EINVAL;
  if (!consistent(*fields)) return -EINVAL;
  uint8_t *out = static_cast<uint8_t *>(page);
  std::memset(out, 0, page_bytes);
  std::memcpy(out + kAtMagic, kMagic, 8);
  store<uint32_t>(out, kAtVersion, kVersion);
  store<uint32_t>(out, kAtFirstSegment, fields->first_segment);
  store<uint32_t>(out, kAtSegmentCount, fields->segment_count);
  store<uint32_t>(out, kAtNumSegments, fields->num_segments);
  store<uint32_t>(out, kAtBlocks, fields->blocks_per_chunk);
  store<uint32_t>(out, kAtKeyBytes, fields->key_bytes);
  store<uint64_t>(out, kAtGeneration, fields->generation);
  store<uint64_t>(out, kAtPayloadBytes, fields->payload_bytes);
  store<uint64_t>(out, kAtSegmentBytes, fields->segment_bytes);
  for (uint32_t i = 0; i < 4; ++i) store<uint64_t>(out, kAtMask + 8 * i, fields->mask[i]);
  std::memcpy(out + kAtDigest, fields->namespace_digest, 32);
  std::memcpy(out + kAtKey, fields->key, fields->key_bytes);
  for (uint32_t i = 0; i < fields->segment_count; ++i) store<uint64_t>(out, kAtSums + 8 * i, sums[i]);
  store<uint32_t>(out, kAtCrc, crc32c(out, kAtCrc));
  return 0;
}

int kvx_trailer_parse(const void *page, uint64_t page_bytes, kvx_trailer *fields, uint64_t *sums) {
  using namespace kvx;
  if (page == nullptr || fields == nullptr || sums == nullptr || page_bytes < KVX_TRAILER_BYTES) {
    return KVX_BAD_TRAILER;
  }
  const uint8_t *in = static_cast<const uint8_t *>(page);
  if (std::memcmp(in + kAtMagic, kMagic, 8) != 0 || load<uint32_t>(in, kAtVersion) != kVersion) {
    return KVX_BAD_TRAILER;
  }
  if (load<uint32_t>(in, kAtCrc) != crc32c(in, kAtCrc)) return KVX_BAD_TRAILER;
  kvx_trailer t = {};
  t.first_segment = load<uint32_t>(in, kAtFirstSegment);
  t.segment_count = load<uint32_t>(in, kAtSegmentCount);
  t.num_segments = load<uint32_t>(in, kAtNumSegments);
  t.blocks_per_chunk = load<uint32_t>(in, kAtBlocks);
  t.key_bytes = load<uint32_t>(in, kAtKeyBytes);
  t.generation = load<uint64_t>(in, kAtGeneration);
  t.payload_bytes = load<uint64_t>(in, kAtPayloadBytes);
  t.segment_bytes = load<uint64_t>(in, kAtSegmentBytes);
  for (uint32_t i = 0; i < 4; ++i) t.mask[i] = load<uint64_t>(in, kAtMask + 8 * i);
  std::memcpy(t.namespace_digest, in + kAtDigest, 32);
  std::memcpy(t.key, in + kAtKey, KVX_MAX_KEY);
  if (!consistent(t)) return KVX_BAD_TRAILER;
  const uint32_t end_of_sums = kAtSums + 8 * t.segment_count;
  if (!all_zero(in + kAtKey + t.key_bytes, KVX_MAX_KEY - t.key_bytes) ||
      !all_zero(in + kAtZero, kAtSums - kAtZero) || !all_zero(in + end_of_sums, kAtCrc - end_of_sums)) {
    return KVX_BAD_TRAILER;
  }
  for (uint32_t i = 0; i < t.segment_count; ++i) sums[i] = load<uint64_t>(in, kAtSums + 8 * i);
  *fields = t;
  return KVX_OK;
}

}  // extern "C"
