#include "closer.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "calls.h"
#include "enrolment.h"
#include "forks.h"

namespace kvx {
namespace {

constexpr uint32_t kMostThreads =
    8;  // in closes that do not return; what comes then stays open until one does
constexpr std::chrono::seconds kIdle{1};

struct Closing {
  explicit Closing(kvx_file *which) : file(which) {}
  kvx_file *const file;
  bool done = false, given_up = false;
};

// Leaked on purpose: a thread that hangs in a close may outlive every destructor.
struct Closer {
  std::mutex mutex;  // never held across a call
  std::condition_variable work, done;
  std::deque<std::shared_ptr<Closing>> queue;
  uint32_t threads = 0, idle = 0;
  uint32_t given_up = 0;  // closes under way that nobody waits for any more
};
Closer &g_closer = *new Closer;
const AfterFork g_renew_closer([] { new (&g_closer) Closer; });

void close_now(kvx_file *file) {
  if (file->enrolled) dismiss(file);
  calls(KVX_OP_CLOSE).close(file->fd);
  delete file;
}

void serve() {
  std::unique_lock<std::mutex> lock(g_closer.mutex);
  for (;;) {
    ++g_closer.idle;
    const bool more = g_closer.work.wait_for(lock, kIdle, [] { return !g_closer.queue.empty(); });
    --g_closer.idle;
    if (!more) break;
    const std::shared_ptr<Closing> closing = std::move(g_closer.queue.front());
    g_closer.queue.pop_front();
    lock.unlock();
    close_now(closing->file);
    lock.lock();
    closing->done = true;
    g_closer.given_up -= closing->given_up;
    g_closer.done.notify_all();
  }
  --g_closer.threads;
}

// With its lock held. False where nobody will ever serve the queue.
bool find_thread() {
  if (g_closer.idle >= g_closer.queue.size() || g_closer.threads == kMostThreads) return true;
  try {
    std::thread(serve).detach();
    ++g_closer.threads;
  } catch (const std::exception &) {  // no thread to be had, or no memory for it
  }
  return g_closer.threads > 0;
}

// False where that is not to be had.
bool hand_over(kvx_file *file, std::chrono::milliseconds patience) {
  const auto closing = std::make_shared<Closing>(file);
  std::unique_lock<std::mutex> lock(g_closer.mutex);
  g_closer.queue.push_back(closing);
  if (!find_thread()) {
    g_closer.queue.pop_back();
    return false;
  }
  g_closer.work.notify_one();
  if (patience.count() == 0 || g_closer.given_up) return true;
  closing->given_up = !g_closer.done.wait_for(lock, patience, [&] { return closing->done; });
  g_closer.given_up += closing->given_up;
  return true;
}

}  // namespace

void close_file(kvx_file *file, std::chrono::milliseconds patience) {
  try {
    if (hand_over(file, patience)) return;
  } catch (const std::bad_alloc &) {
  }
  close_now(file);
}

}  // namespace kvx
