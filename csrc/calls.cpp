// System calls: the C library's table, the faulty table over it, and the plain calls.
#include "calls.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <mutex>
#include <new>
#include <vector>

#include "faults.h"
#include "files.h"
#include "forks.h"

namespace kvx {
namespace {

int or_errno(int result) { return result < 0 ? -errno : result; }
int64_t or_errno(ssize_t result) { return result < 0 ? -errno : result; }

// ---- the C library's table --------------------------------------------------------------------------------

int libc_open(const char *path, int flags, int mode) {
  return or_errno(::open(path, flags | O_CLOEXEC, mode));
}
int libc_close(int fd) { return or_errno(::close(fd)); }
int64_t libc_pread(int fd, void *buf, uint64_t n, uint64_t offset) {
  return or_errno(::pread(fd, buf, n, static_cast<off_t>(offset)));
}
int64_t libc_pwrite(int fd, const void *buf, uint64_t n, uint64_t offset) {
  return or_errno(::pwrite(fd, buf, n, static_cast<off_t>(offset)));
}
int64_t libc_preadv(int fd, const ::iovec *to, int count, uint64_t offset) {
  return or_errno(::preadv(fd, to, count, static_cast<off_t>(offset)));
}
int64_t libc_pwritev(int fd, const ::iovec *from, int count, uint64_t offset) {
  return or_errno(::pwritev(fd, from, count, static_cast<off_t>(offset)));
}
int libc_fallocate(int fd, uint64_t length) {
  return or_errno(::fallocate(fd, 0, 0, static_cast<off_t>(length)));
}
int libc_ftruncate(int fd, uint64_t length) { return or_errno(::ftruncate(fd, static_cast<off_t>(length))); }
int libc_fsync(int fd) { return or_errno(::fsync(fd)); }
int libc_fdatasync(int fd) { return or_errno(::fdatasync(fd)); }
int64_t libc_size(int fd) {
  struct ::stat status;
  return ::fstat(fd, &status) < 0 ? -errno : static_cast<int64_t>(status.st_size);
}

// The kernel's struct statx, as far as it is read here; spelt out because the C library's headers may be
// older.
constexpr uint32_t kDioAlign = 0x2000;  // STATX_DIOALIGN
constexpr int kEmptyPath = 0x1000;      // AT_EMPTY_PATH
struct StatxDio {
  uint32_t mask;
  uint8_t before[148];
  uint32_t memory_align;
  uint32_t offset_align;
  uint8_t after[256 - 160];
};
static_assert(sizeof(StatxDio) == 256 && offsetof(StatxDio, memory_align) == 152, "as in linux/stat.h");

int libc_dioalign(int fd, uint32_t *memory_align, uint32_t *offset_align) {
  StatxDio found = {};
  if (::syscall(SYS_statx, fd, "", kEmptyPath, kDioAlign, &found) < 0) {
    return errno == ENOSYS ? -EOPNOTSUPP : -errno;
  }
  // Zeros mean that the file takes no direct I/O.
  if (!(found.mask & kDioAlign) || found.memory_align == 0 || found.offset_align == 0) return -EOPNOTSUPP;
  *memory_align = found.memory_align;
  *offset_align = found.offset_align;
  return 0;
}
int libc_unlink(const char *path) { return or_errno(::unlink(path)); }
int libc_rename(const char *from, const char *to) { return or_errno(::rename(from, to)); }
int libc_mkdir(const char *path, int mode) { return or_errno(::mkdir(path, static_cast<mode_t>(mode))); }
// F_OFD_*: Linux 3.15; older C libraries have no names for them.
#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif
int libc_lock(int fd, uint64_t offset, int operation) {
  struct ::flock range = {};
  range.l_type = operation == KVX_LOCK_DROP ? F_UNLCK : F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(offset);
  range.l_len = 1;
  if (::fcntl(fd, operation == KVX_LOCK_TEST ? F_OFD_GETLK : F_OFD_SETLK, &range) < 0) {
    return errno == EACCES || errno == EAGAIN ? -EWOULDBLOCK : -errno;
  }
  return operation == KVX_LOCK_TEST && range.l_type != F_UNLCK ? -EWOULDBLOCK : 0;
}
int libc_mmap(uint64_t length, void **out) {
  void *address = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return -errno;
  // Never shared with a fork's child: a page that is would be copied at this process's next write to it, and
  // a transfer under way would go on with the page that the child has.
  if (::madvise(address, length, MADV_DONTFORK) < 0) {
    const int error = errno;
    ::munmap(address, length);
    return -error;
  }
#ifdef MADV_HUGEPAGE
  ::madvise(address, length, MADV_HUGEPAGE);  // fewer pages for direct I/O to pin; fine without
#endif
  *out = address;
  return 0;
}

constexpr Calls kLibc = {libc_open,    libc_close,     libc_pread,     libc_pwrite, libc_preadv,
                         libc_pwritev, libc_fallocate, libc_ftruncate, libc_fsync,  libc_fdatasync,
                         libc_size,    libc_dioalign,  libc_unlink,    libc_rename, libc_mkdir,
                         libc_lock,    libc_mmap,      &kUringLibc};

// ---- fault rules ------------------------------------------------------------------------------------------

struct Rule {
  kvx_fault fault;
  uint64_t matched = 0;
  uint64_t hits = 0;
};

// Leaked on purpose: a thread that hangs in a call may outlive every destructor.
struct Faults {
  std::mutex mutex;
  std::condition_variable released;
  std::vector<Rule> rules;
  uint64_t releases = 0;  // a hanging call waits for the next one ...
  bool holding = false;   // ... unless no rule was added since the last
};
Faults &g_faults = *new Faults;
// Rules hold in a fork's child too: they are changed only where a test begins or ends. So does `holding`.
const AfterFork g_renew_faults([] {
  new (&g_faults.mutex) std::mutex;
  new (&g_faults.released) std::condition_variable;
});

std::atomic<const Calls *> g_table{&kLibc};
std::atomic<uint64_t> g_calls[KVX_OP_COUNT];

bool valid(const kvx_fault &rule) {
  const bool moves = rule.op == KVX_OP_PREAD || rule.op == KVX_OP_PWRITE || rule.op == KVX_OP_URING_COMPLETE;
  const bool counts = rule.op == KVX_OP_URING_REGISTER || rule.op == KVX_OP_URING_SUBMIT;
  if (rule.op < 0 || rule.op >= KVX_OP_COUNT) return false;
  switch (rule.action) {
    case KVX_FAULT_ERRNO:
      return rule.arg > 0 && rule.arg < 4096;
    case KVX_FAULT_SHORT:
      return moves || counts;
    case KVX_FAULT_FLIP:
      return rule.op == KVX_OP_PREAD || rule.op == KVX_OP_URING_COMPLETE;
    case KVX_FAULT_DELAY:
    case KVX_FAULT_HANG:
    case KVX_FAULT_KILL_BEFORE:
    case KVX_FAULT_KILL_AFTER:
      return true;
    default:
      return false;
  }
}

bool in_range(const kvx_fault &rule, uint64_t offset, uint64_t n) {
  if (n == 0 || rule.offset_lo >= rule.offset_hi) return false;
  uint64_t end;
  if (__builtin_add_overflow(offset, n, &end)) end = UINT64_MAX;
  return end > rule.offset_lo && (offset < rule.offset_hi || rule.offset_hi == UINT64_MAX);
}

}  // namespace

Verdict decide(int op, bool ranged, uint64_t offset, uint64_t n) {
  Faults &state = g_faults;
  std::lock_guard<std::mutex> lock(state.mutex);
  for (Rule &rule : state.rules) {
    if (rule.fault.op != op || (ranged && !in_range(rule.fault, offset, n))) continue;
    const uint64_t seen = rule.matched++;
    if (seen < rule.fault.after) continue;
    if (rule.fault.times != 0 && seen - rule.fault.after >= rule.fault.times) continue;
    ++rule.hits;
    return {rule.fault, state.releases};
  }
  return {};
}

void hang(uint64_t releases) {
  Faults &state = g_faults;
  std::unique_lock<std::mutex> lock(state.mutex);
  state.released.wait(lock, [&] { return !state.holding || state.releases != releases; });
}

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

namespace {

template <class Call>
auto plain(int op, Call call) -> decltype(call()) {
  return faulty(decide(op, false, 0, 0), [&](uint64_t) { return call(); });
}

// A transfer cut short at any byte. O_DIRECT refuses odd lengths, so the piece goes through a second
// description of the file that has not the flag.
class Buffered {
 public:
  Buffered(int fd, int flags) {
    char path[32];
    std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    const int status = ::fcntl(fd, F_GETFL);
    fd_ = status >= 0 && (status & O_DIRECT) ? ::open(path, flags | O_CLOEXEC) : -1;
    used_ = fd_ >= 0 ? fd_ : fd;
  }
  ~Buffered() {
    if (fd_ >= 0) ::close(fd_);
  }
  Buffered(const Buffered &) = delete;
  Buffered &operator=(const Buffered &) = delete;
  int fd() const { return used_; }

 private:
  int fd_, used_;
};

int64_t cut_pread(int fd, void *buf, uint64_t n, uint64_t offset, uint64_t limit) {
  if (limit >= n) return libc_pread(fd, buf, n, offset);
  return limit == 0 ? 0 : libc_pread(Buffered(fd, O_RDONLY).fd(), buf, limit, offset);
}
int64_t cut_pwrite(int fd, const void *buf, uint64_t n, uint64_t offset, uint64_t limit) {
  if (limit >= n) return libc_pwrite(fd, buf, n, offset);
  return limit == 0 ? 0 : libc_pwrite(Buffered(fd, O_WRONLY).fd(), buf, limit, offset);
}

// The first `limit` bytes of some places.
std::vector<::iovec> first_bytes(const ::iovec *places, int count, uint64_t limit) {
  std::vector<::iovec> out(places, places + count);
  for (::iovec &place : out) {
    place.iov_len = place.iov_len < limit ? place.iov_len : limit;
    limit -= place.iov_len;
  }
  return out;
}
uint64_t total(const ::iovec *places, int count) {
  uint64_t n = 0;
  for (int i = 0; i < count; ++i) n += places[i].iov_len;
  return n;
}

}  // namespace

int64_t cut_preadv(int fd, const ::iovec *to, int count, uint64_t offset, uint64_t limit) {
  if (limit >= total(to, count)) return libc_preadv(fd, to, count, offset);
  if (limit == 0) return 0;
  return libc_preadv(Buffered(fd, O_RDONLY).fd(), first_bytes(to, count, limit).data(), count, offset);
}
int64_t cut_pwritev(int fd, const ::iovec *from, int count, uint64_t offset, uint64_t limit) {
  if (limit >= total(from, count)) return libc_pwritev(fd, from, count, offset);
  if (limit == 0) return 0;
  return libc_pwritev(Buffered(fd, O_WRONLY).fd(), first_bytes(from, count, limit).data(), count, offset);
}

void flip(const ::iovec *places, uint64_t at) {
  for (; at >= places->iov_len; ++places) at -= places->iov_len;
  static_cast<uint8_t *>(places->iov_base)[at] ^= 1;
}

namespace {

// ---- the faulty table -------------------------------------------------------------------------------------

int faulty_open(const char *path, int flags, int mode) {
  return plain(KVX_OP_OPEN, [&] { return libc_open(path, flags, mode); });
}
int faulty_close(int fd) {
  const Verdict verdict = decide(KVX_OP_CLOSE, false, 0, 0);
  if (verdict.fault.action == KVX_FAULT_ERRNO) libc_close(fd);  // Linux closes it, whatever it answers
  return faulty(verdict, [&](uint64_t) { return libc_close(fd); });
}
int64_t faulty_pread(int fd, void *buf, uint64_t n, uint64_t offset) {
  const Verdict verdict = decide(KVX_OP_PREAD, true, offset, n);
  const kvx_fault &rule = verdict.fault;
  const int64_t got = faulty(verdict, [&](uint64_t limit) { return cut_pread(fd, buf, n, offset, limit); });
  if (rule.action == KVX_FAULT_FLIP && got > 0 && rule.arg < static_cast<uint64_t>(got)) {
    static_cast<uint8_t *>(buf)[rule.arg] ^= 1;
  }
  return got;
}
int64_t faulty_preadv(int fd, const ::iovec *to, int count, uint64_t offset) {
  const Verdict verdict = decide(KVX_OP_PREAD, true, offset, total(to, count));
  const kvx_fault &rule = verdict.fault;
  const int64_t got =
      faulty(verdict, [&](uint64_t limit) { return cut_preadv(fd, to, count, offset, limit); });
  if (rule.action == KVX_FAULT_FLIP && got > 0 && rule.arg < static_cast<uint64_t>(got)) {
    flip(to, rule.arg);
  }
  return got;
}
int64_t faulty_pwritev(int fd, const ::iovec *from, int count, uint64_t offset) {
  return faulty(decide(KVX_OP_PWRITE, true, offset, total(from, count)),
                [&](uint64_t limit) { return cut_pwritev(fd, from, count, offset, limit); });
}
int64_t faulty_pwrite(int fd, const void *buf, uint64_t n, uint64_t offset) {
  return faulty(decide(KVX_OP_PWRITE, true, offset, n),
                [&](uint64_t limit) { return cut_pwrite(fd, buf, n, offset, limit); });
}
int faulty_fallocate(int fd, uint64_t length) {
  return plain(KVX_OP_FALLOCATE, [&] { return libc_fallocate(fd, length); });
}
int faulty_ftruncate(int fd, uint64_t length) {
  return plain(KVX_OP_FTRUNCATE, [&] { return libc_ftruncate(fd, length); });
}
int faulty_fsync(int fd) {
  return plain(KVX_OP_FSYNC, [&] { return libc_fsync(fd); });
}
int faulty_fdatasync(int fd) {
  return plain(KVX_OP_FSYNC, [&] { return libc_fdatasync(fd); });
}
int64_t faulty_size(int fd) {
  return plain(KVX_OP_FSTAT, [&] { return libc_size(fd); });
}
int faulty_dioalign(int fd, uint32_t *memory_align, uint32_t *offset_align) {
  return plain(KVX_OP_FSTAT, [&] { return libc_dioalign(fd, memory_align, offset_align); });
}
int faulty_unlink(const char *path) {
  return plain(KVX_OP_UNLINK, [&] { return libc_unlink(path); });
}
int faulty_rename(const char *from, const char *to) {
  return plain(KVX_OP_RENAME, [&] { return libc_rename(from, to); });
}
int faulty_mkdir(const char *path, int mode) {
  return plain(KVX_OP_MKDIR, [&] { return libc_mkdir(path, mode); });
}
int faulty_lock(int fd, uint64_t offset, int operation) {
  return plain(KVX_OP_LOCK, [&] { return libc_lock(fd, offset, operation); });
}
int faulty_mmap(uint64_t length, void **out) {
  return plain(KVX_OP_MMAP, [&] { return libc_mmap(length, out); });
}

constexpr Calls kFaulty = {
    faulty_open,      faulty_close,     faulty_pread, faulty_pwrite,    faulty_preadv, faulty_pwritev,
    faulty_fallocate, faulty_ftruncate, faulty_fsync, faulty_fdatasync, faulty_size,   faulty_dioalign,
    faulty_unlink,    faulty_rename,    faulty_mkdir, faulty_lock,      faulty_mmap,   &kUringFaulty};

}  // namespace

const Calls &calls(kvx_op op) {
  g_calls[op].fetch_add(1, std::memory_order_relaxed);
  return *g_table.load(std::memory_order_acquire);
}

const Calls &plain_calls() { return kLibc; }

void unmap(void *address, uint64_t length) { ::munmap(address, length); }

}  // namespace kvx

using kvx::calls;

extern "C" {

int kvx_fault_add(const kvx_fault *rule) {
  if (rule == nullptr || !kvx::valid(*rule)) return -EINVAL;
  kvx::Faults &state = kvx::g_faults;
  std::lock_guard<std::mutex> lock(state.mutex);
  try {
    state.rules.push_back({*rule});
  } catch (const std::bad_alloc &) {
    return -ENOMEM;
  }
  state.holding = true;
  kvx::g_table.store(&kvx::kFaulty, std::memory_order_release);
  return static_cast<int>(state.rules.size() - 1);
}

uint64_t kvx_fault_hits(int rule) {
  kvx::Faults &state = kvx::g_faults;
  std::lock_guard<std::mutex> lock(state.mutex);
  return rule >= 0 && static_cast<size_t>(rule) < state.rules.size() ? state.rules[rule].hits : 0;
}

void kvx_fault_release(void) {
  kvx::Faults &state = kvx::g_faults;
  std::lock_guard<std::mutex> lock(state.mutex);
  ++state.releases;
  state.holding = false;
  state.released.notify_all();
}

void kvx_fault_clear(void) {
  kvx::Faults &state = kvx::g_faults;
  std::lock_guard<std::mutex> lock(state.mutex);
  kvx::g_table.store(&kvx::kLibc, std::memory_order_release);
  state.rules.clear();
  ++state.releases;
  state.holding = false;
  state.released.notify_all();
}

uint64_t kvx_op_calls(int op) {
  return op >= 0 && op < KVX_OP_COUNT ? kvx::g_calls[op].load(std::memory_order_relaxed) : 0;
}

int kvx_sys_open(const char *path, int flags, int mode) { return calls(KVX_OP_OPEN).open(path, flags, mode); }
int kvx_sys_close(int fd) { return calls(KVX_OP_CLOSE).close(fd); }
int64_t kvx_sys_pread(int fd, void *buf, uint64_t n, uint64_t offset) {
  return calls(KVX_OP_PREAD).pread(fd, buf, n < kvx::kMaxTransfer ? n : kvx::kMaxTransfer, offset);
}
int64_t kvx_sys_pwrite(int fd, const void *buf, uint64_t n, uint64_t offset) {
  return calls(KVX_OP_PWRITE).pwrite(fd, buf, n < kvx::kMaxTransfer ? n : kvx::kMaxTransfer, offset);
}
int kvx_sys_fallocate(int fd, uint64_t length) { return calls(KVX_OP_FALLOCATE).fallocate(fd, length); }
int kvx_sys_ftruncate(int fd, uint64_t length) { return calls(KVX_OP_FTRUNCATE).ftruncate(fd, length); }
int kvx_sys_fsync(int fd) { return calls(KVX_OP_FSYNC).fsync(fd); }
int kvx_sys_fdatasync(int fd) { return calls(KVX_OP_FSYNC).fdatasync(fd); }
int64_t kvx_sys_size(int fd) { return calls(KVX_OP_FSTAT).size(fd); }
int kvx_sys_unlink(const char *path) { return calls(KVX_OP_UNLINK).unlink(path); }
int kvx_sys_rename(const char *from, const char *to) { return calls(KVX_OP_RENAME).rename(from, to); }
int kvx_sys_mkdir(const char *path, int mode) { return calls(KVX_OP_MKDIR).mkdir(path, mode); }
int kvx_sys_lock(int fd, uint64_t offset, int operation) {
  return calls(KVX_OP_LOCK).lock(fd, offset, operation);
}
int kvx_sys_dioalign(int fd, uint32_t *memory_align, uint32_t *offset_align) {
  return calls(KVX_OP_FSTAT).dioalign(fd, memory_align, offset_align);
}

}  // extern "C"
