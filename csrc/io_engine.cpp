// Queues and threads. One mutex guards all job state: it is taken a few times a chunk, never across a system
// call or a copy.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <string>
#include <system_error>
#include <tuple>

#include "calls.h"
#include "engine.h"
#include "files.h"

namespace kvx {

namespace {

constexpr uint64_t kHuge = 2u << 20;

// Absolute time of a timeout from now; far away, but without overflow, for "for ever".
Clock::time_point after(uint64_t timeout_ns) {
  return at(now_ns() + std::min<uint64_t>(timeout_ns, uint64_t{1} << 62));
}

constexpr uint64_t kTidyNs = 1000000000;  // what a shutdown gives a thread that tidies up

}  // namespace

void Staging::release() {
  if (base_) unmap(base_, size_);
  use_.bytes -= size_;
  base_ = nullptr;
  size_ = 0;
}

uint8_t *Staging::need(uint64_t bytes) {
  if (bytes <= size_) return base_;
  const uint64_t size = (bytes + kHuge - 1) / kHuge * kHuge;
  void *fresh = nullptr;
  release();  // first, so that the two are never there at once
  if (calls(KVX_OP_MMAP).mmap(size, &fresh) < 0) return nullptr;
  base_ = static_cast<uint8_t *>(fresh);
  size_ = size;
  const uint64_t now = use_.bytes += size;
  for (uint64_t peak = use_.peak; peak < now && !use_.peak.compare_exchange_weak(peak, now);) {
  }
  return base_;
}

Core::Core(const kvx_engine_config &config) : config_(config) {}

std::unique_ptr<Backend> Core::make_backend(int *error) {
  *error = 0;
  std::string why;
  if (config_.backend == KVX_BACKEND_POSIX) return posix_backend();
  return uring_backend(config_.depth, ring_use, error, &why);
}

void Core::start() {
  std::vector<std::unique_ptr<Backend>> backends;
  for (uint32_t i = 0; i < config_.threads; ++i) {
    int error;
    backends.push_back(make_backend(&error));
    if (error < 0) throw std::system_error(-error, std::generic_category());
  }
  std::lock_guard<std::mutex> lock(mutex);
  for (auto &backend : backends) spawn(std::move(backend));
  monitor_ = std::thread([self = shared_from_this()] { self->run_monitor(); });
}

void Core::spawn(std::unique_ptr<Backend> backend) {
  Worker &worker = workers_.emplace_back(staging_use);
  worker.backend = std::move(backend);
  try {
    worker.thread = std::thread([self = shared_from_this(), &worker] { self->run_worker(&worker); });
  } catch (...) {
    workers_.pop_back();
    throw;
  }
  ++in_service_;
}

// ---- workers ------------------------------------------------------------------------------------

bool Core::may_store() const {
  const uint32_t kept_for_loads = config_.threads > 1 ? std::max(1u, config_.threads / 8) : 0;
  return storing_ < config_.threads - kept_for_loads;
}

// The next chunk: loads first, jobs in the order they came, chunks in prefix order.
bool Core::take(Worker *worker) {
  for (const int direction : {KVX_LOAD, KVX_STORE}) {
    auto &queue = queue_[direction];
    while (!queue.empty() && (queue.front()->closed() || queue.front()->untaken() == 0)) {
      bury(std::move(queue.front()));
      queue.pop_front();
    }
    if (queue.empty() || (direction == KVX_STORE && !may_store())) continue;
    worker->job = queue.front();
    worker->chunk = worker->job->next++;
    if (!worker->job->untaken()) queue.pop_front();
    ++busy_;
    storing_ += direction == KVX_STORE;
    return true;
  }
  return false;
}

void Core::bury(std::shared_ptr<Job> job) { buried_.push_back(std::move(job)); }

Outcome Core::run_chunk(Worker &worker, Job &job, uint32_t chunk) {
  try {
    return job.direction == KVX_STORE ? run_store(*this, worker, job, chunk)
                                      : run_load(*this, worker, job, chunk);
  } catch (const std::bad_alloc &) {
    return {KVX_IO, ENOMEM};
  }
}

void Core::run_worker(Worker *worker) {
  if (!worker->backend) {  // a replacement: here nobody waits for it
    tidy(*worker, [&] {
      int error;
      try {
        worker->backend = make_backend(&error);
      } catch (const std::bad_alloc &) {
      }
    });
    if (!worker->backend) worker->backend = posix_backend();  // rather than none
  }
  for (bool stay = true; stay;) {
    std::vector<std::shared_ptr<Job>> dead;
    {
      std::unique_lock<std::mutex> lock(mutex);
      work_.wait(lock, [&] { return stopped_ || take(worker); });
      if (!worker->job) break;
      if (config_.io_timeout_ns && !watching_) monitor_wake_.notify_one();
    }
    const Outcome outcome = run_chunk(*worker, *worker->job, worker->chunk);
    {
      std::unique_lock<std::mutex> lock(mutex);
      if (worker->lost) {  // once it is no longer counted as lost, its buffer must not be there either
        lock.unlock();
        tidy(*worker, [&] {
          worker->backend->set_staging(nullptr, 0);
          worker->staging.release();
        });
        lock.lock();
      }
      stay = finish(worker, outcome);
      dead.swap(buried_);
    }
    tidy(*worker, [&] { dead.clear(); });
  }
  tidy(*worker, [&] { worker->backend.reset(); });  // by the thread that had it, and under no lock
  std::lock_guard<std::mutex> lock(mutex);
  worker->exited = true;
  idle_.notify_all();
}

void Core::count(int direction, const Outcome &outcome) {
  switch (outcome.status) {
    case KVX_OK:
      ++(direction == KVX_STORE ? counters.chunks_stored : counters.chunks_loaded);
      break;
    case KVX_IO:
      ++counters.io_errors;
      break;
    case KVX_TRUNCATED:
      ++counters.truncated;
      break;
    case KVX_BAD_TRAILER:
      ++counters.bad_trailer;
      break;
    case KVX_FOREIGN:
      ++counters.foreign;
      break;
    case KVX_BAD_SUM:
      ++counters.bad_sum;
      break;
    case KVX_ABSENT:
      ++counters.absent;
      break;
    default:
      return;
  }
  if (direction == KVX_LOAD && outcome.status != KVX_IO) ++counters.chunks_verified;
}

void Core::record(Job &job, uint32_t chunk, const Outcome &outcome) {
  if (job.status(chunk) == KVX_PENDING) count(job.direction, outcome);
  if (!job.settle(chunk, outcome)) return;
  late_.emplace_back(job.id, chunk);
  bell_.ring(1u << KVX_STORE);
}

// Records what became of the worker's chunk. False if the thread is no longer needed.
bool Core::finish(Worker *worker, const Outcome &outcome) {
  const std::shared_ptr<Job> job = std::move(worker->job);
  worker->job = nullptr;
  record(*job, worker->chunk, outcome);
  publish_if_done(*job);
  if (job->direction == KVX_STORE && job->sources_free()) done_.notify_all();
  bool stay = true;
  if (worker->lost) {  // the call has returned after all
    --lost_;
    ++counters.late_returns;
    worker->lost = false;
    stay = in_service_ < config_.threads && !stopped_;
    in_service_ += stay;
  } else {
    --busy_;
    storing_ -= job->direction == KVX_STORE;
  }
  // may_store() may have changed. This thread comes back for the next chunk itself, unless it takes a load,
  // or leaves.
  if (job->direction == KVX_STORE && (!stay || !queue_[KVX_LOAD].empty())) work_.notify_one();
  idle_.notify_all();
  bury(job);
  return stay;
}

bool Core::enter_gate(Job &job, uint32_t chunk) {
  std::lock_guard<std::mutex> lock(mutex);
  return job.enter(chunk);
}

void Core::leave_gate(Job &job) {
  std::lock_guard<std::mutex> lock(mutex);
  job.leave();
  publish_if_done(job);
}

bool Core::begin_write(Job &job, uint32_t chunk) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!job.begin_write(chunk)) return false;
  if (job.sources_free()) done_.notify_all();
  return true;
}

bool Core::abandoned(const Job &job, uint32_t chunk) {
  std::lock_guard<std::mutex> lock(mutex);
  return job.abandoned(chunk);
}

void Core::publish_if_done(Job &job) {
  if (!job.publishable()) return;
  if (job.timed) deadlines_.erase(job.timer);
  job.timed = false;
  for (uint32_t c = 0; c < job.num_chunks(); ++c) counters.deadline_cuts += job.status(c) == KVX_CUT;
  done_jobs_[job.direction].push_back(job.shared_from_this());
  bell_.ring(1u << job.direction);
  done_.notify_all();
}

// ---- the caller's side --------------------------------------------------------------------------

int Core::submit(const kvx_job &request) {
  int error = 0;
  const std::shared_ptr<Job> job = Job::make(request, config_, &error);
  if (!job) return error;
  std::lock_guard<std::mutex> lock(mutex);
  if (stopping_) return -ESHUTDOWN;
  if (!jobs_.emplace(job->id, job).second) return -EEXIST;
  if (!in_service_) {
    job->drop_untaken(KVX_STALLED);
  } else if (job->deadline_ns && job->deadline_ns <= job->submitted_ns) {
    job->close(KVX_CUT);
  } else {
    queue_[job->direction].push_back(job);
    if (job->deadline_ns) {
      job->timer = deadlines_.emplace(job->deadline_ns, job.get());
      job->timed = true;
      if (job->timer == deadlines_.begin()) monitor_wake_.notify_one();
    }
    job->num_chunks() > 1 ? work_.notify_all() : work_.notify_one();
  }
  publish_if_done(*job);
  return 0;
}

bool Core::poll(int direction, kvx_result *result) {
  std::lock_guard<std::mutex> lock(mutex);
  auto &done = done_jobs_[direction];
  if (done.empty()) return false;
  const Job &job = *done.front();
  *result = {job.id, job.direction, job.num_chunks(), job.num_ok, 0, job.result_bytes, job.elapsed_ns};
  done.pop_front();
  return true;
}

std::shared_ptr<Job> Core::find(uint64_t job_id) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = jobs_.find(job_id);
  return found == jobs_.end() ? nullptr : found->second;
}

void Core::forget(uint64_t job_id) {
  std::shared_ptr<Job> last;  // destroyed after the lock
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = jobs_.find(job_id);
  if (found == jobs_.end() || !found->second->published) return;
  last = std::move(found->second);
  jobs_.erase(found);
}

bool Core::late(uint64_t *job_id, uint32_t *chunk) {
  std::lock_guard<std::mutex> lock(mutex);
  if (late_.empty()) return false;
  std::tie(*job_id, *chunk) = late_.front();
  late_.pop_front();
  return true;
}

bool Core::wait(uint32_t mask, uint64_t timeout_ns) {
  const Clock::time_point end = after(timeout_ns);
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (const int direction : {KVX_STORE, KVX_LOAD})
        if ((mask >> direction & 1) && has_news(direction)) return true;
    }
    const int rung = bell_.wait(mask, end);
    if (rung != Bell::kRung) return rung == Bell::kCalled;
  }
}

bool Core::has_news(int direction) const {
  return !done_jobs_[direction].empty() || (direction == KVX_STORE && !late_.empty());
}

int Core::wait_gathered(uint64_t job_id, uint64_t timeout_ns) {
  const std::shared_ptr<Job> job = find(job_id);
  if (!job) return -ENOENT;
  std::unique_lock<std::mutex> lock(mutex);
  return done_.wait_until(lock, after(timeout_ns), [&] { return job->sources_free(); });
}

int Core::cancel(uint64_t job_id) {
  const std::shared_ptr<Job> job = find(job_id);
  if (!job) return -ENOENT;
  std::lock_guard<std::mutex> lock(mutex);
  job->close(KVX_CANCELLED);
  publish_if_done(*job);
  return 0;
}

// No thread runs a chunk except in a call. Those in a call are given up; so are, a little later, those that
// tidy up.
bool Core::quiet() {
  bool all = true;
  for (Worker &worker : workers_) {
    const uint64_t started = worker.call_started.load(std::memory_order_acquire);
    if (worker.job && !worker.lost && started) mark_lost(&worker);
    const bool stuck = started && !worker.job && now_ns() > started + kTidyNs;
    all &= worker.exited || (worker.lost && started) || stuck;
  }
  return all;
}

int Core::shutdown(uint64_t timeout_ns) {
  std::vector<std::shared_ptr<Job>> dead;  // destroyed after the lock
  std::thread monitor;
  std::unique_lock<std::mutex> lock(mutex);
  if (stopping_) {  // somebody else is at it, or was
    idle_.wait_until(lock, after(timeout_ns), [&] { return shut_; });
    reap();
    return static_cast<int>(workers_.size());
  }
  stopping_ = true;
  fail_queued(KVX_CANCELLED);
  idle_.wait_until(lock, after(timeout_ns), [&] { return busy_ == 0; });
  stopped_ = true;
  // From here on no gate opens and no write starts. A copy under way ends by itself, and counts.
  for (auto &[id, job] : jobs_) {
    if (!job->published) job->close(KVX_CANCELLED);
    publish_if_done(*job);
  }
  work_.notify_all();
  monitor_wake_.notify_all();
  monitor = std::move(monitor_);
  while (!quiet()) idle_.wait_for(lock, std::chrono::milliseconds(5));
  // What is open still waits for a read into the caller's memory: its result says that this was lost.
  for (auto &[id, job] : jobs_) {
    job->stop_waiting();
    publish_if_done(*job);
  }
  if (monitor.joinable()) {
    lock.unlock();
    monitor.join();
    lock.lock();
  }
  reap();
  for (Worker &worker : workers_)
    if (worker.thread.joinable()) worker.thread.detach();
  shut_ = true;
  idle_.notify_all();
  dead.swap(buried_);
  return static_cast<int>(workers_.size());
}

}  // namespace kvx
