// The copy loops, included by isa.h once for each instruction set. No include guard on purpose.
//
// Canonical bytes are walked in checksum rows of 4 KiB. A row's fragments are looked up one row ahead, so that the
// copy of one fragment can fetch the fragment that takes its place in the next row: fragments lie a page stride or a
// random block apart, which no hardware prefetcher follows.

namespace kvx {
namespace {
namespace KVX_ISA {

// Walks the fragments of a segment in canonical order.
struct Cursor {
  const PlanPiece *piece;  // the next one
  const PlanRun *run;      // of the piece before it
  uint64_t fragments;      // of that piece, not begun yet
  uint8_t *next;           // where they are; null in an absent block
  uint8_t *at;             // the next byte of the fragment under way, or null likewise
  uint64_t left;           // its bytes from there
};

KVX_TARGET inline Cursor begin(const Mapping &mapping, const OwnedSegment &segment) {
  return {mapping.pieces.data() + segment.first_piece, nullptr, 0, nullptr, nullptr, 0};
}

KVX_TARGET inline void next_fragment(const Mapping &mapping, const int64_t *block_ids, Cursor &cursor) {
  if (cursor.fragments == 0) {
    const int64_t id = block_ids[cursor.piece->block];
    cursor.run = &mapping.runs[cursor.piece->run];
    cursor.fragments = cursor.run->num_fragments;
    const uint64_t block = cursor.run->base + static_cast<uint64_t>(id) * cursor.run->block_stride;
    cursor.next = id < 0 ? nullptr : reinterpret_cast<uint8_t *>(block);
    ++cursor.piece;
  }
  --cursor.fragments;
  cursor.at = cursor.next;
  cursor.left = cursor.run->fragment_size;
  if (cursor.next != nullptr) cursor.next += cursor.run->local_stride;
}

// A piece of a fragment within one row.
struct Span {
  uint8_t *at;  // null in an absent block
  uint64_t bytes;
};

// With fragments of kMinSpan bytes or more a row has at most kMaxSpans spans: one may begin before it, one end behind.
constexpr uint64_t kMinSpan = 64;
constexpr uint64_t kMaxSpans = kRowBytes / kMinSpan + 1;

struct Row {
  uint64_t count = 0;
  Span spans[kMaxSpans];
};

KVX_TARGET inline void decode(const Mapping &mapping, const int64_t *block_ids, Cursor &cursor, uint64_t n, Row &row) {
  uint64_t count = 0;
  while (n > 0) {
    if (cursor.left == 0) next_fragment(mapping, block_ids, cursor);
    const uint64_t take = n < cursor.left ? n : cursor.left;
    row.spans[count++] = {cursor.at, take};
    cursor.left -= take;
    if (cursor.at != nullptr) cursor.at += take;
    n -= take;
  }
  row.count = count;
}

// Copies n bytes and, with kSum, adds their words times k[0...]; words of a short tail are padded with zeros. `ahead`
// is what the next call will read (or write, with kWrite): as much of it is fetched as is copied here.
template <bool kSum, bool kStream, bool kWrite>
KVX_TARGET __attribute__((always_inline)) inline void copy_span(uint8_t *to, const uint8_t *from, uint64_t n,
                                                                const uint32_t *k, Sum &sum, const uint8_t *ahead) {
  uint64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    if (!(kWrite && kStream)) __builtin_prefetch(ahead + i, kWrite ? 1 : 0, 3);
    for (uint64_t j = i; j < i + 64; j += kVec) {
      const Vec v = load(from + j);
      if (kStream) {
        stream(to + j, v);
      } else {
        store(to + j, v);
      }
      if (kSum) mac(sum, v, k + j / 4);
    }
  }
  for (; i + kVec <= n; i += kVec) {
    const Vec v = load(from + i);
    store(to + i, v);
    if (kSum) mac(sum, v, k + i / 4);
  }
  if (i < n) {
    copy_part(to + i, from + i, n - i);
    if (kSum) mac(sum, load_part(from + i, n - i), k + i / 4);
  }
}

template <bool kStream>
KVX_TARGET inline void zero_span(uint8_t *to, uint64_t n) {
  if (!kStream) {
    std::memset(to, 0, n);
    return;
  }
  for (uint64_t i = 0; i < n; i += kVec) stream(to + i, zero());
}

// One row: canonical bytes at `canonical`, pages at the row's spans. Returns the row's sum with kSum.
template <bool kGather, bool kSum, bool kStream>
KVX_TARGET inline uint64_t move_row(uint8_t *canonical, const Row &row, const Row &next) {
  Sum sum = {};
  const uint32_t *const k = column_coefficients();
  uint64_t offset = 0;
  for (uint64_t s = 0; s < row.count; ++s) {
    const Span &span = row.spans[s];
    uint8_t *const at = canonical + offset;
    if (span.at != nullptr) {
      const uint8_t *ahead = s < next.count ? next.spans[s].at : nullptr;
      if (ahead == nullptr) ahead = span.at;
      if (kGather) {
        copy_span<kSum, kStream, false>(at, span.at, span.bytes, k + offset / 4, sum, ahead);
      } else {
        copy_span<kSum, kStream, true>(span.at, at, span.bytes, k + offset / 4, sum, ahead);
      }
    } else if (kGather) {
      zero_span<kStream>(at, span.bytes);
    } else if (kSum) {
      for (uint64_t i = 0; i < span.bytes; i += kVec) {
        const uint64_t rest = span.bytes - i;
        mac(sum, rest < kVec ? load_part(at + i, rest) : load(at + i), k + (offset + i) / 4);
      }
    }
    offset += span.bytes;
  }
  return kSum ? total(sum) : 0;
}

// One row of small or odd fragments, without a sum.
template <bool kGather>
KVX_TARGET inline void move_small(const Mapping &mapping, const int64_t *block_ids, Cursor &cursor, uint8_t *canonical,
                                  uint64_t n) {
  Sum none = {};
  while (n > 0) {
    if (cursor.left == 0) next_fragment(mapping, block_ids, cursor);
    const uint64_t take = n < cursor.left ? n : cursor.left;
    if (cursor.at == nullptr) {
      if (kGather) std::memset(canonical, 0, take);
    } else {
      uint8_t *const to = kGather ? canonical : cursor.at;
      const uint8_t *const from = kGather ? cursor.at : canonical;
      copy_span<false, false, !kGather>(to, from, take, nullptr, none, from);
      cursor.at += take;
    }
    cursor.left -= take;
    canonical += take;
    n -= take;
  }
}

// A whole row lies at `row` in cache: its sum, and with kStream its way on to `place`.
template <bool kSum, bool kStream>
KVX_TARGET inline uint64_t finish_row(uint8_t *place, const uint8_t *row, uint64_t n) {
  const uint32_t *const k = column_coefficients();
  if (!kStream) return kSum ? sum_bytes(row, n, k) : 0;
  Sum sum = {};
  copy_span<kSum, true, true>(place, row, n, k, sum, nullptr);
  return kSum ? total(sum) : 0;
}

// A segment of fragments so small that looking ahead does not pay.
template <bool kGather, bool kSum, bool kStream>
KVX_TARGET void run_small(const Mapping &mapping, const OwnedSegment &segment, const int64_t *block_ids,
                          uint8_t *canonical, uint64_t *result) {
  alignas(64) uint8_t staged[kRowBytes];
  Cursor cursor = begin(mapping, segment);
  uint64_t sum = 0;
  for (uint64_t r = 0; r * kRowBytes < segment.bytes; ++r) {
    const uint64_t rest = segment.bytes - r * kRowBytes, n = rest < kRowBytes ? rest : kRowBytes;
    uint8_t *const place = canonical + r * kRowBytes;
    uint64_t words;
    if (kGather) {
      uint8_t *const row = kStream ? staged : place;
      move_small<true>(mapping, block_ids, cursor, row, n);
      words = finish_row<kSum, kStream>(place, row, n);
    } else {
      words = finish_row<kSum, false>(nullptr, place, n);
      move_small<false>(mapping, block_ids, cursor, place, n);
    }
    if (kSum) sum += words * row_coefficient(r);
  }
  if (kSum) *result = sum;
}

// One row of a segment: straight to its place, or by way of `staged`, which is faster than a place that a fragment's end
// would touch off a word (for the sum) or a cache line (for streaming).
template <bool kGather, bool kSum, bool kStream>
KVX_TARGET inline uint64_t run_row(uint8_t *place, uint64_t n, uint8_t *staged, const Row &row, const Row &next) {
  if (staged == nullptr) return move_row<kGather, kSum, kStream>(place, row, next);
  if (kGather) {
    uint8_t *const to = kStream ? staged : place;
    move_row<true, false, false>(to, row, next);
    return finish_row<kSum, kStream>(place, to, n);
  }
  const uint64_t sum = finish_row<kSum, false>(nullptr, place, n);
  move_row<false, false, false>(place, row, next);
  return sum;
}

// Segments in lockstep: row r of each, then row r + 1 of each.
template <bool kGather, bool kSum, bool kStream>
KVX_TARGET void run_rows(const Mapping &mapping, const OwnedSegment *segments, uint32_t count,
                         const int64_t *block_ids, uint8_t *const *canonical, uint64_t *sums, bool direct) {
  alignas(64) uint8_t staged[kRowBytes];
  Cursor cursors[kMaxGroup];
  Row rows[kMaxGroup][2];
  uint64_t longest = 0;
  for (uint32_t s = 0; s < count; ++s) {
    cursors[s] = begin(mapping, segments[s]);
    if (kSum) sums[s] = 0;
    if (segments[s].bytes > longest) longest = segments[s].bytes;
    decode(mapping, block_ids, cursors[s], row_bytes(segments[s].bytes, 0), rows[s][0]);
  }
  for (uint64_t r = 0; r * kRowBytes < longest; ++r) {
    const uint64_t coefficient = kSum ? row_coefficient(r) : 0;
    for (uint32_t s = 0; s < count; ++s) {
      const uint64_t n = row_bytes(segments[s].bytes, r);
      if (n == 0) continue;
      Row &next = rows[s][(r + 1) % 2];
      decode(mapping, block_ids, cursors[s], row_bytes(segments[s].bytes, r + 1), next);
      const uint64_t sum = run_row<kGather, kSum, kStream>(canonical[s] + r * kRowBytes, n, direct ? nullptr : staged,
                                                           rows[s][r % 2], next);
      if (kSum) sums[s] += sum * coefficient;
    }
  }
}

template <bool kGather, bool kSum, bool kStream>
KVX_TARGET void run_group(const Mapping &mapping, const OwnedSegment *segments, uint32_t count,
                          const int64_t *block_ids, uint8_t *const *canonical, uint64_t *sums, Route route) {
  if (route != Route::kSmall) {
    run_rows<kGather, kSum, kStream>(mapping, segments, count, block_ids, canonical, sums, route == Route::kDirect);
  } else {
    for (uint32_t s = 0; s < count; ++s) {
      run_small<kGather, kSum, kStream>(mapping, segments[s], block_ids, canonical[s], kSum ? &sums[s] : nullptr);
    }
  }
  if (kStream) fence();
}

// Bit 0: gather, bit 1: sum, bit 2: stream.
using RunGroup = void (*)(const Mapping &, const OwnedSegment *, uint32_t, const int64_t *, uint8_t *const *,
                          uint64_t *, Route);
constexpr RunGroup kRunGroup[] = {run_group<false, false, false>, run_group<true, false, false>,
                                  run_group<false, true, false>,  run_group<true, true, false>,
                                  run_group<false, false, true>,  run_group<true, false, true>,
                                  run_group<false, true, true>,   run_group<true, true, true>};

}  // namespace KVX_ISA
}  // namespace
}  // namespace kvx
