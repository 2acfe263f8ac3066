// The copy loops, included by isa.h once for each instruction set. No include guard on purpose.
//
// Canonical bytes are walked in checksum rows of 4 KiB, so that a row is summed while it is at hand. What the
// measurements on a Zen 4 (two cores, 32 MiB of L3) decided; numbers are ratios to memcpy of as many bytes in
// memory:
//   - Fragments lie a page stride or a random block apart, which no hardware prefetcher follows. A row is
//   looked up kAhead
//     rows early, and the copy of a fragment fetches the one that takes its place then: into the second
//     cache 1.1, into the first one, which the rows of eight segments overflow, 0.8.
//   - Where KV heads share a page (NHD), their segments go in lockstep, or a page's lines would be fetched
//   once a head.
//   - A gather that streams sums even where nobody asked: the multiplications pace the stores, 1.15 against
//   0.9.
//   - A scatter that streams goes fragment by fragment over the segments of its group, so that a page is
//   written from
//     one end to the other: 1.15 against 0.75. Out of cache-hot staging it is twice as fast as one that
//     doesn't stream.

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

// With fragments of kLine bytes or more this many always suffice: one may begin before the row and one end
// behind it.
constexpr uint64_t kMaxSpans = kRowBytes / kLine + 1;

struct Row {
  uint64_t count = 0;
  Span spans[kMaxSpans];
};

// The spans of the next n bytes.
KVX_TARGET inline void decode(const Mapping &mapping, const int64_t *block_ids, Cursor &cursor, uint64_t n,
                              Row &row) {
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

// Copies n bytes and, with kSum, adds their words times k[0...]; a short last word is padded with zeros. With
// kFetch, as many bytes at `ahead` are fetched into the second cache; nothing happens where there are none.
template <bool kSum, bool kStream, bool kFetch>
KVX_TARGET __attribute__((always_inline)) inline void copy_span(uint8_t *to, const uint8_t *from, uint64_t n,
                                                                const uint32_t *k, Sum &sum,
                                                                const uint8_t *ahead) {
  uint64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    if (kFetch) __builtin_prefetch(ahead + i, 0, 2);
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

// The same with streaming stores to any multiple of 16. n is one too.
template <bool kSum>
KVX_TARGET __attribute__((always_inline)) inline void stream_span(uint8_t *to, const uint8_t *from,
                                                                  uint64_t n, const uint32_t *k, Sum &sum,
                                                                  const uint8_t *ahead) {
  if ((reinterpret_cast<uintptr_t>(to) | n) % kLine == 0)
    return copy_span<kSum, true, true>(to, from, n, k, sum, ahead);
  __builtin_prefetch(ahead, 0, 2);
  for (uint64_t i = 0, step; i < n; i += step) {
    const bool whole = i + kVec <= n && reinterpret_cast<uintptr_t>(to + i) % kVec == 0;
    const Vec v = whole ? load(from + i) : load16(from + i);
    if (whole) {
      stream(to + i, v);
    } else {
      stream16(to + i, v);
    }
    if (kSum) mac(sum, v, k + i / 4);
    step = whole ? kVec : 16;
    if ((i + step) % kLine == 0) __builtin_prefetch(ahead + i + step, 0, 2);
  }
}

// The sum of n bytes of an absent block.
KVX_TARGET inline void sum_span(const uint8_t *from, uint64_t n, const uint32_t *k, Sum &sum) {
  uint64_t i = 0;
  for (; i + kVec <= n; i += kVec) mac(sum, load(from + i), k + i / 4);
  if (i < n) mac(sum, load_part(from + i, n - i), k + i / 4);
}

template <bool kStream>
KVX_TARGET inline void zero_span(uint8_t *to, uint64_t n) {
  if (!kStream) {
    std::memset(to, 0, n);
    return;
  }
  for (uint64_t i = 0; i < n; i += kVec) stream(to + i, zero());
}

// One row: canonical bytes at `canonical`, pages at the row's spans. `next` is what is fetched meanwhile.
// Returns the row's sum with kSum.
template <bool kGather, bool kSum, bool kStream>
KVX_TARGET inline uint64_t move_row(uint8_t *canonical, const Row &row, const Row &next) {
  Sum sum = {};
  const uint32_t *k = column_coefficients();
  for (uint64_t s = 0; s < row.count; ++s) {
    const Span &span = row.spans[s];
    if (span.at != nullptr) {
      const uint8_t *ahead = s < next.count ? next.spans[s].at : nullptr;
      if (ahead == nullptr) ahead = span.at;
      uint8_t *const to = kGather ? canonical : span.at;
      copy_span<kSum, kStream, true>(to, kGather ? span.at : canonical, span.bytes, k, sum, ahead);
    } else if (kGather) {
      zero_span<kStream>(canonical, span.bytes);
    } else if (kSum) {
      sum_span(canonical, span.bytes, k, sum);
    }
    canonical += span.bytes;
    k += span.bytes / 4;
  }
  return kSum ? total(sum) : 0;
}

// Part of a row of small fragments, without a sum.
template <bool kGather>
KVX_TARGET inline void move_small(const Mapping &mapping, const int64_t *block_ids, Cursor &cursor,
                                  uint8_t *canonical, uint64_t n) {
  Sum none = {};
  while (n > 0) {
    if (cursor.left == 0) next_fragment(mapping, block_ids, cursor);
    uint64_t take = std::min(n, cursor.left);
    if (cursor.at == nullptr) {
      if (kGather) std::memset(canonical, 0, take);
    } else {
      uint8_t *const to = kGather ? canonical : cursor.at;
      const uint8_t *const from = kGather ? cursor.at : canonical;
      copy_span<false, false, false>(to, from, take, nullptr, none, nullptr);
      cursor.at += take;
    }
    cursor.left -= take;
    canonical += take;
    n -= take;
    // Most fragments: the whole ones of this piece.
    const uint64_t size = cursor.run->fragment_size, stride = cursor.run->local_stride;
    if (cursor.left > 0 || cursor.next == nullptr || size >= kVec) continue;
    const uint64_t whole = std::min(cursor.fragments, n / size);
    uint8_t *at = cursor.next;
    for (uint64_t f = 0; f < whole; ++f, at += stride, canonical += size) {
      copy_part(kGather ? canonical : at, kGather ? at : canonical, size);
    }
    cursor.next = at;
    cursor.fragments -= whole;
    n -= whole * size;
  }
}

// n bytes of a row lie at `row` in cache: their sum, and with kStream their way on to `place`.
template <bool kSum, bool kStream>
KVX_TARGET inline uint64_t finish_row(uint8_t *place, const uint8_t *row, uint64_t n) {
  const uint32_t *const k = column_coefficients();
  if (!kStream) return kSum ? sum_bytes(row, n, k) : 0;
  Sum sum = {};
  copy_span<kSum, true, false>(place, row, n, k, sum, nullptr);
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
    const uint64_t n = row_bytes(segment.bytes, r);
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

// One row of a segment: straight to its place, or by way of `staged` (a gather that streams) or of the place
// itself.
template <bool kGather, bool kSum, bool kStream>
KVX_TARGET inline uint64_t run_row(Route route, uint8_t *place, uint64_t n, uint8_t *staged, const Row &row,
                                   const Row &next) {
  if (route == Route::kDirect) return move_row<kGather, kSum, kStream>(place, row, next);
  if (kGather) {
    uint8_t *const to = kStream ? staged : place;
    move_row<true, false, false>(to, row, next);
    return finish_row<kSum, kStream>(place, to, n);
  }
  const uint64_t sum = finish_row<kSum, false>(nullptr, place, n);
  move_row<false, false, false>(place, row, next);
  return sum;
}

constexpr uint64_t kAhead = 2;

// Segments in lockstep: row r of each, then row r + 1 of each.
template <bool kGather, bool kSum, bool kStream>
KVX_TARGET void run_rows(const Mapping &mapping, const OwnedSegment *segments, uint32_t count,
                         const int64_t *block_ids, uint8_t *const *canonical, uint64_t *sums, Route route) {
  alignas(64) uint8_t staged[kRowBytes];
  Cursor cursors[kMaxGroup];
  Row rows[kMaxGroup][kAhead + 1];  // row r at r modulo their number
  uint64_t longest = 0;
  for (uint32_t s = 0; s < count; ++s) {
    cursors[s] = begin(mapping, segments[s]);
    if (kSum) sums[s] = 0;
    longest = std::max(longest, segments[s].bytes);
    for (uint64_t r = 0; r < kAhead; ++r) {
      decode(mapping, block_ids, cursors[s], row_bytes(segments[s].bytes, r), rows[s][r]);
    }
  }
  for (uint64_t r = 0; r * kRowBytes < longest; ++r) {
    const uint64_t coefficient = kSum ? row_coefficient(r) : 0;
    const uint64_t now = r % (kAhead + 1), then = (r + kAhead) % (kAhead + 1);
    for (uint32_t s = 0; s < count; ++s) {
      const uint64_t n = row_bytes(segments[s].bytes, r);
      if (n == 0) continue;
      decode(mapping, block_ids, cursors[s], row_bytes(segments[s].bytes, r + kAhead), rows[s][then]);
      const uint64_t sum = run_row<kGather, kSum, kStream>(route, canonical[s] + r * kRowBytes, n, staged,
                                                           rows[s][now], rows[s][then]);
      if (kSum) sums[s] += sum * coefficient;
    }
  }
}

// A scatter that streams: row r of all segments, fragment j of each of them before fragment j + 1. Fragments
// are multiples of 16 bytes.
template <bool kSum>
KVX_TARGET void run_fragments(const Mapping &mapping, const OwnedSegment *segments, uint32_t count,
                              const int64_t *block_ids, const uint8_t *const *canonical, uint64_t *sums) {
  constexpr uint64_t kReadAhead = 1024;  // in each segment; a fetch beyond its end does nothing
  Cursor cursors[kMaxGroup];
  Row rows[kMaxGroup];
  const uint8_t *from[kMaxGroup];
  uint64_t longest = 0;
  for (uint32_t s = 0; s < count; ++s) {
    cursors[s] = begin(mapping, segments[s]);
    from[s] = canonical[s];
    if (kSum) sums[s] = 0;
    longest = std::max(longest, segments[s].bytes);
  }
  for (uint64_t r = 0; r * kRowBytes < longest; ++r) {
    Sum row_sums[kMaxGroup];
    const uint32_t *k[kMaxGroup];
    uint64_t most = 0;
    for (uint32_t s = 0; s < count; ++s) {
      decode(mapping, block_ids, cursors[s], row_bytes(segments[s].bytes, r), rows[s]);
      most = std::max(most, rows[s].count);
      row_sums[s] = Sum{};
      k[s] = column_coefficients();
    }
    for (uint64_t j = 0; j < most; ++j) {
      for (uint32_t s = 0; s < count; ++s) {
        if (j >= rows[s].count) continue;
        const Span span = rows[s].spans[j];
        Sum sum = row_sums[s];
        if (span.at != nullptr) {
          stream_span<kSum>(span.at, from[s], span.bytes, k[s], sum, from[s] + kReadAhead);
        } else if (kSum) {
          sum_span(from[s], span.bytes, k[s], sum);
        }
        row_sums[s] = sum;
        from[s] += span.bytes;
        k[s] += span.bytes / 4;
      }
    }
    if (!kSum) continue;
    const uint64_t coefficient = row_coefficient(r);
    for (uint32_t s = 0; s < count; ++s) sums[s] += total(row_sums[s]) * coefficient;
  }
}

template <bool kGather, bool kSum, bool kStream>
KVX_TARGET void run_group(const Mapping &mapping, const OwnedSegment *segments, uint32_t count,
                          const int64_t *block_ids, uint8_t *const *canonical, uint64_t *sums, Route route) {
  if (route == Route::kSmall) {
    for (uint32_t s = 0; s < count; ++s) {
      run_small<kGather, kSum, kStream>(mapping, segments[s], block_ids, canonical[s],
                                        kSum ? &sums[s] : nullptr);
    }
  } else if constexpr (kStream && !kGather) {
    run_fragments<kSum>(mapping, segments, count, block_ids, canonical, sums);
  } else {
    run_rows<kGather, kSum, kStream>(mapping, segments, count, block_ids, canonical, sums, route);
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
