// A submitted load or store: what it moves, how far it is, and the gate that its deadline closes.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "files.h"
#include "kvx.h"
#include "mapping.h"
#include "plan.h"

namespace kvx {

uint64_t now_ns();  // CLOCK_MONOTONIC

// What became of a chunk, with the numbers that an error message needs.
struct Outcome {
  uint8_t status = KVX_OK;
  int error = 0;
  uint32_t segment = UINT32_MAX;
  uint64_t offset = 0, wanted = 0, moved = 0;
};

// The immutable half is set by the constructor; the rest is guarded by the engine's mutex.
class Job : public std::enable_shared_from_this<Job> {
 public:
  // Copies everything. Throws std::bad_alloc; returns nullptr and *error where the job cannot be run.
  static std::shared_ptr<Job> make(const kvx_job &job, const kvx_engine_config &config, int *error);
  ~Job();
  Job(const Job &) = delete;
  Job &operator=(const Job &) = delete;

  const uint64_t id;
  const int direction;
  const uint64_t deadline_ns, submitted_ns;
  uint32_t num_chunks() const { return static_cast<uint32_t>(chunks_.size()); }
  const kvx_chunk &chunk(uint32_t c) const { return chunks_[c]; }
  kvx_file *file(uint32_t c) const { return chunks_[c].file; }
  const int64_t *block_ids(uint32_t c) const { return &block_ids_[uint64_t{c} * blocks_per_chunk_]; }
  const std::array<uint64_t, 4> &mask(uint32_t c) const { return masks_[c]; }
  const uint8_t *digest() const { return digest_.data(); }
  const Plan &plan(uint32_t c) const { return plans_[plan_of_.empty() ? 0 : plan_of_[c]]; }
  const kvx_mapping &part(uint32_t p) const { return *parts_[p]; }
  bool live() const { return live_; }
  // Chunk c is written from the caller's memory, or read into it, without staging.
  bool straight(uint32_t c) const { return straight_ && block_ids(c)[0] >= 0; }

  // ---- guarded by the engine's mutex ----
  uint32_t next = 0;  // first chunk that no thread has taken
  bool published = false;
  bool timed = false;  // `timer` is its place among the deadlines
  std::multimap<uint64_t, Job *>::iterator timer;
  uint64_t elapsed_ns = 0;
  uint64_t result_bytes = 0;
  uint32_t num_ok = 0;

  bool closed() const { return closed_; }
  bool writing(uint32_t c) const { return writing_[c]; }
  // Nobody waits for chunk c any more: the gate is closed, or it was given up.
  bool abandoned(uint32_t c) const { return closed_ || outcomes_[c].status != KVX_PENDING; }
  // Inside the gate the caller's memory may be read or written for chunk c. False once it is abandoned.
  bool enter(uint32_t c);
  void leave() { --inside_; }
  // From here on the chunk's slot may be written until settle(), and, unless the write is straight from them,
  // its source blocks may be reused. False once it is abandoned.
  bool begin_write(uint32_t c);
  // Records what became of chunk c. Ignored where that is known already; true if it had been given up as lost
  // with a write under way, which has returned now: only now the slot is free again.
  bool settle(uint32_t c, const Outcome &outcome);
  // No thread enters the gate any more; chunks without an answer get `status`.
  void close(uint8_t status);
  // Chunks that no thread has taken will not be tried: they get `status`; those under way go on.
  void drop_untaken(uint8_t status);
  // Fixes and returns true (once) when nothing is left to wait for.
  bool publishable();
  // Whoever is inside the gate is not waited for any more: for a shutdown, of calls that have not returned.
  void stop_waiting() { waiting_ = false; }
  uint8_t status(uint32_t c) const { return outcomes_[c].status; }
  const Outcome &outcome(uint32_t c) const { return outcomes_[c]; }
  uint32_t untaken() const { return num_chunks() - next; }
  // Store: no source block is needed any more, but by writes that were given up.
  bool sources_free() const { return published || sources_in_use_ == 0; }

 private:
  Job(const kvx_job &job, const kvx_engine_config &config);

  std::vector<kvx_mapping *> parts_;
  std::vector<kvx_chunk> chunks_;
  std::vector<int64_t> block_ids_;
  std::vector<std::array<uint64_t, 4>> masks_;
  std::array<uint8_t, 32> digest_{};
  std::vector<Plan> plans_;
  std::vector<uint32_t> plan_of_;
  void free_source(uint32_t c);

  uint32_t blocks_per_chunk_ = 1;
  bool live_ = true;
  bool straight_ = false;

  std::vector<Outcome> outcomes_;
  std::vector<uint8_t> writing_;  // a write of the chunk is under way
  std::vector<uint8_t> source_in_use_;
  uint32_t sources_in_use_ = 0;
  uint32_t unsettled_ = 0;
  uint32_t inside_ = 0;
  bool closed_ = false;
  bool waiting_ = true;
  uint8_t close_status_ = KVX_CUT;
};

}  // namespace kvx
