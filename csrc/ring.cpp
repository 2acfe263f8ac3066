#include "ring.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "ring_abi.h"

#if defined(__has_include) && !defined(KVX_NO_URING)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define KVX_HAS_URING 1
#endif
#endif

namespace kvx {

std::unique_ptr<Ring> Ring::make(uint32_t entries, int *error, std::string *why) {
  std::unique_ptr<Ring> ring(new Ring);
  *error = ring->open(entries, why);
  return *error < 0 ? nullptr : std::move(ring);
}

#ifdef KVX_HAS_URING

namespace {

constexpr uint32_t kPatience = 100;  // refusals that pass, in a row

std::string said(const char *call, int error) {
  std::string text = std::string(call) + ": [Errno " + std::to_string(-error) + "] " + std::strerror(-error);
  if (error == -ENOSYS) text += " (the kernel has no io_uring)";
  if (error == -EPERM || error == -EACCES)
    text += " (forbidden: by a container, or by kernel.io_uring_disabled)";
  if (error == -ENOMEM) text += " (before Linux 5.12 a ring counts against RLIMIT_MEMLOCK)";
  return text;
}

uint32_t load(const uint32_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void store(uint32_t *at, uint32_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

}  // namespace

int Ring::open(uint32_t entries, std::string *why) {
  io_uring_params params = {};
  fd_ = calls(KVX_OP_URING_SETUP).uring->setup(entries, &params);
  if (fd_ < 0) {
    *why = said("io_uring_setup", fd_);
    return fd_;
  }
  if ((params.features & kSingleMap) == 0 || (params.features & kNoDrop) == 0) {
    *why = "the kernel's io_uring is too old: Linux 5.6 is needed";
    return -EOPNOTSUPP;
  }
  if (int error = ask_operations(why)) return error;
  if (int error = map(&params, why)) return error;
  files_ = FileTable::make(fd_, &files_error_);
  queued_.reserve(entries);
  return 0;
}

int Ring::ask_operations(std::string *why) {
  Probe probe = {};
  const int error = calls(KVX_OP_URING_REGISTER).uring->enroll(fd_, kProbe, &probe, kProbed);
  if (error < 0) {
    *why = said("io_uring_register: it does not say what it can do", error);
    return error;
  }
  for (const uint8_t op : {kReadv, kWritev, kReadFixed, kWriteFixed}) {
    if (probe.ops[op].op == op && (probe.ops[op].flags & 1)) continue;
    *why = "the kernel's io_uring lacks operation " + std::to_string(op);
    return -EOPNOTSUPP;
  }
  return 0;
}

int Ring::map(const void *raw, std::string *why) {
  const auto &params = *static_cast<const io_uring_params *>(raw);
  rings_bytes_ = std::max<uint64_t>(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                                    params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  const auto mapped = [&](uint64_t bytes, uint64_t offset) -> void * {
    void *at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                      static_cast<off_t>(offset));
    if (at == MAP_FAILED) return nullptr;
    ::madvise(at, bytes, MADV_DONTFORK);  // the ring is this process's
    return at;
  };
  rings_ = static_cast<uint8_t *>(mapped(rings_bytes_, IORING_OFF_SQ_RING));
  entries_ = rings_ ? mapped(entries_bytes_, IORING_OFF_SQES) : nullptr;
  if (!entries_) {
    const int error = -errno;
    *why = said("mmap of a ring", error);
    return error;
  }
  const auto at = [&](uint32_t offset) { return reinterpret_cast<uint32_t *>(rings_ + offset); };
  submissions_ = {at(params.sq_off.head), at(params.sq_off.tail), *at(params.sq_off.ring_mask)};
  completions_ = {at(params.cq_off.head), at(params.cq_off.tail), *at(params.cq_off.ring_mask)};
  completions_offset_ = params.cq_off.cqes;
  for (uint32_t i = 0; i < params.sq_entries; ++i) at(params.sq_off.array)[i] = i;
  return 0;
}

Ring::~Ring() {
  if (files_) files_->retire();
  if (entries_) ::munmap(entries_, entries_bytes_);
  if (rings_) ::munmap(rings_, rings_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

void Ring::push(Request &request) {
  const uint32_t tail = *submissions_.tail;
  io_uring_sqe &entry = static_cast<io_uring_sqe *>(entries_)[tail & submissions_.mask];
  entry = {};
  const ::iovec *first = request.places.data();
  auto *const base = static_cast<uint8_t *>(first->iov_base);
  const bool fixed = request.places.size() == 1 && enrolled_ && base >= enrolled_ &&
                     base + first->iov_len <= enrolled_ + enrolled_bytes_;
  entry.opcode = request.write ? (fixed ? kWriteFixed : kWritev) : (fixed ? kReadFixed : kReadv);
  entry.addr = fixed ? reinterpret_cast<uintptr_t>(base) : reinterpret_cast<uintptr_t>(first);
  entry.len = fixed ? static_cast<uint32_t>(first->iov_len) : static_cast<uint32_t>(request.places.size());
  entry.off = request.offset;
  const int place = files_ ? files_->place(request.file) : -1;
  entry.fd = place < 0 ? request.file->fd : place;
  entry.flags = place < 0 ? 0 : kFixedFile;
  entry.user_data = reinterpret_cast<uintptr_t>(&request);
  store(submissions_.tail, tail + 1);
  queued_.push_back(&request);
  request.state = Request::kQueued;
}

// One call. False where it was refused, for good: what was queued is kRefused, then.
bool Ring::submit(uint32_t wait_for) {
  Extent extents[KVX_MAX_DEPTH];
  const auto count = static_cast<uint32_t>(queued_.size());
  for (uint32_t i = 0; i < count; ++i) extents[i] = {queued_[i]->offset, queued_[i]->places.bytes()};
  const UringCalls &table = *(count ? calls(KVX_OP_URING_SUBMIT) : plain_calls()).uring;
  const int got = table.enter(fd_, extents, count, wait_for);
  if (got > 0 || (got == 0 && !count)) {
    const uint32_t taken = std::min(static_cast<uint32_t>(got), count);
    for (uint32_t i = 0; i < taken; ++i) queued_[i]->state = Request::kTaken;
    queued_.erase(queued_.begin(), queued_.begin() + taken);
    refusals_ = 0;
    return true;
  }
  if (got == -EINTR) return true;
  if ((got == -EAGAIN || got == -EBUSY || got == 0) && ++refusals_ < kPatience) {
    std::this_thread::yield();
    return true;
  }
  broken_ = true;
  for (Request *each : queued_) each->state = Request::kRefused;
  queued_.clear();
  return false;
}

void Ring::hand_over() {
  while (!queued_.empty() && submit(0)) {
  }
}

void Ring::wait(Request &request) {
  for (take_completions(); request.state == Request::kQueued || request.state == Request::kTaken;
       take_completions()) {
    // A broken one still answers what it has taken.
    if (broken_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!broken_) submit(1);
  }
}

void Ring::take_completions() {
  const uint32_t tail = load(completions_.tail);
  for (uint32_t head = *completions_.head; head != tail;) {
    const io_uring_cqe entry =
        reinterpret_cast<io_uring_cqe *>(rings_ + completions_offset_)[head & completions_.mask];
    store(completions_.head, ++head);
    auto &request = *reinterpret_cast<Request *>(entry.user_data);
    const Extent extent{request.offset, request.places.bytes()};
    request.answer = calls(KVX_OP_URING_COMPLETE).uring->complete(entry.res, extent, request.places.data());
    request.state = Request::kDone;
  }
}

void Ring::withdraw() {
  store(submissions_.tail, *submissions_.tail - static_cast<uint32_t>(queued_.size()));
  for (Request *each : queued_) each->state = Request::kIdle;
  queued_.clear();
}

bool Ring::enroll(uint8_t *base, uint64_t bytes, int *error) {
  *error = 0;
  if (enrolled_) calls(KVX_OP_URING_REGISTER).uring->enroll(fd_, kDropBuffers, nullptr, 0);
  enrolled_ = nullptr;
  if (!base) return false;
  ::iovec place = {base, bytes};
  *error = calls(KVX_OP_URING_REGISTER).uring->enroll(fd_, kRegisterBuffers, &place, 1);
  if (*error < 0) return false;
  enrolled_ = base, enrolled_bytes_ = bytes;
  return true;
}

#else  // <linux/io_uring.h> was not there

int Ring::open(uint32_t, std::string *why) {
  *why = "this libkvx was built without <linux/io_uring.h>";
  return -ENOSYS;
}
Ring::~Ring() = default;
void Ring::push(Request &) {}
void Ring::wait(Request &) {}
void Ring::hand_over() {}
void Ring::withdraw() {}
bool Ring::enroll(uint8_t *, uint64_t, int *) { return false; }

#endif

}  // namespace kvx
