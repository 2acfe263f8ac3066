/* cuda_batch.h - the C ABI of libkvx_cuda: what kvxfer asks of the CUDA runtime itself.
 *
 * The runtime is linked in statically, so that the library loads without a driver and beside any other copy
 * of the runtime; both work on the device's one primary context. It is loaded only where a device has
 * answered (kvxfer/_cuda.py mirrors these declarations).
 *
 * Conventions
 *   - Functions return 0 or a negative cudaError_t, set outputs to 0 first, and never throw.
 *   - An error is the caller's alone: none is left behind for the runtime's cudaGetLastError.
 *   - Addresses, sizes and streams (cudaStream_t) are uint64_t.
 *   - Copies are asynchronous; memory and fragment lists: see each function.
 */
#ifndef KVX_CUDA_BATCH_H
#define KVX_CUDA_BATCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVX_CUDA_ABI_VERSION 1
#define KVX_CUDA_API __attribute__((visibility("default")))

KVX_CUDA_API uint32_t kvx_cuda_abi_version(void);
KVX_CUDA_API size_t kvx_cuda_struct_size(const char *name);
/* Of an error as returned (negative) or as the runtime has it. Static text. */
KVX_CUDA_API const char *kvx_cuda_error_name(int error);
KVX_CUDA_API const char *kvx_cuda_error_text(int error);

/* ---- 1. Devices ---------------------------------------------------------------------------- */

/* Versions as CUDA writes them (13000 is 13.0): of the runtime linked in, and the newest that the driver
 * supports (0: there is no driver, which is no error). */
KVX_CUDA_API int kvx_cuda_versions(int32_t *runtime, int32_t *driver);
KVX_CUDA_API int kvx_cuda_device_count(int32_t *count);
/* For the calling thread, as every other call of this file is for the thread's device. */
KVX_CUDA_API int kvx_cuda_set_device(int32_t device);

typedef struct kvx_cuda_device {
  char name[256];
  uint8_t uuid[16];
  uint64_t total_bytes;
  int32_t multiprocessors;
  int32_t copy_engines;
} kvx_cuda_device;
KVX_CUDA_API int kvx_cuda_describe(int32_t device, kvx_cuda_device *out);

/* A stream that does not wait for the legacy default stream, for copies. */
KVX_CUDA_API int kvx_cuda_stream_new(uint64_t *stream);
/* *done is 1 when all its work has ended. Never waits. */
KVX_CUDA_API int kvx_cuda_stream_query(uint64_t stream, int32_t *done);
KVX_CUDA_API int kvx_cuda_stream_wait(uint64_t stream);
KVX_CUDA_API int kvx_cuda_stream_free(uint64_t stream);

/* ---- 2. Copies ----------------------------------------------------------------------------- */

/* Between any two places, by their addresses. */
KVX_CUDA_API int kvx_cuda_copy(uint64_t target, uint64_t source, uint64_t nbytes, uint64_t stream);

enum kvx_cuda_how {
  KVX_CUDA_BATCH = 1, /* one cudaMemcpyBatchAsync */
  KVX_CUDA_LOOP = 2   /* a cudaMemcpyAsync for each fragment: this runtime or driver has no batch */
};
/* `count` fragments, which must not meet each other; targets[i] gets sizes[i] bytes from sources[i]. The
 * arrays may be reused on return. *how says what was done; on an error some fragments may have been queued.
 * The legacy default stream (0) is refused: a batch cannot run there. */
KVX_CUDA_API int kvx_cuda_copy_batch(const uint64_t *targets, const uint64_t *sources, const uint64_t *sizes,
                                     uint64_t count, uint64_t stream, int32_t *how);

/* ---- 3. Host memory ------------------------------------------------------------------------ */

/* Pins `nbytes` at `base`, of memory that exists (a mapping, an allocation), in pieces of `piece_bytes`: one
 * call for hundreds of GiB holds the driver's lock for as long. All or nothing: where a piece is refused,
 * those before it are unpinned again, and *failed_offset says where it was. A device that would see the
 * memory under another address than the host is refused with cudaErrorNotSupported. `piece_bytes` must be a
 * multiple of 4096; no page of as many bytes is in two pieces, wherever `base` is. */
KVX_CUDA_API int kvx_cuda_host_register(uint64_t base, uint64_t nbytes, uint64_t piece_bytes,
                                        uint64_t *failed_offset);
/* Unpins what was registered with the same numbers: every piece is tried, the first error is returned. */
KVX_CUDA_API int kvx_cuda_host_unregister(uint64_t base, uint64_t nbytes, uint64_t piece_bytes);
/* Pinned memory, for every device. */
KVX_CUDA_API int kvx_cuda_host_alloc(uint64_t nbytes, uint64_t *address);
KVX_CUDA_API int kvx_cuda_host_free(uint64_t address);

enum kvx_cuda_memory {
  KVX_CUDA_PAGEABLE = 0, /* ordinary host memory */
  KVX_CUDA_PINNED = 1,
  KVX_CUDA_DEVICE = 2,
  KVX_CUDA_MANAGED = 3
};
typedef struct kvx_cuda_pointer {
  int32_t memory; /* kvx_cuda_memory */
  int32_t device;
  uint64_t device_address; /* 0: no kernel reaches it */
} kvx_cuda_pointer;
KVX_CUDA_API int kvx_cuda_where(uint64_t address, kvx_cuda_pointer *out);

#ifdef __cplusplus
}
#endif
#endif
