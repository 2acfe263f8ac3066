// Trailer pages (docs/format.md, "Trailer page"). Sealing and parsing are kvx_trailer_seal() and _parse().
#ifndef KVX_TRAILER_H
#define KVX_TRAILER_H

#include <cstdint>

#include "kvx.h"

namespace kvx {

// Who a chunk must be.
struct Identity {
  const uint8_t *namespace_digest;  // [32]
  const uint8_t *key;
  uint32_t key_bytes;
  uint64_t generation;
};

// Parses trailer page number `trailer` of a slot and compares it with what it must be: KVX_OK;
// KVX_BAD_TRAILER (magic, version, CRC, bounds, or another geometry than `layout`); KVX_FOREIGN (namespace,
// key, generation or segment numbers). `fields` and `sums` (room for KVX_TRAILER_SUMS) are only meaningful
// with KVX_OK.
int trailer_verify(const void *page, uint64_t page_bytes, const kvx_slot_layout &layout, uint32_t trailer,
                   const Identity &identity, kvx_trailer *fields, uint64_t *sums);

// The fields of trailer page number `trailer` of a slot. `mask`: [4], bit b is block b.
void trailer_fill(const kvx_slot_layout &layout, uint32_t trailer, const Identity &identity,
                  const uint64_t *mask, kvx_trailer *fields);

// Bit b of mask[b / 64] is set where block_ids[b] is not -1.
void mask_of(const int64_t *block_ids, uint32_t blocks_per_chunk, uint64_t mask[4]);
// True where every block of block_ids that is not -1 is in the mask.
bool mask_covers(const uint64_t mask[4], const int64_t *block_ids, uint32_t blocks_per_chunk);

}  // namespace kvx

#endif
