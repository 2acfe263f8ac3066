// The segment checksum and CRC32C (docs/format.md).
#ifndef KVX_CHECKSUM_H
#define KVX_CHECKSUM_H

#include <cstdint>

namespace kvx {

inline constexpr uint64_t kRowWords = 1024;  // words of a checksum row
inline constexpr uint64_t kRowBytes = kRowWords * 4;

// Sum of `n` bytes whose first word is number `first_word` of its segment. Pieces (whole words, except the
// last) may be summed apart and added modulo 2^64.
uint64_t checksum(const void *data, uint64_t n, uint64_t first_word);

uint32_t crc32c(const void *data, uint64_t n);

// The coefficient of row `row`; K2[r] in docs/format.md.
uint64_t row_coefficient(uint64_t row);
// K1 for one row, aligned to 64 bytes.
const uint32_t *column_coefficients();

// The instruction sets that the loops may use; decided once.
enum class Isa { kScalar, kAvx2, kAvx512 };
Isa isa();

}  // namespace kvx

#endif
