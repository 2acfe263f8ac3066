// One io_uring, by raw system calls: used by one thread, which is its only submitter and takes its
// completions.
#ifndef KVX_RING_H
#define KVX_RING_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "calls.h"
#include "enrolment.h"
#include "files.h"

namespace kvx {

// A read or write. It stays where it is until it is done.
struct Request {
  kvx_file *file = nullptr;
  bool write = false;
  uint64_t offset = 0;
  Places places;
  Fate fate;
  enum State { kIdle, kQueued, kTaken, kDone, kRefused } state = kIdle;
  int64_t answer = 0;  // kDone: as a system call's
};

class Ring {
 public:
  // nullptr where there is none to be had: *error is -errno, and *why says it.
  static std::unique_ptr<Ring> make(uint32_t entries, int *error, std::string *why);
  ~Ring();
  Ring(const Ring &) = delete;
  Ring &operator=(const Ring &) = delete;

  // Queues a request. At most `entries` may be under way. Registers its file at first use.
  void push(Request &request);
  // Hands over what is queued.
  void hand_over();
  // Hands over what is queued and waits until `request` is kDone; kRefused where the kernel did not take it.
  void wait(Request &request);
  // Takes back what is queued and was not handed over: kIdle again.
  void withdraw();
  // No request will be taken any more: the kernel refused one.
  bool broken() const { return broken_; }
  // Registers memory in place of what was registered before; without any, none. False where that is refused:
  // it works unregistered, and *error says why.
  bool enroll(uint8_t *base, uint64_t bytes, int *error);
  int files_error() const { return files_error_; }  // -errno of registering files

 private:
  Ring() = default;
  int open(uint32_t entries, std::string *why);
  int map(const void *params, std::string *why);
  int ask_operations(std::string *why);
  bool submit(uint32_t wait_for);
  void take_completions();

  int fd_ = -1;
  uint8_t *rings_ = nullptr;  // the queues of submissions and completions
  void *entries_ = nullptr;   // of submissions
  uint64_t rings_bytes_ = 0, entries_bytes_ = 0;
  struct Places32 {
    uint32_t *head, *tail;
    uint32_t mask;
  };
  Places32 submissions_ = {}, completions_ = {};
  uint32_t completions_offset_ = 0;
  std::shared_ptr<FileTable> files_;
  int files_error_ = 0;
  uint8_t *enrolled_ = nullptr;
  uint64_t enrolled_bytes_ = 0;
  std::vector<Request *> queued_;  // pushed, not handed over, in order
  bool broken_ = false;
  uint32_t refusals_ = 0;  // in a row
};

}  // namespace kvx

#endif
