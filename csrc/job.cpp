#include "job.h"

#include <cerrno>
#include <cstring>
#include <ctime>
#include <map>
#include <string>

#include "trailer.h"

namespace kvx {

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

namespace {

bool same_layout(const kvx_slot_layout &a, const kvx_slot_layout &b) {
  return a.segment_bytes == b.segment_bytes && a.last_segment_bytes == b.last_segment_bytes &&
         a.segment_stride == b.segment_stride && a.num_segments == b.num_segments &&
         a.segments_per_trailer == b.segments_per_trailer && a.alignment == b.alignment &&
         a.blocks_per_chunk == b.blocks_per_chunk;
}

int check(const kvx_job &job) {
  if (job.direction != KVX_STORE && job.direction != KVX_LOAD) return -EINVAL;
  if (!job.num_chunks || !job.num_parts || !job.parts || !job.chunks || !job.block_ids ||
      !job.namespace_digest)
    return -EINVAL;
  const kvx_mapping &first = *job.parts[0];
  const uint64_t ids = uint64_t{job.num_chunks} * first.layout.blocks_per_chunk;
  for (uint32_t p = 0; p < job.num_parts; ++p) {
    const kvx_mapping &part = *job.parts[p];
    if (!same_layout(part.layout, first.layout) || part.live != first.live) return -EINVAL;
    if (int error = check_blocks(part, job.block_ids, ids)) return error;
  }
  for (uint32_t c = 0; c < job.num_chunks; ++c)
    if (!job.chunks[c].file || job.chunks[c].key_bytes < 1 || job.chunks[c].key_bytes > KVX_MAX_KEY)
      return -EINVAL;
  return 0;
}

}  // namespace

std::shared_ptr<Job> Job::make(const kvx_job &job, const kvx_engine_config &config, int *error) {
  *error = check(job);
  return *error ? nullptr : std::shared_ptr<Job>(new Job(job, config));
}

Job::Job(const kvx_job &job, const kvx_engine_config &config)
    : id(job.job_id),
      direction(job.direction),
      deadline_ns(job.direction == KVX_LOAD ? job.deadline_ns : 0),
      submitted_ns(now_ns()),
      chunks_(job.chunks, job.chunks + job.num_chunks) {
  parts_.assign(job.parts, job.parts + job.num_parts);
  blocks_per_chunk_ = parts_[0]->layout.blocks_per_chunk;
  live_ = parts_[0]->live;
  // With a deadline the memory must be the caller's again whether or not a read has returned.
  straight_ = (config.straight >> direction & 1) && parts_.size() == 1 && parts_[0]->straight && !deadline_ns;
  const uint64_t write_bytes = straight_ ? config.write_piece_bytes : UINT64_MAX;
  block_ids_.assign(job.block_ids, job.block_ids + uint64_t{job.num_chunks} * blocks_per_chunk_);
  std::memcpy(digest_.data(), job.namespace_digest, digest_.size());
  masks_.resize(job.num_chunks);
  for (uint32_t c = 0; c < job.num_chunks; ++c) mask_of(block_ids(c), blocks_per_chunk_, masks_[c].data());
  if (direction == KVX_STORE && job.part_writes) {
    std::map<std::string, uint32_t> known;  // few: as many as there are replicas
    for (uint32_t c = 0; c < job.num_chunks; ++c) {
      const uint8_t *writes = job.part_writes + uint64_t{c} * job.num_parts;
      const auto [at, fresh] = known.emplace(std::string(writes, writes + job.num_parts), plans_.size());
      if (fresh) plans_.emplace_back(parts_, writes, write_bytes, false);
      plan_of_.push_back(at->second);
    }
  } else if (direction == KVX_STORE) {
    plans_.emplace_back(parts_, nullptr, write_bytes, false);
  } else {
    plans_.emplace_back(parts_, nullptr, config.read_piece_bytes, true);
  }
  outcomes_.resize(job.num_chunks);
  for (Outcome &outcome : outcomes_) outcome.status = KVX_PENDING;
  writing_.resize(job.num_chunks);
  source_in_use_.assign(job.num_chunks, 1);
  sources_in_use_ = job.num_chunks;
  unsettled_ = job.num_chunks;
  for (kvx_mapping *part : parts_) mapping_ref(part);
  for (const kvx_chunk &chunk : chunks_) file_ref(chunk.file);
}

Job::~Job() {
  for (kvx_mapping *part : parts_) mapping_unref(part);
  for (const kvx_chunk &chunk : chunks_) file_unref(chunk.file);
}

bool Job::enter(uint32_t c) {
  if (deadline_ns && now_ns() >= deadline_ns) close(KVX_CUT);
  if (abandoned(c)) return false;
  ++inside_;
  return true;
}

bool Job::begin_write(uint32_t c) {
  if (abandoned(c)) return false;
  if (!straight(c)) free_source(c);
  writing_[c] = 1;
  return true;
}

void Job::free_source(uint32_t c) {
  sources_in_use_ -= source_in_use_[c];
  source_in_use_[c] = 0;
}

bool Job::settle(uint32_t c, const Outcome &outcome) {
  Outcome &mine = outcomes_[c];
  if (mine.status != KVX_PENDING) {
    const bool late = mine.status == KVX_LOST && writing_[c] && outcome.status != KVX_LOST;
    if (late) writing_[c] = 0;
    return late;
  }
  mine = outcome;
  if (mine.status == KVX_CUT && closed_) mine.status = close_status_;
  if (mine.status != KVX_LOST) writing_[c] = 0;
  free_source(c);
  --unsettled_;
  return false;
}

void Job::close(uint8_t status) {
  if (closed_) return;
  closed_ = true;
  close_status_ = status;
}

void Job::drop_untaken(uint8_t status) {
  for (; next < num_chunks(); ++next) settle(next, Outcome{status});
}

bool Job::publishable() {
  if (published || (inside_ && waiting_) || (!closed_ && unsettled_)) return false;
  for (uint32_t c = 0; c < num_chunks(); ++c) {
    if (outcomes_[c].status == KVX_PENDING)
      outcomes_[c].status = writing_[c] ? uint8_t{KVX_LOST} : close_status_;
    if (outcomes_[c].status != KVX_OK) continue;
    ++num_ok;
    result_bytes += plan(c).payload_bytes();
  }
  next = num_chunks();
  elapsed_ns = now_ns() - submitted_ns;
  return published = true;
}

}  // namespace kvx
