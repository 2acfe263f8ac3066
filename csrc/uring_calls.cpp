// io_uring's system calls, and the faulty ones over them.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "calls.h"
#include "faults.h"

namespace kvx {
namespace {

// Numbers that are the same on every architecture; the C library's headers may be older.
constexpr long kSetup = 425, kEnter = 426, kRegister = 427;
constexpr unsigned kGetEvents = 1;  // IORING_ENTER_GETEVENTS

int or_errno(long result) { return result < 0 ? -errno : static_cast<int>(result); }

int plain_setup(uint32_t entries, void *params) { return or_errno(::syscall(kSetup, entries, params)); }
int plain_enroll(int ring, uint32_t opcode, void *argument, uint32_t count) {
  return or_errno(::syscall(kRegister, ring, opcode, argument, count));
}
int plain_enter(int ring, const Extent *, uint32_t count, uint32_t wait_for) {
  return or_errno(::syscall(kEnter, ring, count, wait_for, wait_for ? kGetEvents : 0, nullptr, size_t{0}));
}
int64_t plain_complete(int64_t result, Extent, const ::iovec *) { return result; }
Fate plain_fate(kvx_op, Extent) { return {}; }

int faulty_setup(uint32_t entries, void *params) {
  return faulty(decide(KVX_OP_URING_SETUP, false, 0, 0),
                [&](uint64_t) { return plain_setup(entries, params); });
}
int faulty_enroll(int ring, uint32_t opcode, void *argument, uint32_t count) {
  return faulty(decide(KVX_OP_URING_REGISTER, false, 0, 0), [&](uint64_t limit) {
    return plain_enroll(ring, opcode, argument, static_cast<uint32_t>(std::min<uint64_t>(count, limit)));
  });
}
int faulty_enter(int ring, const Extent *extents, uint32_t count, uint32_t wait_for) {
  Verdict verdict = {};
  for (uint32_t i = 0; i < count && !verdict.fault.action; ++i)
    verdict = decide(KVX_OP_URING_SUBMIT, true, extents[i].offset, extents[i].bytes);
  return faulty(verdict, [&](uint64_t limit) {
    const bool cut = limit < count;
    return plain_enter(ring, extents, cut ? static_cast<uint32_t>(limit) : count, cut ? 0 : wait_for);
  });
}
int64_t faulty_complete(int64_t result, Extent extent, const ::iovec *places) {
  const Verdict verdict = decide(KVX_OP_URING_COMPLETE, true, extent.offset, extent.bytes);
  const auto answer = [&](uint64_t limit) {
    return result < 0 || static_cast<uint64_t>(result) <= limit ? result : static_cast<int64_t>(limit);
  };
  const int64_t got = faulty(verdict, answer);
  const bool flips = verdict.fault.action == KVX_FAULT_FLIP && got > 0;
  if (flips && verdict.fault.arg < static_cast<uint64_t>(got)) flip(places, verdict.fault.arg);
  return got;
}
Fate faulty_fate(kvx_op op, Extent extent) {
  const Verdict verdict = decide(op, true, extent.offset, extent.bytes);
  return {verdict.fault, verdict.releases};
}

}  // namespace

const UringCalls kUringLibc = {plain_setup, plain_enroll, plain_enter, plain_complete, plain_fate};
const UringCalls kUringFaulty = {faulty_setup, faulty_enroll, faulty_enter, faulty_complete, faulty_fate};

}  // namespace kvx
