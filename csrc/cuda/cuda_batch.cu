// cuda_batch.cu - libkvx_cuda: see cuda_batch.h. Host code alone: there is no kernel here.

#include "cuda_batch.h"

#include <cuda_runtime_api.h>
#include <string.h>

namespace {

const uint64_t PAGE = 4096;

template <typename T>
T *pointer(uint64_t address) {
  return reinterpret_cast<T *>(static_cast<uintptr_t>(address));
}

cudaStream_t stream_of(uint64_t stream) { return pointer<CUstream_st>(stream); }

// What a function returns: the error, which is taken from the runtime so that nobody finds it later.
int answer(cudaError_t error) {
  if (error == cudaSuccess) return 0;
  (void)cudaGetLastError();
  return -static_cast<int>(error);
}

cudaError_t as_error(int error) { return static_cast<cudaError_t>(error < 0 ? -error : error); }

bool batch_is_missing(cudaError_t error) {
  return error == cudaErrorNotSupported || error == cudaErrorCallRequiresNewerDriver;
}

cudaError_t copy_as_batch(const uint64_t *targets, const uint64_t *sources, const uint64_t *sizes,
                          uint64_t count, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  static_assert(sizeof(void *) == sizeof(uint64_t) && sizeof(size_t) == sizeof(uint64_t),
                "64-bit machines only");
  cudaMemcpyAttributes attributes;
  memset(&attributes, 0, sizeof attributes);
  attributes.srcAccessOrder =
      cudaMemcpySrcAccessOrderStream;  // what is on the stream before it is copied as it ends
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t from = 0;
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(reinterpret_cast<void *const *>(targets),
                              reinterpret_cast<const void *const *>(sources),
                              reinterpret_cast<const size_t *>(sizes), count, &attributes, &from, 1, stream);
#else
  size_t failed = 0;
  return cudaMemcpyBatchAsync(reinterpret_cast<void **>(const_cast<uint64_t *>(targets)),
                              reinterpret_cast<void **>(const_cast<uint64_t *>(sources)),
                              reinterpret_cast<size_t *>(const_cast<uint64_t *>(sizes)), count, &attributes,
                              &from, 1, &failed, stream);
#endif
#else
  (void)targets, (void)sources, (void)sizes, (void)count, (void)stream;
  return cudaErrorNotSupported;
#endif
}

// One piece, pinned and seen by the device under the host's address.
cudaError_t pin(uint64_t base, uint64_t nbytes) {
  cudaError_t error =
      cudaHostRegister(pointer<void>(base), nbytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error != cudaSuccess) return error;
  void *seen = nullptr;
  error = cudaHostGetDevicePointer(&seen, pointer<void>(base), 0);
  if (error == cudaSuccess && seen != pointer<void>(base)) error = cudaErrorNotSupported;
  if (error != cudaSuccess) (void)cudaHostUnregister(pointer<void>(base));
  return error;
}

bool pieces_are_whole(uint64_t base, uint64_t nbytes, uint64_t piece_bytes) {
  return base && nbytes && piece_bytes && piece_bytes % PAGE == 0 && base + nbytes > base;
}

// Of the piece at `offset`: the first is cut short so that all others begin with a page, for drivers pin whole
// pages, and may refuse one that is in two pieces.
uint64_t length_of(uint64_t base, uint64_t offset, uint64_t nbytes, uint64_t piece_bytes) {
  const uint64_t whole = piece_bytes - (base + offset) % PAGE;
  return nbytes - offset < whole ? nbytes - offset : whole;
}

// Unpins the pieces that begin before `end`, the last first. The first error, and still all of them.
cudaError_t unpin(uint64_t base, uint64_t end, uint64_t piece_bytes) {
  cudaError_t first = cudaSuccess;
  const uint64_t cut = base % PAGE;  // see length_of
  const uint64_t pieces = end ? (end + cut - 1) / piece_bytes + 1 : 0;
  for (uint64_t i = pieces; i-- > 0;) {
    const cudaError_t error = cudaHostUnregister(pointer<void>(i ? base - cut + i * piece_bytes : base));
    if (first == cudaSuccess) first = error;
  }
  return first;
}

}  // namespace

uint32_t kvx_cuda_abi_version(void) { return KVX_CUDA_ABI_VERSION; }

size_t kvx_cuda_struct_size(const char *name) {
  if (name && !strcmp(name, "kvx_cuda_device")) return sizeof(kvx_cuda_device);
  if (name && !strcmp(name, "kvx_cuda_pointer")) return sizeof(kvx_cuda_pointer);
  return 0;
}

const char *kvx_cuda_error_name(int error) { return cudaGetErrorName(as_error(error)); }

const char *kvx_cuda_error_text(int error) { return cudaGetErrorString(as_error(error)); }

// ---- 1. Devices

int kvx_cuda_versions(int32_t *runtime, int32_t *driver) {
  *runtime = *driver = 0;
  const cudaError_t error = cudaRuntimeGetVersion(runtime);
  return answer(error != cudaSuccess ? error : cudaDriverGetVersion(driver));
}

int kvx_cuda_device_count(int32_t *count) {
  *count = 0;  // without a driver the runtime leaves it as it was
  const int error = answer(cudaGetDeviceCount(count));
  if (error) *count = 0;
  return error;
}

int kvx_cuda_set_device(int32_t device) { return answer(cudaSetDevice(device)); }

int kvx_cuda_describe(int32_t device, kvx_cuda_device *out) {
  memset(out, 0, sizeof *out);
  cudaDeviceProp found;
  const int error = answer(cudaGetDeviceProperties(&found, device));
  if (error) return error;
  memcpy(out->name, found.name, sizeof out->name - 1);
  memcpy(out->uuid, &found.uuid, sizeof out->uuid);
  out->total_bytes = found.totalGlobalMem;
  out->multiprocessors = found.multiProcessorCount;
  out->copy_engines = found.asyncEngineCount;
  return 0;
}

int kvx_cuda_stream_new(uint64_t *stream) {
  *stream = 0;
  cudaStream_t made = nullptr;
  const int error = answer(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
  if (!error) *stream = reinterpret_cast<uintptr_t>(made);
  return error;
}

int kvx_cuda_stream_query(uint64_t stream, int32_t *done) {
  *done = 0;
  const cudaError_t error = cudaStreamQuery(stream_of(stream));
  if (error == cudaErrorNotReady) return (void)cudaGetLastError(), 0;
  *done = error == cudaSuccess;
  return answer(error);
}

int kvx_cuda_stream_wait(uint64_t stream) { return answer(cudaStreamSynchronize(stream_of(stream))); }

int kvx_cuda_stream_free(uint64_t stream) {
  return stream ? answer(cudaStreamDestroy(stream_of(stream))) : 0;
}

// ---- 2. Copies

int kvx_cuda_copy(uint64_t target, uint64_t source, uint64_t nbytes, uint64_t stream) {
  if (!nbytes) return 0;
  return answer(cudaMemcpyAsync(pointer<void>(target), pointer<void>(source), nbytes, cudaMemcpyDefault,
                                stream_of(stream)));
}

int kvx_cuda_copy_batch(const uint64_t *targets, const uint64_t *sources, const uint64_t *sizes,
                        uint64_t count, uint64_t stream, int32_t *how) {
  *how = 0;
  if (!stream) return -static_cast<int>(cudaErrorInvalidResourceHandle);
  if (!count) return 0;
  *how = KVX_CUDA_BATCH;
  const cudaError_t error = copy_as_batch(targets, sources, sizes, count, stream_of(stream));
  if (!batch_is_missing(error)) return answer(error);
  (void)cudaGetLastError();
  *how = KVX_CUDA_LOOP;
  for (uint64_t i = 0; i < count; i++)
    if (const int refused = kvx_cuda_copy(targets[i], sources[i], sizes[i], stream)) return refused;
  return 0;
}

// ---- 3. Host memory

int kvx_cuda_host_register(uint64_t base, uint64_t nbytes, uint64_t piece_bytes, uint64_t *failed_offset) {
  *failed_offset = 0;
  if (!pieces_are_whole(base, nbytes, piece_bytes)) return -static_cast<int>(cudaErrorInvalidValue);
  for (uint64_t offset = 0; offset < nbytes;) {
    const uint64_t length = length_of(base, offset, nbytes, piece_bytes);
    const cudaError_t error = pin(base + offset, length);
    if (error != cudaSuccess) {
      *failed_offset = offset;
      (void)unpin(base, offset, piece_bytes);
      return answer(error);
    }
    offset += length;
  }
  return 0;
}

int kvx_cuda_host_unregister(uint64_t base, uint64_t nbytes, uint64_t piece_bytes) {
  if (!pieces_are_whole(base, nbytes, piece_bytes)) return -static_cast<int>(cudaErrorInvalidValue);
  return answer(unpin(base, nbytes, piece_bytes));
}

int kvx_cuda_host_alloc(uint64_t nbytes, uint64_t *address) {
  *address = 0;
  void *made = nullptr;
  const int error = answer(cudaHostAlloc(&made, nbytes, cudaHostAllocPortable | cudaHostAllocMapped));
  if (!error) *address = reinterpret_cast<uintptr_t>(made);
  return error;
}

int kvx_cuda_host_free(uint64_t address) {
  return address ? answer(cudaFreeHost(pointer<void>(address))) : 0;
}

int kvx_cuda_where(uint64_t address, kvx_cuda_pointer *out) {
  memset(out, 0, sizeof *out);
  cudaPointerAttributes found;
  memset(&found, 0, sizeof found);
  const int error = answer(cudaPointerGetAttributes(&found, pointer<void>(address)));
  if (error) return error;
  out->memory = found.type == cudaMemoryTypeHost      ? KVX_CUDA_PINNED
                : found.type == cudaMemoryTypeDevice  ? KVX_CUDA_DEVICE
                : found.type == cudaMemoryTypeManaged ? KVX_CUDA_MANAGED
                                                      : KVX_CUDA_PAGEABLE;
  out->device = found.device;
  out->device_address = reinterpret_cast<uintptr_t>(found.devicePointer);
  return 0;
}
