// The kernel's numbers for io_uring that headers of older kernels lack, or have as enumerators, which cannot
// be asked for. The structs that every header has are the header's own (ring.cpp).
#ifndef KVX_RING_ABI_H
#define KVX_RING_ABI_H

#include <cstdint>

namespace kvx {

constexpr uint32_t kRegisterBuffers = 0, kDropBuffers = 1, kRegisterFiles = 2, kUpdateFiles = 6, kProbe = 8;
constexpr uint8_t kReadv = 1, kWritev = 2, kReadFixed = 4, kWriteFixed = 5;
constexpr uint8_t kFixedFile = 1;                // IOSQE_FIXED_FILE
constexpr uint32_t kSingleMap = 1, kNoDrop = 2;  // IORING_FEAT_*

// struct io_uring_files_update
struct FilesUpdate {
  uint32_t offset, reserved;
  uint64_t fds;
};

// struct io_uring_probe, Linux 5.6
constexpr uint32_t kProbed = 8;  // operations asked about: all of those used are among the first
struct Probe {
  uint8_t last_op, ops_len;
  uint16_t reserved;
  uint32_t more[3];
  struct {
    uint8_t op, reserved;
    uint16_t flags;  // 1: supported
    uint32_t more;
  } ops[kProbed];
};
static_assert(sizeof(Probe) == 16 + 8 * kProbed, "as in linux/io_uring.h");

}  // namespace kvx

#endif
