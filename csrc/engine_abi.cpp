// Section 6 of kvx.h over kvx::Core. No exception crosses: where a call can run out of memory, that is
// -ENOMEM. (A thread that cannot even note a result ends the process.)
#include <cerrno>
#include <new>
#include <system_error>

#include "engine.h"

namespace kvx {

void Core::stats(kvx_stats *out) {
  std::lock_guard<std::mutex> lock(mutex);
  const Counters &c = counters;
  *out = {c.chunks_stored,
          c.chunks_loaded,
          c.bytes_written,
          c.bytes_read,
          c.chunks_verified,
          c.segments_verified,
          c.truncated,
          c.bad_trailer,
          c.foreign,
          c.bad_sum,
          c.absent,
          c.io_errors,
          c.deadline_cuts,
          c.lost_calls,
          c.late_returns,
          c.lost_writes,
          c.read_ns,
          c.write_ns,
          staging_use.peak,
          0,
          busy_,
          in_service_,
          lost_,
          0,
          staging_use.bytes,
          ring_use.rings,
          ring_use.registered_bytes};
  for (const auto &queue : queue_)
    for (const auto &job : queue) out->queued_chunks += job->closed() ? 0 : job->untaken();
  for (const Worker &worker : workers_) out->leaked_bytes += worker.lost ? worker.staging.size() : 0;
}

}  // namespace kvx

struct kvx_engine {
  std::shared_ptr<kvx::Core> core;  // threads that never return keep it alive
};

namespace {

template <class Function>
int guarded(Function function) {
  try {
    return function();
  } catch (const std::bad_alloc &) {
    return -ENOMEM;
  } catch (const std::system_error &e) {  // no more threads
    return e.code().value() > 0 ? -e.code().value() : -EAGAIN;
  }
}

}  // namespace

extern "C" {

int kvx_engine_new(const kvx_engine_config *config, kvx_engine **out) {
  if (!config || !out || !config->threads || !config->read_piece_bytes || !config->write_piece_bytes)
    return -EINVAL;
  const bool deep = config->depth >= 1 && config->depth <= KVX_MAX_DEPTH;
  if (config->backend > KVX_BACKEND_URING || (config->backend == KVX_BACKEND_URING && !deep)) return -EINVAL;
  return guarded([&] {
    auto core = std::make_shared<kvx::Core>(*config);
    try {
      core->start();
    } catch (...) {
      core->shutdown(0);  // the threads that did start
      throw;
    }
    *out = new kvx_engine{core};
    return 0;
  });
}

int kvx_engine_submit(kvx_engine *engine, const kvx_job *job) {
  return guarded([&] { return engine->core->submit(*job); });
}

int kvx_engine_poll(kvx_engine *engine, int direction, kvx_result *result) {
  if (direction != KVX_STORE && direction != KVX_LOAD) return -EINVAL;
  return guarded([&] { return static_cast<int>(engine->core->poll(direction, result)); });
}

int kvx_engine_details(kvx_engine *engine, uint64_t job_id, uint8_t *status, kvx_chunk_error *errors) {
  const auto job = engine->core->find(job_id);
  if (!job) return -ENOENT;
  std::lock_guard<std::mutex> lock(engine->core->mutex);
  if (!job->published) return -EAGAIN;
  for (uint32_t c = 0; c < job->num_chunks(); ++c) {
    const kvx::Outcome &o = job->outcome(c);
    if (status) status[c] = o.status;
    if (errors) errors[c] = {o.status, o.error, o.segment, 0, o.offset, o.wanted, o.moved};
  }
  return 0;
}

void kvx_engine_forget(kvx_engine *engine, uint64_t job_id) { engine->core->forget(job_id); }

int kvx_engine_late(kvx_engine *engine, uint64_t *job_id, uint32_t *chunk) {
  return engine->core->late(job_id, chunk);
}

int kvx_engine_wait(kvx_engine *engine, uint32_t mask, uint64_t timeout_ns) {
  return engine->core->wait(mask, timeout_ns);
}

void kvx_engine_wake(kvx_engine *engine, uint32_t mask) { engine->core->wake(mask); }

int kvx_engine_wait_gathered(kvx_engine *engine, uint64_t job_id, uint64_t timeout_ns) {
  return engine->core->wait_gathered(job_id, timeout_ns);
}

int kvx_engine_cancel(kvx_engine *engine, uint64_t job_id) {
  return guarded([&] { return engine->core->cancel(job_id); });
}

int kvx_engine_shutdown(kvx_engine *engine, uint64_t timeout_ns) {
  return engine->core->shutdown(timeout_ns);
}

void kvx_engine_free(kvx_engine *engine) { delete engine; }

void kvx_engine_stats(kvx_engine *engine, kvx_stats *out) { engine->core->stats(out); }
}
