// The monitor: jobs whose deadline has come are closed, calls that take too long are given up.
#include <algorithm>
#include <exception>

#include "engine.h"

namespace kvx {

void Core::close_expired(uint64_t now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Job &job = *deadlines_.begin()->second;
    deadlines_.erase(job.timer);
    job.timed = false;
    job.close(KVX_CUT);
    publish_if_done(job);  // else whoever is inside does it when leaving
  }
}

void Core::run_monitor() {
  const uint64_t period = std::max<uint64_t>(config_.io_timeout_ns / 8 + 1, 1000000);
  std::unique_lock<std::mutex> lock(mutex);
  for (uint64_t last = now_ns(), now = last; !stopped_; last = now) {
    now = now_ns();
    close_expired(now);
    uint64_t next = deadlines_.empty() ? UINT64_MAX : deadlines_.begin()->first;
    if (config_.io_timeout_ns) {
      age_calls(last, now, period);
      give_up_slow_calls();
      // A call is noticed within a period: no need to be woken for each.
      watching_ = busy_ > 0;
      if (watching_) next = std::min(next, now + period);
    }
    reap();
    if (next == UINT64_MAX)
      monitor_wake_.wait(lock);
    else
      monitor_wake_.wait_until(lock, at(next));
  }
}

// Calls are as old as what the monitor has lived through with them: a step adds a period at most, however
// long it took. So a process that was stopped, or a machine that was suspended, does not take its drive for
// one that hangs when it goes on.
void Core::age_calls(uint64_t last, uint64_t now, uint64_t most) {
  for (Worker &worker : workers_) {
    const uint64_t started = worker.call_started.load(std::memory_order_acquire);
    if (started != worker.call_seen) worker.call_seen = started, worker.call_age = 0;
    const uint64_t since = std::max(started, last);
    if (started && since < now) worker.call_age += std::min(now - since, most);
  }
}

void Core::give_up_slow_calls() {
  uint32_t found = 0;
  for (Worker &worker : workers_) {
    if (worker.lost || !worker.job || worker.call_age < config_.io_timeout_ns) continue;
    mark_lost(&worker);
    ++found;
  }
  try {
    for (; found && in_service_ < config_.threads && lost_ <= config_.max_lost_threads; --found)
      spawn(nullptr);
  } catch (const std::exception &) {
    // No thread to be had, or no memory for it: the rest carry on, and a lost one takes its place again when
    // its call returns.
  }
  if (!in_service_) fail_queued(KVX_STALLED);
}

void Core::mark_lost(Worker *worker) {
  worker->lost = true;
  --in_service_;
  ++lost_;
  --busy_;
  storing_ -= worker->job->direction == KVX_STORE;
  ++counters.lost_calls;
  const bool store = worker->job->direction == KVX_STORE;
  counters.lost_writes += store;
  const bool slot_at_risk = store && worker->job->writing(worker->chunk);
  worker->job->settle(worker->chunk,
                      Outcome{slot_at_risk || !store ? uint8_t{KVX_LOST} : uint8_t{KVX_CANCELLED}});
  publish_if_done(*worker->job);
  if (store) done_.notify_all();  // for whoever waits for its source
  idle_.notify_all();
}

void Core::fail_queued(uint8_t status) {
  for (auto &queue : queue_) {
    for (auto &job : queue) {
      job->drop_untaken(status);
      publish_if_done(*job);
      bury(std::move(job));
    }
    queue.clear();
  }
}

// Joins threads that have left. (A lost thread that never comes back is detached by shutdown.)
void Core::reap() {
  for (auto worker = workers_.begin(); worker != workers_.end();) {
    if (worker->exited) {
      if (worker->thread.joinable()) worker->thread.join();  // nothing is left of it but the way out
      worker = workers_.erase(worker);
    } else {
      ++worker;
    }
  }
}

}  // namespace kvx
