// simd.h once for each instruction set of this architecture, then the file named KVX_ISA_FILE (if any)
// likewise. KVX_FOR_EACH_ISA(f) is {scalar::f, avx2::f, avx512::f}, to be indexed with an Isa.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define KVX_FOR_EACH_ISA(f) {scalar::f, avx2::f, avx512::f}
#else
#define KVX_FOR_EACH_ISA(f) {scalar::f, scalar::f, scalar::f}
#endif

#define KVX_ISA scalar
#define KVX_ISA_LEVEL 0
#define KVX_TARGET
#include "simd.h"
#ifdef KVX_ISA_FILE
#include KVX_ISA_FILE
#endif
#undef KVX_ISA
#undef KVX_ISA_LEVEL
#undef KVX_TARGET

#if defined(__x86_64__)

#define KVX_ISA avx2
#define KVX_ISA_LEVEL 1
#define KVX_TARGET __attribute__((target("avx2")))
#include "simd.h"
#ifdef KVX_ISA_FILE
#include KVX_ISA_FILE
#endif
#undef KVX_ISA
#undef KVX_ISA_LEVEL
#undef KVX_TARGET

#define KVX_ISA avx512
#define KVX_ISA_LEVEL 2
#define KVX_TARGET __attribute__((target("avx512f,avx512bw,avx2,bmi2")))
#include "simd.h"
#ifdef KVX_ISA_FILE
#include KVX_ISA_FILE
#endif
#undef KVX_ISA
#undef KVX_ISA_LEVEL
#undef KVX_TARGET

#endif
