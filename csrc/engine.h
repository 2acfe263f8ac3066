// The job runner: queues and threads (io_engine.cpp), the monitor (monitor.cpp). The trips themselves are in
// trips.cpp.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "backend.h"
#include "job.h"
#include "kvx.h"

namespace kvx {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, as now_ns()
inline Clock::time_point at(uint64_t ns) { return Clock::time_point(std::chrono::nanoseconds(ns)); }

// What all buffers of an engine take.
struct StagingUse {
  std::atomic<uint64_t> bytes{0}, peak{0};
};

// A thread's private buffer: page aligned, as large as the largest job's need so far, never shared.
class Staging {
 public:
  explicit Staging(StagingUse &use) : use_(use) {}
  ~Staging() { release(); }
  Staging(const Staging &) = delete;
  Staging &operator=(const Staging &) = delete;
  uint8_t *need(uint64_t bytes);  // nullptr where there is no memory; what it held is gone where it grows
  void release();
  uint64_t size() const { return size_; }

 private:
  StagingUse &use_;
  uint8_t *base_ = nullptr;
  std::atomic<uint64_t> size_{0};  // read by stats()
};

struct Counters {
  std::atomic<uint64_t> chunks_stored{0}, chunks_loaded{0}, bytes_written{0}, bytes_read{0},
      chunks_verified{0}, segments_verified{0}, truncated{0}, bad_trailer{0}, foreign{0}, bad_sum{0},
      absent{0}, io_errors{0}, deadline_cuts{0}, lost_calls{0}, late_returns{0}, lost_writes{0}, read_ns{0},
      write_ns{0};
};

// Wakes whoever waits for a direction. Its lock is held for a moment only, so that ringing waits for nobody,
// as it might for the engine's.
class Bell {
 public:
  enum Answer { kTimeout, kRung, kCalled };
  // There may be news of the directions in `mask`.
  void ring(uint32_t mask) { signal(mask, 0); }
  // Ends their wait, news or not.
  void call(uint32_t mask) { signal(mask, mask); }
  Answer wait(uint32_t mask, Clock::time_point end) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!heard_.wait_until(lock, end, [&] { return rung_ & mask; })) return kTimeout;
    const bool called = called_ & mask;
    rung_ &= ~mask, called_ &= ~mask;
    return called ? kCalled : kRung;
  }

 private:
  void signal(uint32_t rung, uint32_t called) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      rung_ |= rung, called_ |= called;
    }
    heard_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable heard_;
  uint32_t rung_ = 0, called_ = 0;  // by direction
};

class Core;

struct Worker {
  explicit Worker(StagingUse &use) : staging(use) {}
  std::thread thread;
  Staging staging;
  std::unique_ptr<Backend> backend;       // its thread's; a replacement makes its own
  std::atomic<uint64_t> call_started{0};  // of what is under way that may never return; 0: nothing
  // guarded by Core::mutex
  std::shared_ptr<Job> job;  // whose chunk it runs
  uint32_t chunk = 0;
  uint64_t call_seen = 0;  // call_started, when the monitor last looked ...
  uint64_t call_age = 0;   // ... and how long it has been under way, as the monitor has lived
  bool lost = false;       // given up: another thread has its place
  bool exited = false;     // can be joined
};

// What a thread does without a chunk, such as closing its ring. It may never return either.
template <class Call>
void tidy(Worker &worker, Call call) {
  worker.call_started.store(now_ns(), std::memory_order_release);
  call();
  worker.call_started.store(0, std::memory_order_release);
}

class Core : public std::enable_shared_from_this<Core> {
 public:
  explicit Core(const kvx_engine_config &config);
  void start();
  int submit(const kvx_job &job);
  bool poll(int direction, kvx_result *result);
  std::shared_ptr<Job> find(uint64_t job_id);
  void forget(uint64_t job_id);
  bool late(uint64_t *job_id, uint32_t *chunk);
  bool wait(uint32_t mask, uint64_t timeout_ns);
  void wake(uint32_t mask) { bell_.call(mask); }
  int wait_gathered(uint64_t job_id, uint64_t timeout_ns);
  int cancel(uint64_t job_id);
  int shutdown(uint64_t timeout_ns);
  void stats(kvx_stats *out);

  // For the trips.
  std::mutex mutex;
  Counters counters;
  StagingUse staging_use;  // before the workers, whose buffers count in it
  RingUse ring_use;        // so, too
  bool enter_gate(Job &job, uint32_t chunk);
  void leave_gate(Job &job);
  bool begin_write(Job &job, uint32_t chunk);
  bool abandoned(const Job &job, uint32_t chunk);
  void record(Job &job, uint32_t chunk, const Outcome &outcome);  // with `mutex` held

 private:
  void run_worker(Worker *worker);
  bool take(Worker *worker);
  void bury(std::shared_ptr<Job> job);
  bool may_store() const;
  bool finish(Worker *worker, const Outcome &outcome);
  Outcome run_chunk(Worker &worker, Job &job, uint32_t chunk);
  void count(int direction, const Outcome &outcome);
  void run_monitor();
  void close_expired(uint64_t now);
  void age_calls(uint64_t last, uint64_t now, uint64_t most);
  void give_up_slow_calls();
  bool quiet();
  void mark_lost(Worker *worker);
  void spawn(std::unique_ptr<Backend> backend);
  std::unique_ptr<Backend> make_backend(int *error);
  bool has_news(int direction) const;
  void publish_if_done(Job &job);
  void fail_queued(uint8_t status);
  void reap();

  const kvx_engine_config config_;
  Bell bell_;
  // guarded by mutex
  std::condition_variable work_, done_, monitor_wake_, idle_;
  std::deque<std::shared_ptr<Job>> queue_[2];  // by direction
  std::deque<std::shared_ptr<Job>> done_jobs_[2];
  std::deque<std::pair<uint64_t, uint32_t>> late_;
  std::unordered_map<uint64_t, std::shared_ptr<Job>> jobs_;
  std::multimap<uint64_t, Job *> deadlines_;  // of jobs that are not published
  // A job's end lets go of much, memory and files: it comes to pass after the mutex was given back.
  std::vector<std::shared_ptr<Job>> buried_;
  std::list<Worker> workers_;
  std::thread monitor_;
  uint32_t in_service_ = 0;  // threads that are not lost
  uint32_t lost_ = 0;        // threads whose call has not returned
  uint32_t busy_ = 0;        // of those in service
  uint32_t storing_ = 0;     // of those, in a store
  bool watching_ = false;    // the monitor looks at the clock while calls are under way
  bool stopping_ = false;    // no more jobs
  bool stopped_ = false;     // no more chunks
  bool shut_ = false;        // threads have left, or are in a call
};

// The two trips of one chunk (docs/architecture.md). They return what became of it.
Outcome run_store(Core &core, Worker &worker, Job &job, uint32_t chunk);
Outcome run_load(Core &core, Worker &worker, Job &job, uint32_t chunk);

}  // namespace kvx
