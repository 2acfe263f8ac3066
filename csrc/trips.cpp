// The two trips of a chunk: pages -> staging -> slot, and slot -> staging -> verified -> pages.
#include <cerrno>

#include "checksum.h"
#include "engine.h"
#include "trailer.h"

namespace kvx {

namespace {

// A stay inside the gate: while it is true, the caller's memory may be touched.
class Inside {
 public:
  Inside(Core &core, Job &job, uint32_t chunk) : core_(core), job_(job), open_(core.enter_gate(job, chunk)) {}
  ~Inside() {
    if (open_) core_.leave_gate(job_);
  }
  Inside(const Inside &) = delete;
  Inside &operator=(const Inside &) = delete;
  explicit operator bool() const { return open_; }

 private:
  Core &core_;
  Job &job_;
  const bool open_;
};

// Marks the thread as being in a call, for the monitor, and adds up the time spent there.
class InCall {
 public:
  InCall(Worker &worker, std::atomic<uint64_t> &spent) : worker_(worker), spent_(spent), started_(now_ns()) {
    worker_.call_started.store(started_, std::memory_order_release);
  }
  ~InCall() {
    worker_.call_started.store(0, std::memory_order_release);
    spent_ += now_ns() - started_;
  }
  InCall(const InCall &) = delete;
  InCall &operator=(const InCall &) = delete;

 private:
  Worker &worker_;
  std::atomic<uint64_t> &spent_;
  const uint64_t started_;
};

Identity identity_of(const Job &job, uint32_t chunk) {
  const kvx_chunk &c = job.chunk(chunk);
  return {job.digest(), c.key, c.key_bytes, c.generation};
}

constexpr Outcome kGone{KVX_CUT};  // nobody waits for this chunk any more; settle() drops it

// One chunk's way in: what was found and what the trailers promised.
class Load {
 public:
  Load(Core &core, Worker &worker, Job &job, uint32_t chunk)
      : core_(core), worker_(worker), job_(job), chunk_(chunk), plan_(job.plan(chunk)) {
    found_.resize(plan_.num_segments());
    promised_.resize(plan_.num_segments());
  }

  Outcome run() {
    staging_ = worker_.staging.need(plan_.staging_bytes());
    if (!staging_) return {KVX_IO, ENOMEM};
    for (const Piece &piece : plan_.pieces()) {
      // Rows are filled piece by piece, so each piece may use the same cache-hot bytes.
      shift_ = job_.live() ? 0 : piece.staging_offset;
      const Outcome outcome = take_piece(piece);
      if (outcome.status != KVX_OK) return outcome;
    }
    const Outcome outcome = compare();
    if (outcome.status != KVX_OK || !job_.live()) return outcome;
    Inside inside(core_, job_, chunk_);
    if (!inside) return kGone;
    for (const Share &share : plan_.shares()) scatter(share, nullptr);
    // Within the same stay inside the gate as the copy, so that a result never misses bytes that were
    // written.
    std::lock_guard<std::mutex> lock(core_.mutex);
    core_.record(job_, chunk_, outcome);
    return outcome;
  }

 private:
  uint8_t *at(uint64_t staging_offset) const { return staging_ + (staging_offset - shift_); }

  Outcome take_piece(const Piece &piece) {
    const uint64_t offset = job_.chunk(chunk_).slot_offset + piece.slot_offset;
    uint64_t moved = 0;
    int64_t answer;
    {
      InCall call(worker_, core_.counters.read_ns);
      answer = core_.backend().read(job_.file(chunk_), at(piece.staging_offset), piece.bytes, offset, &moved);
    }
    core_.counters.bytes_read += moved;
    if (core_.abandoned(job_, chunk_)) return kGone;
    if (answer < 0) return {KVX_IO, static_cast<int>(-answer), UINT32_MAX, offset, piece.bytes, moved};
    if (moved < piece.bytes) return {KVX_TRUNCATED, 0, UINT32_MAX, offset, piece.bytes, moved};
    if (job_.live()) {
      sum(piece);
    } else if (!piece.shares.empty()) {
      Inside inside(core_, job_, chunk_);
      if (!inside) return kGone;
      for (const Share &share : piece.shares) scatter(share, &found_[share.first_item]);
    }
    for (uint32_t i = 0; i < piece.num_items; ++i) {
      const Item &item = plan_.items()[piece.first_item + i];
      if (!item.trailer) continue;
      const uint8_t status = read_trailer(item, at(item.staging_offset));
      if (status != KVX_OK)
        return {status,
                0,
                item.index * plan_.layout().segments_per_trailer,
                job_.chunk(chunk_).slot_offset + item.slot_offset,
                item.bytes,
                item.bytes};
    }
    return {};
  }

  void sum(const Piece &piece) {
    for (uint32_t i = piece.first_item; i < piece.first_item + piece.num_items && i < plan_.num_segments();
         ++i) {
      const Item &item = plan_.items()[i];
      found_[i] = checksum(at(item.staging_offset), plan_.segment_length(item.index), 0);
    }
  }

  void scatter(const Share &share, uint64_t *sums) {
    addresses_.resize(share.count);
    for (uint32_t i = 0; i < share.count; ++i)
      addresses_[i] = at(plan_.items()[share.first_item + i].staging_offset);
    scatter_segments(job_.part(share.part), share.first_ordinal, share.count, job_.block_ids(chunk_),
                     addresses_.data(), sums, true);
  }

  uint8_t read_trailer(const Item &item, const uint8_t *page) {
    const kvx_slot_layout &layout = plan_.layout();
    kvx_trailer fields;
    uint64_t sums[KVX_TRAILER_SUMS];
    const int status =
        trailer_verify(page, layout.alignment, layout, item.index, identity_of(job_, chunk_), &fields, sums);
    if (status != KVX_OK) return static_cast<uint8_t>(status);
    if (!mask_covers(fields.mask, job_.block_ids(chunk_), layout.blocks_per_chunk)) return KVX_ABSENT;
    for (uint32_t i = 0; i < plan_.num_segments(); ++i) {
      const uint32_t segment = plan_.items()[i].index;
      if (segment - fields.first_segment < fields.segment_count)
        promised_[i] = sums[segment - fields.first_segment];
    }
    return KVX_OK;
  }

  Outcome compare() {
    core_.counters.segments_verified += plan_.num_segments();
    for (uint32_t i = 0; i < plan_.num_segments(); ++i) {
      if (found_[i] == promised_[i]) continue;
      const Item &item = plan_.items()[i];
      return {KVX_BAD_SUM, 0,         item.index, job_.chunk(chunk_).slot_offset + item.slot_offset,
              item.bytes,  item.bytes};
    }
    return {};
  }

  Core &core_;
  Worker &worker_;
  Job &job_;
  const uint32_t chunk_;
  const Plan &plan_;
  uint8_t *staging_ = nullptr;
  uint64_t shift_ = 0;  // staging offset of the first byte in staging_
  std::vector<uint64_t> found_, promised_;
  std::vector<uint8_t *> addresses_;
};

void seal(const Job &job, uint32_t chunk, const Plan &plan, const std::vector<uint64_t> &sums,
          uint8_t *staging) {
  const kvx_slot_layout &layout = plan.layout();
  uint32_t first = 0;
  for (uint32_t i = plan.num_segments(); i < plan.items().size(); ++i) {
    const Item &item = plan.items()[i];
    kvx_trailer fields;
    trailer_fill(layout, item.index, identity_of(job, chunk), job.mask(chunk).data(), &fields);
    // A single writer owns all segments and several writers have a page each, so a page's sums are
    // consecutive here.
    kvx_trailer_seal(&fields, &sums[first], staging + item.staging_offset, layout.alignment);
    first += fields.segment_count;
  }
}

}  // namespace

Outcome run_load(Core &core, Worker &worker, Job &job, uint32_t chunk) {
  return Load(core, worker, job, chunk).run();
}

Outcome run_store(Core &core, Worker &worker, Job &job, uint32_t chunk) {
  const Plan &plan = job.plan(chunk);
  if (!plan.num_segments()) return {};  // another rank was elected
  uint8_t *staging = worker.staging.need(plan.staging_bytes());
  if (!staging) return {KVX_IO, ENOMEM};
  std::vector<uint64_t> sums(plan.num_segments());
  {
    Inside inside(core, job, chunk);
    if (!inside) return kGone;
    std::vector<uint8_t *> to;
    for (const Share &share : plan.shares()) {
      to.resize(share.count);
      for (uint32_t i = 0; i < share.count; ++i)
        to[i] = staging + plan.items()[share.first_item + i].staging_offset;
      gather_segments(job.part(share.part), share.first_ordinal, share.count, job.block_ids(chunk), to.data(),
                      &sums[share.first_item], false);
    }
  }
  if (!core.begin_write(job, chunk)) return kGone;
  seal(job, chunk, plan, sums, staging);
  for (const Piece &extent : plan.pieces()) {
    const uint64_t offset = job.chunk(chunk).slot_offset + extent.slot_offset;
    uint64_t moved = 0;
    int64_t answer;
    {
      InCall call(worker, core.counters.write_ns);
      answer = core.backend().write(job.file(chunk), staging + extent.staging_offset, extent.bytes, offset,
                                    &moved);
    }
    core.counters.bytes_written += moved;
    if (core.abandoned(job, chunk)) return kGone;
    if (answer < 0 || moved < extent.bytes)
      return {KVX_IO, answer < 0 ? static_cast<int>(-answer) : EIO, UINT32_MAX, offset, extent.bytes, moved};
  }
  return {};
}

}  // namespace kvx
