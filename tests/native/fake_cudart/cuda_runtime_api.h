/* As much of the CUDA runtime as csrc/cuda uses, in host memory: for tests where there is no device. Every call is
 * noted, and any can be made to fail. CUDART_VERSION may be given: its batches are those of that version. */
#ifndef FAKE_CUDA_RUNTIME_API_H
#define FAKE_CUDA_RUNTIME_API_H

#include <stddef.h>

#ifndef CUDART_VERSION
#define CUDART_VERSION 13000
#endif

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorCallRequiresNewerDriver = 36,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorNotSupported = 801
};
enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3
};
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
typedef struct CUstream_st *cudaStream_t;
struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  size_t totalGlobalMem;
  int multiProcessorCount;
  int asyncEngineCount;
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void *devicePointer;
  void *hostPointer;
};

#define cudaHostRegisterPortable 1
#define cudaHostRegisterMapped 2
#define cudaHostAllocPortable 1
#define cudaHostAllocMapped 2
#define cudaStreamNonBlocking 1

extern "C" {
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorName(cudaError_t);
const char *cudaGetErrorString(cudaError_t);
cudaError_t cudaRuntimeGetVersion(int *);
cudaError_t cudaDriverGetVersion(int *);
cudaError_t cudaGetDeviceCount(int *);
cudaError_t cudaSetDevice(int);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *, int);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *, unsigned);
cudaError_t cudaStreamQuery(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaMemcpyAsync(void *, const void *, size_t, cudaMemcpyKind, cudaStream_t);
cudaError_t cudaHostRegister(void *, size_t, unsigned);
cudaError_t cudaHostUnregister(void *);
cudaError_t cudaHostGetDevicePointer(void **, void *, unsigned);
cudaError_t cudaHostAlloc(void **, size_t, unsigned);
cudaError_t cudaFreeHost(void *);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *, const void *);
}

#if CUDART_VERSION >= 12080
enum cudaMemcpySrcAccessOrder { cudaMemcpySrcAccessOrderStream = 1, cudaMemcpySrcAccessOrderAny = 3 };
#define cudaMemcpyFlagPreferOverlapWithCompute 1
struct cudaMemLocation {
  int type;
  int id;
};
struct cudaMemcpyAttributes {
  cudaMemcpySrcAccessOrder srcAccessOrder;
  cudaMemLocation srcLocHint;
  cudaMemLocation dstLocHint;
  unsigned flags;
};
#if CUDART_VERSION >= 13000
extern "C" cudaError_t cudaMemcpyBatchAsync(void *const *, const void *const *, const size_t *, size_t,
                                            cudaMemcpyAttributes *, size_t *, size_t, cudaStream_t);
#else
extern "C" cudaError_t cudaMemcpyBatchAsync(void **, void **, size_t *, size_t, cudaMemcpyAttributes *, size_t *,
                                            size_t, size_t *, cudaStream_t);
#endif
#endif
#endif
