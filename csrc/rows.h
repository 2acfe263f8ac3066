// A rank's part of host rows, and the copies between its pages and the rows (section 7 of kvx.h).
#ifndef KVX_ROWS_H
#define KVX_ROWS_H

#include <cstdint>
#include <vector>

#include "kvx.h"

namespace kvx {

// Fragments that touch on both sides were joined into one.
struct RowCell {
  uint8_t *tensor;
  uint64_t block_stride;
  uint8_t *cell;
  uint64_t page_stride;
  uint32_t first_run, end_run;  // of the plan's
  uint32_t num_writers, writer_index;
  uint64_t page_bytes;  // that a page's runs copy
  uint64_t least_fragment;
};

struct RowGroup {
  uint32_t first_cell, end_cell;
  uint64_t num_blocks;  // of the tensor that has the fewest
  uint64_t page_bytes;  // of all cells
};

}  // namespace kvx

// Immutable after kvx_row_plan_new().
struct kvx_row_plan {
  std::vector<kvx_row_run> runs;
  std::vector<kvx::RowCell> cells;
  std::vector<kvx::RowGroup> groups;
  uint64_t row_stride;
  uint64_t num_pages;  // of all rows
  uint32_t blocks_per_chunk;
};

#endif
