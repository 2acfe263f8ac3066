// Vector operations of one instruction set. Included by isa.h once for each of them, after it defined
// - KVX_ISA: the namespace, one of scalar, avx2, avx512; KVX_ISA_LEVEL: 0, 1 or 2 likewise
// - KVX_TARGET: the function attribute that allows its instructions
//
// There is no include guard on purpose; everything has internal linkage. Every set has
// - Vec, and kVec: a vector and its bytes
// - load(), store() at any address, stream() at a multiple of kVec
// - load16(), stream16(): 16 bytes with zeros behind them; the first 16 bytes of a vector to a multiple of 16
// - load_part(): n < kVec bytes with zeros behind them, and copy_part(): n < kVec bytes. They touch no other
// byte.
// - Sum, mac(), total(): a sum of 32-bit words times coefficients modulo 2^64, which starts as {}
// - fence(): after the last stream()

#define KVX_INLINE KVX_TARGET __attribute__((always_inline)) inline

namespace kvx {
namespace {
namespace KVX_ISA {

#if KVX_ISA_LEVEL == 2

using Vec = __m512i;
constexpr uint64_t kVec = 64;

KVX_INLINE Vec load(const uint8_t *p) { return _mm512_loadu_si512(p); }
KVX_INLINE void store(uint8_t *p, Vec v) { _mm512_storeu_si512(p, v); }
KVX_INLINE void stream(uint8_t *p, Vec v) { _mm512_stream_si512(reinterpret_cast<Vec *>(p), v); }
KVX_INLINE Vec load16(const uint8_t *p) { return _mm512_maskz_loadu_epi32(0xF, p); }
KVX_INLINE void stream16(uint8_t *p, Vec v) {
  _mm_stream_si128(reinterpret_cast<__m128i *>(p), _mm512_maskz_extracti32x4_epi32(0xF, v, 0));
}
KVX_INLINE __mmask64 first(uint64_t n) { return _bzhi_u64(~uint64_t{0}, static_cast<unsigned>(n)); }
KVX_INLINE Vec load_part(const uint8_t *p, uint64_t n) { return _mm512_maskz_loadu_epi8(first(n), p); }
KVX_INLINE void copy_part(uint8_t *to, const uint8_t *from, uint64_t n) {
  _mm512_mask_storeu_epi8(to, first(n), load_part(from, n));
}
KVX_INLINE Vec zero() { return _mm512_setzero_si512(); }
KVX_INLINE void fence() { _mm_sfence(); }

struct Sum {
  Vec even, odd;
};
// maskz with a full mask compiles to the plain instruction. The plain intrinsics warn in g++ 12.
KVX_INLINE Vec high(Vec v) { return _mm512_maskz_srli_epi64(0xFF, v, 32); }
KVX_INLINE void mac(Sum &sum, Vec v, const uint32_t *k) {
  const Vec c = _mm512_loadu_si512(k);
  sum.even = _mm512_add_epi64(sum.even, _mm512_maskz_mul_epu32(0xFF, v, c));
  sum.odd = _mm512_add_epi64(sum.odd, _mm512_maskz_mul_epu32(0xFF, high(v), high(c)));
}
KVX_INLINE uint64_t total(const Sum &sum) {
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, _mm512_add_epi64(sum.even, sum.odd));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] + lanes[6] + lanes[7];
}

#elif KVX_ISA_LEVEL == 1

using Vec = __m256i;
constexpr uint64_t kVec = 32;

KVX_INLINE Vec load(const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const Vec *>(p)); }
KVX_INLINE void store(uint8_t *p, Vec v) { _mm256_storeu_si256(reinterpret_cast<Vec *>(p), v); }
KVX_INLINE void stream(uint8_t *p, Vec v) { _mm256_stream_si256(reinterpret_cast<Vec *>(p), v); }
KVX_INLINE Vec load16(const uint8_t *p) {
  return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
KVX_INLINE void stream16(uint8_t *p, Vec v) {
  _mm_stream_si128(reinterpret_cast<__m128i *>(p), _mm256_castsi256_si128(v));
}
KVX_INLINE Vec load_part(const uint8_t *p, uint64_t n) {
  alignas(32) uint8_t bytes[32] = {};
  std::memcpy(bytes, p, n);
  return _mm256_load_si256(reinterpret_cast<const Vec *>(bytes));
}
KVX_INLINE void copy_part(uint8_t *to, const uint8_t *from, uint64_t n) {
  if (n & 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to),
                     _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    to += 16, from += 16;
  }
  if (n & 8) std::memcpy(to, from, 8), to += 8, from += 8;
  if (n & 4) std::memcpy(to, from, 4), to += 4, from += 4;
  for (n &= 3; n > 0; --n) *to++ = *from++;
}
KVX_INLINE Vec zero() { return _mm256_setzero_si256(); }
KVX_INLINE void fence() { _mm_sfence(); }

struct Sum {
  Vec even, odd;
};
KVX_INLINE void mac(Sum &sum, Vec v, const uint32_t *k) {
  const Vec c = _mm256_loadu_si256(reinterpret_cast<const Vec *>(k));
  sum.even = _mm256_add_epi64(sum.even, _mm256_mul_epu32(v, c));
  sum.odd = _mm256_add_epi64(sum.odd, _mm256_mul_epu32(_mm256_srli_epi64(v, 32), _mm256_srli_epi64(c, 32)));
}
KVX_INLINE uint64_t total(const Sum &sum) {
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<Vec *>(lanes), _mm256_add_epi64(sum.even, sum.odd));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

#else

struct Vec {
  uint32_t words[4];
};
constexpr uint64_t kVec = 16;

KVX_INLINE Vec load(const uint8_t *p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
KVX_INLINE void store(uint8_t *p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
KVX_INLINE void stream(uint8_t *p, Vec v) { store(p, v); }
KVX_INLINE Vec load16(const uint8_t *p) { return load(p); }
KVX_INLINE void stream16(uint8_t *p, Vec v) { store(p, v); }
KVX_INLINE Vec load_part(const uint8_t *p, uint64_t n) {
  Vec v = {};
  std::memcpy(&v, p, n);
  return v;
}
KVX_INLINE void copy_part(uint8_t *to, const uint8_t *from, uint64_t n) { std::memcpy(to, from, n); }
KVX_INLINE Vec zero() { return {}; }
KVX_INLINE void fence() {}

struct Sum {
  uint64_t lanes[4];
};
KVX_INLINE void mac(Sum &sum, Vec v, const uint32_t *k) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  for (uint32_t &word : v.words) word = __builtin_bswap32(word);
#endif
  for (int i = 0; i < 4; ++i) sum.lanes[i] += uint64_t{v.words[i]} * k[i];
}
KVX_INLINE uint64_t total(const Sum &sum) {
  return sum.lanes[0] + sum.lanes[1] + sum.lanes[2] + sum.lanes[3];
}

#endif

// Sum of n bytes within one row; k: the coefficient of the first word.
KVX_TARGET inline uint64_t sum_bytes(const uint8_t *p, uint64_t n, const uint32_t *k) {
  Sum a = {}, b = {};
  uint64_t i = 0;
  for (; i + 2 * kVec <= n; i += 2 * kVec) {
    mac(a, load(p + i), k + i / 4);
    mac(b, load(p + i + kVec), k + (i + kVec) / 4);
  }
  if (i + kVec <= n) mac(a, load(p + i), k + i / 4), i += kVec;
  if (i < n) mac(b, load_part(p + i, n - i), k + i / 4);
  return total(a) + total(b);
}

}  // namespace KVX_ISA
}  // namespace
}  // namespace kvx

#undef KVX_INLINE
