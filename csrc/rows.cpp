// Pages <-> host rows that ranks share byte by byte.
#include "rows.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <new>
#include <thread>

#include "checksum.h"

namespace kvx {
namespace {

constexpr uint64_t kFetchAhead =
    1024;  // bytes of fragments between the one that is copied and the one fetched

}  // namespace
}  // namespace kvx

#define KVX_ISA_FILE "row_kernels.h"
#include "isa.h"

namespace kvx {
namespace {

using CopyPage = void (*)(const kvx_row_run *, const kvx_row_run *, uint8_t *, uint8_t *);
constexpr const CopyPage *kCopyPage[] = KVX_FOR_EACH_ISA(kCopyPage);
constexpr void (*kEndStream[])() = KVX_FOR_EACH_ISA(end_stream);

// Jobs of so many bytes and more are written around the caches, where fragments have whole lines to write.
constexpr uint64_t kStreamBytes = uint64_t{16} << 20;
constexpr uint64_t kStreamFragment = 256;
// What a thread takes at a time, and work for which another thread is started.
constexpr uint64_t kUnitBytes = uint64_t{512} << 10;

// ---- copying ----------------------------------------------------------------------------------------------

// Consecutive pages of one group.
struct Unit {
  const RowGroup *group;
  uint64_t first, end;  // of the job's arrays
};

struct RowJob {
  const kvx_row_plan &plan;
  const int64_t *block_ids;
  const int64_t *pages;
  bool gather, stream;
  std::vector<Unit> units;
  std::atomic<uint64_t> next{0};
  std::atomic<uint64_t> nbytes{0};
};

// The copies of one page into all cells of its group. Returns the bytes.
uint64_t copy_cells(const RowJob &job, const RowGroup &group, uint64_t block, uint64_t page) {
  const kvx_row_plan &plan = job.plan;
  const uint64_t row = page / plan.blocks_per_chunk, position = page % plan.blocks_per_chunk;
  const CopyPage *const copy = kCopyPage[static_cast<int>(isa())];
  uint64_t nbytes = 0;
  for (uint32_t c = group.first_cell; c < group.end_cell; ++c) {
    const RowCell &cell = plan.cells[c];
    if (job.gather && page % cell.num_writers != cell.writer_index) continue;
    const kvx_row_run *const runs = plan.runs.data();
    const bool stream = job.stream && cell.least_fragment >= kStreamFragment;
    copy[(job.gather ? 1 : 0) | (stream ? 2 : 0)](
        runs + cell.first_run, runs + cell.end_run, cell.tensor + block * cell.block_stride,
        cell.cell + row * plan.row_stride + position * cell.page_stride);
    nbytes += cell.page_bytes;
  }
  return nbytes;
}

void run_units(RowJob &job) {
  for (;;) {
    const uint64_t u = job.next.fetch_add(1, std::memory_order_relaxed);
    if (u >= job.units.size()) return;
    const Unit &unit = job.units[u];
    uint64_t nbytes = 0;
    for (uint64_t i = unit.first; i < unit.end; ++i) {
      nbytes += copy_cells(job, *unit.group, static_cast<uint64_t>(job.block_ids[i]),
                           static_cast<uint64_t>(job.pages[i]));
    }
    if (job.stream) kEndStream[static_cast<int>(isa())]();
    job.nbytes.fetch_add(nbytes, std::memory_order_relaxed);
  }
}

// Whether all ids are of blocks and pages that there are.
bool in_range(const kvx_row_plan &plan, const int64_t *block_ids, const int64_t *pages,
              const uint64_t *group_pages) {
  uint64_t i = 0;
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    for (const uint64_t end = i + group_pages[g]; i < end; ++i) {
      if (static_cast<uint64_t>(block_ids[i]) >= plan.groups[g].num_blocks) return false;  // or negative
      if (static_cast<uint64_t>(pages[i]) >= plan.num_pages) return false;
    }
  }
  return true;
}

int copy_rows(const kvx_row_plan *plan, const int64_t *block_ids, const int64_t *pages,
              const uint64_t *group_pages, bool gather, int threads, uint64_t *nbytes) try {
  if (plan == nullptr || group_pages == nullptr || nbytes == nullptr) return -EINVAL;
  uint64_t total = 0, bytes = 0;
  for (size_t g = 0; g < plan->groups.size(); ++g) {
    uint64_t of_group;
    if (__builtin_add_overflow(total, group_pages[g], &total) ||
        __builtin_mul_overflow(group_pages[g], plan->groups[g].page_bytes, &of_group) ||
        __builtin_add_overflow(bytes, of_group, &bytes)) {
      return -EINVAL;
    }
  }
  *nbytes = 0;
  if (total == 0) return 0;
  if (block_ids == nullptr || pages == nullptr || !in_range(*plan, block_ids, pages, group_pages)) {
    return -EINVAL;
  }
  RowJob job{*plan, block_ids, pages, gather, bytes >= kStreamBytes, {}, {}, {}};
  uint64_t first = 0;
  for (size_t g = 0; g < plan->groups.size(); ++g) {
    const RowGroup &group = plan->groups[g];
    const uint64_t at_a_time = std::max<uint64_t>(1, kUnitBytes / std::max<uint64_t>(1, group.page_bytes));
    for (uint64_t end = first + group_pages[g]; first < end;) {
      const uint64_t next = std::min(end, first + at_a_time);
      job.units.push_back({&group, first, next});
      first = next;
    }
  }
  const uint64_t useful = std::min<uint64_t>(job.units.size(), bytes / kUnitBytes);
  std::vector<std::thread> helpers;
  try {
    for (int t = 1; t < threads && static_cast<uint64_t>(t) < useful; ++t) {
      helpers.emplace_back([&job] { run_units(job); });
    }
  } catch (const std::exception &) {
    // Fewer threads, then.
  }
  run_units(job);
  for (std::thread &helper : helpers) helper.join();
  *nbytes = job.nbytes.load(std::memory_order_relaxed);
  return 0;
} catch (const std::exception &) {
  return -ENOMEM;
}

// ---- making a plan ----------------------------------------------------------------------------------------

// Where the last fragment of a run ends on one side; false where the address space does.
bool end_of(uint64_t offset, uint64_t stride, const kvx_row_run &run, uint64_t *end) {
  uint64_t steps;
  return !__builtin_mul_overflow(run.num_fragments - 1, stride, &steps) &&
         !__builtin_add_overflow(offset, steps, end) && !__builtin_add_overflow(*end, run.fragment_size, end);
}

// Appends a cell's runs, joined where they touch on both sides. The caller has seen that nothing overflows.
void join_runs(const kvx_row_run *run, const kvx_row_run *end, size_t first, std::vector<kvx_row_run> *out) {
  for (; run != end; ++run) {
    kvx_row_run next = *run;
    if (next.num_fragments == 1 ||
        (next.local_stride == next.fragment_size && next.canonical_stride == next.fragment_size)) {
      next.fragment_size *= next.num_fragments;
      next.num_fragments = 1;
      next.local_stride = next.canonical_stride = next.fragment_size;
    }
    kvx_row_run *const last = out->size() > first ? &out->back() : nullptr;
    if (last != nullptr && last->num_fragments == 1 && next.num_fragments == 1 &&
        last->local_offset + last->fragment_size == next.local_offset &&
        last->canonical_offset + last->fragment_size == next.canonical_offset) {
      last->fragment_size += next.fragment_size;
      last->local_stride = last->canonical_stride = last->fragment_size;
    } else {
      out->push_back(next);
    }
  }
}

// Whether a cell lies within its row, its tensor in the address space, and its runs in both.
bool is_sound(const kvx_row_cell &cell, const kvx_row_run *runs, uint64_t num_runs, const kvx_row_plan &plan,
              uint64_t num_rows) {
  uint64_t bytes, rows, end;
  if (cell.tensor_base == 0 || cell.cell_base == 0 || cell.num_blocks == 0 || cell.num_runs == 0 ||
      cell.num_writers == 0 || cell.writer_index >= cell.num_writers || cell.first_run > num_runs ||
      cell.num_runs > num_runs - cell.first_run || cell.num_blocks > INT64_MAX) {
    return false;
  }
  if (__builtin_mul_overflow(cell.page_stride, plan.blocks_per_chunk, &bytes) || bytes > plan.row_stride ||
      __builtin_mul_overflow(num_rows, plan.row_stride, &rows) ||
      __builtin_add_overflow(cell.cell_base, rows, &end) ||
      __builtin_mul_overflow(cell.num_blocks - 1, cell.block_stride, &bytes) ||
      __builtin_add_overflow(bytes, cell.local_bytes, &bytes) ||
      __builtin_add_overflow(cell.tensor_base, bytes, &end)) {
    return false;
  }
  for (const kvx_row_run *run = runs + cell.first_run; run != runs + cell.first_run + cell.num_runs; ++run) {
    uint64_t copied, local, canonical;
    if (run->fragment_size == 0 || run->num_fragments == 0 ||
        __builtin_mul_overflow(run->fragment_size, run->num_fragments, &copied) ||
        !end_of(run->local_offset, run->local_stride, *run, &local) || local > cell.local_bytes ||
        !end_of(run->canonical_offset, run->canonical_stride, *run, &canonical) ||
        canonical > cell.page_stride) {
      return false;
    }
  }
  return true;
}

int build(const kvx_row_cell *cells, const kvx_row_run *runs, uint64_t num_runs, const uint32_t *group_cells,
          uint32_t num_groups, uint64_t num_rows, kvx_row_plan *plan) {
  for (uint32_t g = 0; g < num_groups; ++g) {
    RowGroup group = {static_cast<uint32_t>(plan->cells.size()), 0, UINT64_MAX, 0};
    for (uint32_t c = 0; c < group_cells[g]; ++c, ++cells) {
      if (!is_sound(*cells, runs, num_runs, *plan, num_rows)) return -EINVAL;
      const size_t first = plan->runs.size();
      const kvx_row_run *const begin = runs + cells->first_run;
      join_runs(begin, begin + cells->num_runs, first, &plan->runs);
      uint64_t page_bytes = 0, least = UINT64_MAX;
      for (size_t r = first; r < plan->runs.size(); ++r) {
        page_bytes += plan->runs[r].fragment_size * plan->runs[r].num_fragments;
        least = std::min(least, plan->runs[r].fragment_size);
      }
      plan->cells.push_back({reinterpret_cast<uint8_t *>(cells->tensor_base), cells->block_stride,
                             reinterpret_cast<uint8_t *>(cells->cell_base), cells->page_stride,
                             static_cast<uint32_t>(first), static_cast<uint32_t>(plan->runs.size()),
                             cells->num_writers, cells->writer_index, page_bytes, least});
      group.num_blocks = std::min(group.num_blocks, cells->num_blocks);
      group.page_bytes += page_bytes;
    }
    group.end_cell = static_cast<uint32_t>(plan->cells.size());
    plan->groups.push_back(group);
  }
  return 0;
}

}  // namespace
}  // namespace kvx

extern "C" {

int kvx_row_plan_new(const kvx_row_cell *cells, const kvx_row_run *runs, uint64_t num_runs,
                     const uint32_t *group_cells, uint32_t num_groups, uint64_t row_stride, uint64_t num_rows,
                     uint32_t blocks_per_chunk, kvx_row_plan **out) {
  if (cells == nullptr || runs == nullptr || group_cells == nullptr || out == nullptr || num_groups == 0 ||
      blocks_per_chunk == 0 || num_rows == 0 || num_runs > UINT32_MAX) {
    return -EINVAL;
  }
  uint64_t num_pages;
  if (__builtin_mul_overflow(num_rows, blocks_per_chunk, &num_pages) || num_pages > INT64_MAX) return -EINVAL;
  kvx_row_plan *plan = nullptr;
  int result;
  try {
    plan = new kvx_row_plan{{}, {}, {}, row_stride, num_pages, blocks_per_chunk};
    result = kvx::build(cells, runs, num_runs, group_cells, num_groups, num_rows, plan);
  } catch (const std::exception &) {
    result = -ENOMEM;
  }
  if (result != 0) {
    delete plan;
    return result;
  }
  *out = plan;
  return 0;
}

void kvx_row_plan_free(kvx_row_plan *plan) { delete plan; }

int kvx_row_gather(const kvx_row_plan *plan, const int64_t *block_ids, const int64_t *pages,
                   const uint64_t *group_pages, int threads, uint64_t *nbytes) {
  return kvx::copy_rows(plan, block_ids, pages, group_pages, true, threads, nbytes);
}

int kvx_row_scatter(const kvx_row_plan *plan, const int64_t *block_ids, const int64_t *pages,
                    const uint64_t *group_pages, int threads, uint64_t *nbytes) {
  return kvx::copy_rows(plan, block_ids, pages, group_pages, false, threads, nbytes);
}

}  // extern "C"
