// The runtime of cuda_runtime_api.h beside this file. Copies happen at once; registrations are kept and checked.

#include "cuda_runtime_api.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <string>
#include <vector>

namespace {

struct Fault {
  std::string call;
  int after;
  int error;
};
std::vector<Fault> faults;
std::string notes;
std::map<uintptr_t, size_t> pinned;
cudaError_t last = cudaSuccess;
uintptr_t shift = 0;  // between the host's address of pinned memory and the device's

cudaError_t fail(cudaError_t error) { return last = error; }

// Notes the call; the error that it is to give.
cudaError_t enter(const char *call, uint64_t a = 0, uint64_t b = 0) {
  notes += std::string(call) + " " + std::to_string(a) + " " + std::to_string(b) + "\n";
  for (Fault &fault : faults)
    if (fault.call == call && fault.after-- == 0) return fail(static_cast<cudaError_t>(fault.error));
  return cudaSuccess;
}

uint64_t number(const void *p) { return reinterpret_cast<uintptr_t>(p); }

}  // namespace

extern "C" {

// ---- what a test says

void fake_fail(const char *call, int after, int error) { faults.push_back({call, after, error}); }
void fake_shift(uint64_t bytes) { shift = bytes; }
void fake_reset(void) { faults.clear(), notes.clear(), pinned.clear(), last = cudaSuccess, shift = 0; }
const char *fake_notes(void) { return notes.c_str(); }
uint64_t fake_pinned(void) { return pinned.size(); }
int fake_last_error(void) { return last; }

// ---- the runtime

cudaError_t cudaGetLastError(void) {
  const cudaError_t was = last;
  last = cudaSuccess;
  return was;
}
const char *cudaGetErrorName(cudaError_t error) { return error == 712 ? "cudaErrorHostMemoryAlreadyRegistered" : "fake"; }
const char *cudaGetErrorString(cudaError_t) { return "an error of the fake"; }
cudaError_t cudaRuntimeGetVersion(int *out) { return *out = CUDART_VERSION, enter("cudaRuntimeGetVersion"); }
cudaError_t cudaDriverGetVersion(int *out) { return *out = 13010, enter("cudaDriverGetVersion"); }
cudaError_t cudaGetDeviceCount(int *out) {
  if (cudaError_t error = enter("cudaGetDeviceCount")) return *out = 77, error;
  return *out = 2, cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return enter("cudaSetDevice", device); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int device) {
  memset(out, 'x', sizeof *out);
  strcpy(out->name, "Fake H200");
  for (int i = 0; i < 16; i++) out->uuid.bytes[i] = static_cast<char>(i * 17);
  out->totalGlobalMem = size_t(141) << 30;
  out->multiProcessorCount = 132;
  out->asyncEngineCount = 3;
  return enter("cudaGetDeviceProperties", device);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
  *out = reinterpret_cast<cudaStream_t>(0x5000);
  return enter("cudaStreamCreateWithFlags", flags);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return enter("cudaStreamQuery", number(stream)); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return enter("cudaStreamSynchronize", number(stream)); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return enter("cudaStreamDestroy", number(stream)); }
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, cudaMemcpyKind kind, cudaStream_t stream) {
  if (cudaError_t error = enter("cudaMemcpyAsync", count, number(stream))) return error;
  if (kind != cudaMemcpyDefault) return fail(cudaErrorInvalidValue);
  memcpy(dst, src, count);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void *at, size_t bytes, unsigned flags) {
  if (cudaError_t error = enter("cudaHostRegister", number(at), bytes)) return error;
  if (flags != (cudaHostRegisterPortable | cudaHostRegisterMapped) || !bytes) return fail(cudaErrorInvalidValue);
  for (auto &[begin, size] : pinned)
    if (begin < number(at) + bytes && number(at) < begin + size) return fail(cudaErrorHostMemoryAlreadyRegistered);
  pinned[number(at)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *at) {
  if (cudaError_t error = enter("cudaHostUnregister", number(at))) return error;
  return pinned.erase(number(at)) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void **out, void *at, unsigned) {
  *out = static_cast<char *>(at) + shift;
  return enter("cudaHostGetDevicePointer", number(at));
}
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned) {
  if (cudaError_t error = enter("cudaHostAlloc", bytes)) return *out = reinterpret_cast<void *>(0xbad), error;
  return *out = malloc(bytes), cudaSuccess;
}
cudaError_t cudaFreeHost(void *at) {
  if (cudaError_t error = enter("cudaFreeHost")) return error;
  return free(at), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *at) {
  out->type = static_cast<cudaMemoryType>(number(at) & 3);
  out->device = 1;
  out->devicePointer = const_cast<void *>(at);
  return enter("cudaPointerGetAttributes");
}

#if CUDART_VERSION >= 12080
static cudaError_t batch(void *const *dsts, const void *const *srcs, const size_t *sizes, size_t count,
                         const cudaMemcpyAttributes *attributes, const size_t *from, size_t n, cudaStream_t stream) {
  if (cudaError_t error = enter("cudaMemcpyBatchAsync", count, number(stream))) return error;
  const bool fine = stream && count && n == 1 && from[0] == 0 &&
                    attributes[0].srcAccessOrder == cudaMemcpySrcAccessOrderStream;
  if (!fine) return fail(cudaErrorInvalidValue);
  for (size_t i = count; i-- > 0;) memcpy(dsts[i], srcs[i], sizes[i]);  // in no order that a caller may count on
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void *const *dsts, const void *const *srcs, const size_t *sizes, size_t count,
                                 cudaMemcpyAttributes *attributes, size_t *from, size_t n, cudaStream_t stream) {
  return batch(dsts, srcs, sizes, count, attributes, from, n, stream);
}
#else
cudaError_t cudaMemcpyBatchAsync(void **dsts, void **srcs, size_t *sizes, size_t count,
                                 cudaMemcpyAttributes *attributes, size_t *from, size_t n, size_t *failed,
                                 cudaStream_t stream) {
  *failed = 0;
  return batch(dsts, srcs, sizes, count, attributes, from, n, stream);
}
#endif
#endif
}
