// Fault rules (section 2 of kvx.h), for those who make the calls of the faulty table. calls.cpp keeps them.
#ifndef KVX_FAULTS_H
#define KVX_FAULTS_H

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <thread>

#include "kvx.h"

namespace kvx {

// What a call has to suffer: `fault.action` is 0 where no rule hits.
struct Verdict {
  kvx_fault fault;
  uint64_t releases;  // up to now
};
// Asks the rules, which count it. `ranged`: the call moves [offset, offset + n) of a file.
Verdict decide(int op, bool ranged, uint64_t offset, uint64_t n);
void hang(uint64_t releases);  // until the next release
[[noreturn]] void die();
void flip(const ::iovec *places, uint64_t at);  // bit 0 of a byte of theirs

// Runs `call` as the verdict wants it. `call(limit)` makes the call, moving at most `limit` bytes.
template <class Call>
auto faulty(const Verdict &verdict, Call call) -> decltype(call(uint64_t{0})) {
  const kvx_fault &rule = verdict.fault;
  switch (rule.action) {
    case KVX_FAULT_ERRNO:
      return -static_cast<int>(rule.arg);
    case KVX_FAULT_SHORT:
      return call(rule.arg);
    case KVX_FAULT_DELAY:
      std::this_thread::sleep_for(std::chrono::milliseconds(rule.arg));
      break;
    case KVX_FAULT_HANG:
      hang(verdict.releases);
      break;
    case KVX_FAULT_KILL_BEFORE:
      die();
    case KVX_FAULT_KILL_AFTER:
      call(rule.arg > 0 ? rule.arg : UINT64_MAX);
      die();
    default:
      break;
  }
  return call(UINT64_MAX);
}

// A transfer of at most `limit` bytes, which may be odd also with O_DIRECT.
int64_t cut_preadv(int fd, const ::iovec *to, int count, uint64_t offset, uint64_t limit);
int64_t cut_pwritev(int fd, const ::iovec *from, int count, uint64_t offset, uint64_t limit);

}  // namespace kvx

#endif
