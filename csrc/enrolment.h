// Files that are registered with rings, so that a request need not look its descriptor up.
#ifndef KVX_ENROLMENT_H
#define KVX_ENROLMENT_H

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "files.h"

namespace kvx {

// A ring's table. A file comes in when the ring first moves bytes of it, and goes when it is closed: or else
// one that was removed would keep its room on the drive. A fork's child, which shares the ring, knows none of
// its parent's tables, and changes nothing.
class FileTable {
 public:
  // An empty table; nullptr where the kernel refuses, and *error says why.
  static std::shared_ptr<FileTable> make(int ring, int *error);
  int place(kvx_file *file);  // its number, or -1: none is left, or it was refused
  void drop(kvx_file *file);
  void retire();  // the ring is about to be closed

 private:
  FileTable(int ring, uint32_t places);
  bool update(uint32_t place, int fd);

  std::mutex mutex_;  // the ring's thread, and whoever closes a file
  int ring_;
  std::unordered_map<uint64_t, uint32_t> places_;  // by the file's number
  std::vector<uint32_t> free_;
};

// A file is about to be closed: every table drops it.
void dismiss(kvx_file *file);

}  // namespace kvx

#endif
