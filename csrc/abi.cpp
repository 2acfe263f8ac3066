// What the ctypes face checks before it trusts the rest.
#include <cstring>

#include "checksum.h"
#include "kvx.h"

extern "C" {

uint32_t kvx_abi_version(void) { return KVX_ABI_VERSION; }

const char *kvx_features(void) {
  switch (kvx::isa()) {
    case kvx::Isa::kAvx512:
      return "avx512,avx2,sse4.2";
    case kvx::Isa::kAvx2:
      return "avx2,sse4.2";
    case kvx::Isa::kScalar:
      break;
  }
  return "scalar";
}

size_t kvx_struct_size(const char *name) {
  static constexpr struct {
    const char *name;
    size_t size;
  } kSizes[] = {
#define KVX_SIZE(type) {#type, sizeof(type)}
      KVX_SIZE(kvx_fault),    KVX_SIZE(kvx_slot_layout),   KVX_SIZE(kvx_trailer), KVX_SIZE(kvx_tensor),
      KVX_SIZE(kvx_run),      KVX_SIZE(kvx_engine_config), KVX_SIZE(kvx_chunk),   KVX_SIZE(kvx_job),
      KVX_SIZE(kvx_result),   KVX_SIZE(kvx_chunk_error),   KVX_SIZE(kvx_stats),   KVX_SIZE(kvx_row_run),
      KVX_SIZE(kvx_row_cell),
#undef KVX_SIZE
  };
  if (name == nullptr) return 0;
  for (const auto &entry : kSizes) {
    if (std::strcmp(entry.name, name) == 0) return entry.size;
  }
  return 0;
}

}  // extern "C"
