#include "enrolment.h"

#include <sys/resource.h>

#include <algorithm>
#include <new>

#include "calls.h"
#include "forks.h"
#include "ring_abi.h"

namespace kvx {
namespace {

// All tables of this process. Leaked on purpose: a file may be closed while destructors run.
struct Tables {
  std::mutex mutex;  // never held across a call
  std::vector<std::shared_ptr<FileTable>> all;
};
Tables &g_tables = *new Tables;
const AfterFork g_renew_tables([] { new (&g_tables) Tables; });

constexpr uint32_t kMostFiles = 1024;

}  // namespace

FileTable::FileTable(int ring, uint32_t places) : ring_(ring) {
  for (uint32_t place = places; place-- > 0;) free_.push_back(place);
}

std::shared_ptr<FileTable> FileTable::make(int ring, int *error) {
  ::rlimit limit = {};  // the kernel takes no larger table than that
  const bool known = ::getrlimit(RLIMIT_NOFILE, &limit) == 0;
  const auto places = static_cast<uint32_t>(std::min<uint64_t>(kMostFiles, known ? limit.rlim_cur : 64));
  std::vector<int32_t> none(places, -1);
  *error = calls(KVX_OP_URING_REGISTER).uring->enroll(ring, kRegisterFiles, none.data(), places);
  if (*error < 0) return nullptr;
  std::shared_ptr<FileTable> table(new FileTable(ring, places));
  std::lock_guard<std::mutex> lock(g_tables.mutex);
  g_tables.all.push_back(table);
  return table;
}

bool FileTable::update(uint32_t place, int fd) {
  int32_t value = fd;
  FilesUpdate change = {place, 0, reinterpret_cast<uintptr_t>(&value)};
  return calls(KVX_OP_URING_REGISTER).uring->enroll(ring_, kUpdateFiles, &change, 1) == 1;
}

int FileTable::place(kvx_file *file) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = places_.find(file->number); found != places_.end())
    return static_cast<int>(found->second);
  if (free_.empty()) return -1;
  const uint32_t place = free_.back();
  const auto entry = places_.emplace(file->number, place).first;  // first: it may find no memory
  if (!update(place, file->fd)) {
    places_.erase(entry);
    return -1;
  }
  free_.pop_back();
  file->enrolled = true;
  return static_cast<int>(place);
}

void FileTable::drop(kvx_file *file) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = places_.find(file->number);
  if (found == places_.end() || ring_ < 0) return;
  // A place that cannot be emptied is not used again.
  if (update(found->second, -1)) free_.push_back(found->second);
  places_.erase(found);
}

void FileTable::retire() {
  {
    std::lock_guard<std::mutex> lock(g_tables.mutex);
    auto &all = g_tables.all;
    all.erase(std::remove_if(all.begin(), all.end(), [&](const auto &table) { return table.get() == this; }),
              all.end());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  ring_ = -1;
}

void dismiss(kvx_file *file) {
  std::vector<std::shared_ptr<FileTable>> all;
  try {
    std::lock_guard<std::mutex> lock(g_tables.mutex);
    all = g_tables.all;
  } catch (const std::bad_alloc &) {
    return;  // it stays open until the rings are closed; no other file has its number
  }
  for (const auto &table : all) table->drop(file);
}

}  // namespace kvx
