// Files are closed by threads that have nothing else to do: a close may never return.
#ifndef KVX_CLOSER_H
#define KVX_CLOSER_H

#include <chrono>

#include "files.h"

namespace kvx {

// Closes a file that nobody refers to any more, and waits for it, `patience` at most. While a close is under
// way that was waited for in vain, nobody waits.
void close_file(kvx_file *file, std::chrono::milliseconds patience);

}  // namespace kvx

#endif
