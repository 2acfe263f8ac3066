// What is left of a process in the child of its fork.
#ifndef KVX_FORKS_H
#define KVX_FORKS_H

#include <pthread.h>

namespace kvx {

// Made at load time beside what all threads of a process share, such as a lock: in a fork's child `renew`
// makes that anew, in its place. Whoever had the lock is not there to give it back; what it guarded may be
// half changed, and is the parent's anyway. Nothing of the old is destroyed. The fork waits for nobody.
class AfterFork {
 public:
  explicit AfterFork(void (*renew)()) { ::pthread_atfork(nullptr, nullptr, renew); }
};

}  // namespace kvx

#endif
