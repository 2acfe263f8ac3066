// The two trips of a chunk: pages -> staging -> slot, and slot -> staging -> verified -> pages. Host rows
// that a transfer can use as they are (Job::straight) go without staging: row -> slot, and slot -> row ->
// verified.
#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>

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

// A piece that is under way.
struct Flight {
  const Piece *piece = nullptr;
  std::vector<Span> places;
  std::optional<Inside>
      inside;  // a read into the caller's memory: whatever becomes of it, the result comes after it
  Transfer transfer;
  int64_t answer = 0;
};

constexpr Outcome kGone{KVX_CUT};  // nobody waits for this chunk any more; settle() drops it

// Where the bytes of a chunk's segments and trailers are while they travel, and the pieces of it that are
// under way: as many as the backend takes, finished in the order in which they were begun.
class Travel {
 public:
  Travel(Core &core, Worker &worker, Job &job, uint32_t chunk)
      : core_(core),
        worker_(worker),
        job_(job),
        chunk_(chunk),
        plan_(job.plan(chunk)),
        straight_(job.straight(chunk)),
        depth_(worker.backend->depth()) {}
  // What is left has no use, but its memory must not be given up under it.
  ~Travel() {
    while (ended_ < begun_) {
      Flight &flight = flights_[ended_ % depth_];
      InCall call(worker_, spent_on(flight));
      worker_.backend->drop(flight.transfer);
      ++ended_;
      flight.inside.reset();
    }
  }
  Travel(const Travel &) = delete;
  Travel &operator=(const Travel &) = delete;

 protected:
  // False where there is no memory. Without staging there is still a place for the trailers.
  bool prepare() {
    const uint64_t from = straight_ ? plan_.items()[plan_.num_segments()].staging_offset : 0;
    const uint64_t bytes = plan_.staging_bytes() - from;
    const bool grows = bytes > worker_.staging.size();
    if (grows) set_staging(nullptr, 0);
    // The kernel may look for memory for as long as a drive takes that it swaps or writes back to.
    tidy(worker_, [&] { staging_ = worker_.staging.need(bytes); });
    if (grows && staging_) set_staging(staging_, worker_.staging.size());
    shift_ = from;
    return staging_ != nullptr;
  }

  bool full() const { return begun_ - ended_ == depth_; }
  bool under_way() const { return begun_ != ended_; }
  uint32_t most_under_way() const { return depth_; }

  // Begins a transfer of a piece's bytes. False where the gate is closed for a read that must be inside it.
  bool begin(const Piece &piece, bool write) {
    Flight &flight = flights_[begun_ % depth_];
    if (straight_ && !write && !flight.inside.emplace(core_, job_, chunk_)) {
      flight.inside.reset();
      return false;
    }
    flight.piece = &piece;
    find_places(piece, flight.places);
    flight.transfer = {job_.file(chunk_), write, flight.places.data(),
                       static_cast<uint32_t>(flight.places.size()), file_offset(piece.slot_offset)};
    InCall call(worker_, spent_on(flight));
    worker_.backend->begin(flight.transfer);
    ++begun_;
    return true;
  }

  // Lets the kernel have what was begun, and goes on.
  void go() {
    InCall call(worker_, core_.counters.write_ns);
    worker_.backend->go();
  }

  // Waits for the piece that was begun first of those under way. It is inside the gate until the next is
  // begun.
  const Flight &end() {
    Flight &flight = flights_[ended_ % depth_];
    {
      InCall call(worker_, spent_on(flight));
      flight.answer = worker_.backend->finish(flight.transfer);
      ++ended_;
    }
    (flight.transfer.write ? core_.counters.bytes_written : core_.counters.bytes_read) +=
        flight.transfer.moved;
    return flight;
  }

  uint8_t *at(const Item &item) const {
    if (straight_ && !item.trailer)
      return straight_bytes(job_.part(0), ordinal(item), job_.block_ids(chunk_)[0]);
    return staging_ + (item.staging_offset - shift_);
  }

  // Sums a piece's segments where they lie.
  void sum(const Piece &piece, std::vector<uint64_t> &sums) const {
    for (uint32_t i = piece.first_item; i < piece.first_item + piece.num_items && i < plan_.num_segments();
         ++i) {
      const Item &item = plan_.items()[i];
      sums[i] = checksum(at(item), plan_.segment_length(item.index), 0);
    }
  }

  uint64_t file_offset(uint64_t slot_offset) const { return job_.chunk(chunk_).slot_offset + slot_offset; }

  Core &core_;
  Worker &worker_;
  Job &job_;
  const uint32_t chunk_;
  const Plan &plan_;
  const bool straight_;
  uint8_t *staging_ = nullptr;
  uint64_t shift_ = 0;  // staging offset of the first byte in staging_

 private:
  // Straight jobs have one part, whose segments are all of the plan's.
  uint32_t ordinal(const Item &item) const { return static_cast<uint32_t>(&item - plan_.items().data()); }

  void set_staging(uint8_t *base, uint64_t bytes) {
    InCall call(worker_, job_.direction == KVX_STORE ? core_.counters.write_ns : core_.counters.read_ns);
    worker_.backend->set_staging(base, bytes);
  }

  std::atomic<uint64_t> &spent_on(const Flight &flight) const {
    return flight.transfer.write ? core_.counters.write_ns : core_.counters.read_ns;
  }

  // The memory of a piece: one place in staging; without, the row's, and the trailers'.
  void find_places(const Piece &piece, std::vector<Span> &places) const {
    places.clear();
    for (uint32_t i = piece.first_item; i < piece.first_item + piece.num_items; ++i) {
      const Item &item = plan_.items()[i];
      uint8_t *const data = at(item);
      if (!places.empty() && places.back().data + places.back().bytes == data)
        places.back().bytes += item.bytes;
      else
        places.push_back({data, item.bytes});
    }
  }

  const uint32_t depth_;
  std::array<Flight, KVX_MAX_DEPTH> flights_;
  uint32_t begun_ = 0, ended_ = 0;
};

// One chunk's way in: what was found and what the trailers promised.
class Load : Travel {
 public:
  Load(Core &core, Worker &worker, Job &job, uint32_t chunk) : Travel(core, worker, job, chunk) {
    found_.resize(plan_.num_segments());
    promised_.resize(plan_.num_segments());
  }

  Outcome run() {
    if (!prepare()) return {KVX_IO, ENOMEM};
    find_room();
    const std::vector<Piece> &pieces = plan_.pieces();
    for (uint32_t i = 0, ahead = 0; i < pieces.size(); ++i) {
      for (; ahead < pieces.size() && !full(); ++ahead) {
        aim(ahead);
        if (!begin(pieces[ahead], false)) return kGone;
      }
      aim(i);
      const Outcome outcome = take_piece(pieces[i]);
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
  // Rows are filled piece by piece, so that a few pieces may use the same cache-hot bytes in turn.
  void find_room() {
    if (straight_ || job_.live()) return;
    for (const Piece &piece : plan_.pieces()) turn_bytes_ = std::max(turn_bytes_, piece.bytes);
    turns_ = std::min<uint64_t>(most_under_way(), plan_.pieces().size());
    if (turns_ * turn_bytes_ > plan_.staging_bytes()) turns_ = 0;  // each has its own place, then
  }
  void aim(uint32_t piece) {
    if (turns_) shift_ = plan_.pieces()[piece].staging_offset - piece % turns_ * turn_bytes_;
  }

  Outcome take_piece(const Piece &piece) {
    const uint64_t offset = file_offset(piece.slot_offset);
    const Flight &flight = end();
    const int64_t answer = flight.answer;
    const uint64_t moved = flight.transfer.moved;
    if (core_.abandoned(job_, chunk_)) return kGone;
    if (answer < 0) return {KVX_IO, static_cast<int>(-answer), UINT32_MAX, offset, piece.bytes, moved};
    if (moved < piece.bytes) return {KVX_TRUNCATED, 0, UINT32_MAX, offset, piece.bytes, moved};
    if (straight_ || job_.live()) {
      sum(piece, found_);
    } else if (!piece.shares.empty()) {
      Inside inside(core_, job_, chunk_);
      if (!inside) return kGone;
      for (const Share &share : piece.shares) scatter(share, &found_[share.first_item]);
    }
    for (uint32_t i = 0; i < piece.num_items; ++i) {
      const Item &item = plan_.items()[piece.first_item + i];
      if (!item.trailer) continue;
      const uint8_t status = read_trailer(item, at(item));
      if (status != KVX_OK)
        return {status,
                0,
                item.index * plan_.layout().segments_per_trailer,
                file_offset(item.slot_offset),
                item.bytes,
                item.bytes};
    }
    return {};
  }

  void scatter(const Share &share, uint64_t *sums) {
    addresses_.resize(share.count);
    for (uint32_t i = 0; i < share.count; ++i) addresses_[i] = at(plan_.items()[share.first_item + i]);
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
      return {KVX_BAD_SUM, 0, item.index, file_offset(item.slot_offset), item.bytes, item.bytes};
    }
    return {};
  }

  uint64_t turns_ = 0, turn_bytes_ = 0;
  std::vector<uint64_t> found_, promised_;
  std::vector<uint8_t *> addresses_;
};

// One chunk's way out.
class Store : Travel {
 public:
  Store(Core &core, Worker &worker, Job &job, uint32_t chunk)
      : Travel(core, worker, job, chunk), sums_(plan_.num_segments()) {}

  Outcome run() {
    if (!prepare()) return {KVX_IO, ENOMEM};
    if (!straight_) {
      if (!gather() || !core_.begin_write(job_, chunk_)) return kGone;
      seal();
    }
    bool begun = !straight_;
    for (const Piece &piece : plan_.pieces()) {
      if (straight_ && !take_sums(piece)) return kGone;
      if (!begun && !core_.begin_write(job_, chunk_)) return kGone;
      begun = true;
      begin(piece, true);
      if (full()) {
        if (const Outcome outcome = write(); outcome.status != KVX_OK) return outcome;
      } else if (straight_) {
        go();  // while the next piece is summed
      }
    }
    while (under_way())
      if (const Outcome outcome = write(); outcome.status != KVX_OK) return outcome;
    return {};
  }

 private:
  bool gather() {
    Inside inside(core_, job_, chunk_);
    if (!inside) return false;
    std::vector<uint8_t *> to;
    for (const Share &share : plan_.shares()) {
      to.resize(share.count);
      for (uint32_t i = 0; i < share.count; ++i) to[i] = at(plan_.items()[share.first_item + i]);
      gather_segments(job_.part(share.part), share.first_ordinal, share.count, job_.block_ids(chunk_),
                      to.data(), &sums_[share.first_item], false);
    }
    return true;
  }

  // Trailers come after all segments, so that their sums are known.
  bool take_sums(const Piece &piece) {
    Inside inside(core_, job_, chunk_);
    if (!inside) return false;
    sum(piece, sums_);
    if (piece.first_item + piece.num_items > plan_.num_segments() && !sealed_) seal();
    return true;
  }

  void seal() {
    sealed_ = true;
    const kvx_slot_layout &layout = plan_.layout();
    uint32_t first = 0;
    for (uint32_t i = plan_.num_segments(); i < plan_.items().size(); ++i) {
      const Item &item = plan_.items()[i];
      kvx_trailer fields;
      trailer_fill(layout, item.index, identity_of(job_, chunk_), job_.mask(chunk_).data(), &fields);
      // A single writer owns all segments and several writers have a page each, so a page's sums are
      // consecutive here.
      kvx_trailer_seal(&fields, &sums_[first], at(item), layout.alignment);
      first += fields.segment_count;
    }
  }

  // Waits for the write that was begun first.
  Outcome write() {
    const Flight &flight = end();
    const Transfer &transfer = flight.transfer;
    const uint64_t wanted = flight.piece->bytes;
    if (core_.abandoned(job_, chunk_)) return kGone;
    if (flight.answer >= 0 && transfer.moved == wanted) return {};
    const int error = flight.answer < 0 ? static_cast<int>(-flight.answer) : EIO;
    return {KVX_IO, error, UINT32_MAX, transfer.offset, wanted, transfer.moved};
  }

  std::vector<uint64_t> sums_;
  bool sealed_ = false;
};

}  // namespace

Outcome run_load(Core &core, Worker &worker, Job &job, uint32_t chunk) {
  return Load(core, worker, job, chunk).run();
}

Outcome run_store(Core &core, Worker &worker, Job &job, uint32_t chunk) {
  if (!job.plan(chunk).num_segments()) return {};  // another rank was elected
  return Store(core, worker, job, chunk).run();
}

}  // namespace kvx
