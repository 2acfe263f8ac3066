// The segment checksum and CRC32C, with the instruction set chosen when the program runs.
#include "checksum.h"

#include <cstdlib>
#include <cstring>

#include "isa.h"
#include "kvx.h"

namespace kvx {
namespace {

constexpr uint64_t splitmix64(uint64_t x) {
  uint64_t z = x + 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// A bijection of `bits` bits.
constexpr uint32_t permute(uint32_t x, int bits) {
  const uint32_t mask = (uint32_t{1} << bits) - 1;
  const int half = (bits + 1) / 2;
  x = (x * 0x9E3779B1u) & mask;
  x ^= x >> half;
  x = (x * 0x85EBCA6Bu) & mask;
  return x ^ (x >> half);
}

// K1, and room for a vector that starts at its last word.
struct Columns {
  alignas(64) uint32_t k1[kRowWords + 16] = {};
  constexpr Columns() {
    for (uint32_t c = 0; c < kRowWords; ++c) {
      k1[c] = (static_cast<uint32_t>(splitmix64(c)) & 0xFFFFF800u) | (2 * permute(c, 10) + 1);
    }
  }
};
constexpr Columns kColumns;

constexpr uint32_t kPolynomial = 0x82F63B78;  // CRC32C, reflected

struct CrcTable {
  uint32_t at[8][256] = {};  // at[j][b]: byte b, j bytes before the end
  constexpr CrcTable() {
    for (uint32_t b = 0; b < 256; ++b) {
      uint32_t crc = b;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
      at[0][b] = crc;
    }
    for (uint32_t b = 0; b < 256; ++b) {
      for (int j = 1; j < 8; ++j) at[j][b] = (at[j - 1][b] >> 8) ^ at[0][at[j - 1][b] & 0xFF];
    }
  }
};
constexpr CrcTable kCrc;

uint32_t crc32c_table(uint32_t crc, const uint8_t *p, uint64_t n) {
  for (; n >= 8; p += 8, n -= 8) {
    crc ^= p[0] | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16 | uint32_t{p[3]} << 24;
    crc = kCrc.at[7][crc & 0xFF] ^ kCrc.at[6][crc >> 8 & 0xFF] ^ kCrc.at[5][crc >> 16 & 0xFF] ^
          kCrc.at[4][crc >> 24] ^ kCrc.at[3][p[4]] ^ kCrc.at[2][p[5]] ^ kCrc.at[1][p[6]] ^ kCrc.at[0][p[7]];
  }
  for (; n > 0; --n) crc = (crc >> 8) ^ kCrc.at[0][(crc ^ *p++) & 0xFF];
  return crc;
}

#if defined(__x86_64__)

// The instruction takes three cycles and one can start in each, so three strands of kStrand words run side by
// side. A strand is carried over those behind it by a multiplication with x^(8 * bytes) modulo the
// polynomial: one carry-less product with the constant below and one crc32, which brings another x^33.
constexpr uint64_t kStrand = 168;

constexpr uint32_t power_of_x(uint64_t exponent) {
  uint32_t value = 0x80000000;  // x^0 in reflected order
  for (; exponent > 0; --exponent) value = (value >> 1) ^ (value & 1 ? kPolynomial : 0);
  return value;
}

__attribute__((target("sse4.2,crc32"))) inline uint64_t crc_word(uint64_t crc, const uint8_t *p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return _mm_crc32_u64(crc, word);
}

__attribute__((target("sse4.2,crc32,pclmul"))) inline uint64_t carry_over(uint64_t crc, uint32_t power) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(crc)),
                                               _mm_cvtsi64_si128(static_cast<int64_t>(power)), 0);
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product)));
}

__attribute__((target("sse4.2,crc32,pclmul"))) uint32_t crc32c_sse(uint32_t start, const uint8_t *p,
                                                                   uint64_t n) {
  constexpr uint32_t kOver1 = power_of_x(64 * kStrand - 33), kOver2 = power_of_x(128 * kStrand - 33);
  uint64_t crc = start;
  for (; n >= 24 * kStrand; p += 24 * kStrand, n -= 24 * kStrand) {
    uint64_t middle = 0, last = 0;
    for (uint64_t i = 0; i < 8 * kStrand; i += 8) {
      crc = crc_word(crc, p + i);
      middle = crc_word(middle, p + 8 * kStrand + i);
      last = crc_word(last, p + 16 * kStrand + i);
    }
    crc = carry_over(crc, kOver2) ^ carry_over(middle, kOver1) ^ last;
  }
  for (; n >= 8; p += 8, n -= 8) crc = crc_word(crc, p);
  for (; n > 0; --n) crc = _mm_crc32_u8(static_cast<uint32_t>(crc), *p++);
  return static_cast<uint32_t>(crc);
}

const bool g_has_crc = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");

bool has_crc() { return g_has_crc && isa() != Isa::kScalar; }

#endif

Isa find_isa() {
  const char *const most = std::getenv("KVXFER_ISA");
  const auto allowed = [most](const char *name, const char *above) {
    return most == nullptr || std::strcmp(most, name) == 0 || std::strcmp(most, above) == 0;
  };
#if defined(__x86_64__)
  if (allowed("avx512", "avx512") && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("bmi2")) {
    return Isa::kAvx512;
  }
  if (allowed("avx2", "avx512") && __builtin_cpu_supports("avx2")) return Isa::kAvx2;
#else
  (void)allowed;
#endif
  return Isa::kScalar;
}

const Isa g_isa = find_isa();  // at load time: a fork's child would wait for ever for who was finding it

using SumBytes = uint64_t (*)(const uint8_t *, uint64_t, const uint32_t *);
constexpr SumBytes kSumBytes[] = KVX_FOR_EACH_ISA(sum_bytes);

}  // namespace

Isa isa() { return g_isa; }

const uint32_t *column_coefficients() { return kColumns.k1; }

uint64_t row_coefficient(uint64_t row) {
  constexpr uint64_t kLow33 = (uint64_t{1} << 33) - 1;
  return (splitmix64(1024 + row) & ~kLow33) | (uint64_t{permute(static_cast<uint32_t>(row), 22)} << 11) | 1;
}

uint64_t checksum(const void *data, uint64_t n, uint64_t first_word) {
  const SumBytes sum = kSumBytes[static_cast<int>(isa())];
  const uint8_t *p = static_cast<const uint8_t *>(data);
  uint64_t result = 0;
  uint64_t column = first_word % kRowWords;
  for (uint64_t row = first_word / kRowWords; n > 0; ++row, column = 0) {
    const uint64_t rest = kRowBytes - 4 * column;
    const uint64_t length = n < rest ? n : rest;
    result += sum(p, length, kColumns.k1 + column) * row_coefficient(row);
    p += length, n -= length;
  }
  return result;
}

uint32_t crc32c(const void *data, uint64_t n) {
  const uint8_t *p = static_cast<const uint8_t *>(data);
#if defined(__x86_64__)
  if (has_crc()) return ~crc32c_sse(~uint32_t{0}, p, n);
#endif
  return ~crc32c_table(~uint32_t{0}, p, n);
}

}  // namespace kvx

extern "C" {

uint64_t kvx_checksum(const void *data, uint64_t nbytes, uint64_t first_word) {
  return kvx::checksum(data, nbytes, first_word);
}
uint32_t kvx_crc32c(const void *data, uint64_t nbytes) { return kvx::crc32c(data, nbytes); }

}  // extern "C"
