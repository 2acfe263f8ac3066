/* kvx.h - the C ABI of libkvx, the native half of kvxfer.
 *
 * No Python headers and no torch: one shared object serves every Python, loaded with ctypes
 * (kvxfer/_native.py mirrors these declarations and a test compares the struct sizes).
 *
 * Conventions
 *   - Sizes, offsets and strides are bytes in uint64_t; nothing is ever narrowed to 32 bits.
 *   - Functions that can fail return 0 or a negative errno; nothing throws across this boundary.
 *   - Times are nanoseconds of CLOCK_MONOTONIC (Python's time.monotonic_ns()); 0 means none.
 *   - In the child of a fork nothing of section 6 may be called with an engine of the parent's: not even to
 * free it. Files may be released, and everything may be made anew.
 *   - Every call that makes, moves, reads or writes a store's files goes through one table (section 2).
 *     Looking at names (stat, listing a directory) and what LMDB does to its own file does not.
 */
#ifndef KVX_H
#define KVX_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVX_ABI_VERSION 5
#define KVX_API __attribute__((visibility("default")))

KVX_API uint32_t kvx_abi_version(void);
/* Comma-separated features in use: the instruction set of the copy and checksum loops. */
KVX_API const char *kvx_features(void);
/* sizeof() of the structs below in the order they are declared, for the ctypes mirror's test. */
KVX_API size_t kvx_struct_size(const char *name);

/* ---- 1. Checksums ------------------------------------------------------------------------- */

/* The segment checksum of docs/format.md over `nbytes` at `data` (any alignment and length; a short
 * last word is padded with zeros). `first_word` is the index of the first 32-bit word within the
 * segment, so that pieces may be summed apart and added modulo 2^64. */
KVX_API uint64_t kvx_checksum(const void *data, uint64_t nbytes, uint64_t first_word);
/* CRC32C (Castagnoli, reflected, initial and final 0xFFFFFFFF), as iSCSI's. */
KVX_API uint32_t kvx_crc32c(const void *data, uint64_t nbytes);

/* ---- 2. System calls ---------------------------------------------------------------------- */

/* The calls of a store and its engine, replaceable one by one. The default table is the C library's. */
enum kvx_op {
  KVX_OP_OPEN,
  KVX_OP_CLOSE,
  KVX_OP_PREAD,
  KVX_OP_PWRITE,
  KVX_OP_FALLOCATE,
  KVX_OP_FTRUNCATE,
  KVX_OP_FSYNC,
  KVX_OP_FSTAT,
  KVX_OP_UNLINK,
  KVX_OP_RENAME,
  KVX_OP_MKDIR,
  KVX_OP_LOCK,
  KVX_OP_MMAP,
  KVX_OP_URING_SETUP,    /* io_uring_setup */
  KVX_OP_URING_REGISTER, /* io_uring_register: its buffers, files, and what it can do */
  KVX_OP_URING_SUBMIT,   /* io_uring_enter that hands requests over; counted by call */
  KVX_OP_URING_COMPLETE, /* a request's answer is taken; no call */
  KVX_OP_COUNT
};

/* A fault rule. A call matches when `op` is its own and, for pread, pwrite and a ring's requests, when its
 * byte range meets [offset_lo, offset_hi). A read or write that a ring carries matches pread and pwrite too:
 * what it suffers comes when its answer is waited for. Of the matching calls the first `after` pass, the next
 * `times` (0: all that follow) are hit. Rules are tried in the order they were added; the first that hits
 * decides. */
enum kvx_fault_action {
  KVX_FAULT_ERRNO = 1,       /* arg: errno; nothing is done (but a descriptor is closed) */
  KVX_FAULT_SHORT = 2,       /* arg: bytes; at most so many are transferred by the call (0: end of file). Of a
                                ring: requests handed over, or places of what is registered or asked for */
  KVX_FAULT_DELAY = 3,       /* arg: milliseconds, then the call is made */
  KVX_FAULT_HANG = 4,        /* blocks until kvx_fault_release(), then the call is made */
  KVX_FAULT_KILL_BEFORE = 5, /* SIGKILL instead of the call */
  KVX_FAULT_KILL_AFTER = 6,  /* the call is made (at most arg bytes if arg > 0), then SIGKILL */
  KVX_FAULT_FLIP = 7 /* the call is made, then bit 0 of byte `arg` of the buffer's transferred bytes is
                        inverted (a read that returns damage). pread, and a ring's answers. */
};
typedef struct kvx_fault {
  int32_t op;
  int32_t action;
  uint64_t arg;
  uint64_t after;
  uint64_t times;
  uint64_t offset_lo;
  uint64_t offset_hi; /* UINT64_MAX: no bound */
} kvx_fault;

KVX_API int kvx_fault_add(const kvx_fault *rule); /* index of the rule; installs the faulty table */
KVX_API uint64_t kvx_fault_hits(int rule);        /* how often it has hit */
KVX_API void kvx_fault_release(void);             /* lets every hanging call go, now and until the next add */
KVX_API void kvx_fault_clear(void);    /* releases, removes all rules, restores the C library's table */
KVX_API uint64_t kvx_op_calls(int op); /* calls of `op` since the process started, faulty or not */

/* Plain calls over the table, for the store's small files. Each returns >= 0 or -errno. */
KVX_API int kvx_sys_open(const char *path, int flags, int mode);
KVX_API int kvx_sys_close(int fd);
KVX_API int64_t kvx_sys_pread(int fd, void *buf, uint64_t n, uint64_t offset);
KVX_API int64_t kvx_sys_pwrite(int fd, const void *buf, uint64_t n, uint64_t offset);
KVX_API int kvx_sys_fallocate(int fd, uint64_t length);
KVX_API int kvx_sys_ftruncate(int fd, uint64_t length);
KVX_API int kvx_sys_fsync(int fd);
KVX_API int kvx_sys_fdatasync(int fd); /* counted as KVX_OP_FSYNC */
KVX_API int64_t kvx_sys_size(int fd);
KVX_API int kvx_sys_unlink(const char *path);
KVX_API int kvx_sys_rename(const char *from, const char *to);
KVX_API int kvx_sys_mkdir(const char *path, int mode);
/* The lock on one byte of an open file (F_OFD_SETLK): kept by the open file, so that it ends when the last
 * descriptor of it is closed, however the process ended. Never waits. 0, or -EWOULDBLOCK where another open
 * file has it. */
enum kvx_lock_operation { KVX_LOCK_TRY = 1, KVX_LOCK_DROP = 2, KVX_LOCK_TEST = 3 };
KVX_API int kvx_sys_lock(int fd, uint64_t offset, int operation);
/* statx's direct-I/O alignment of an open file: 0, or -errno (-EOPNOTSUPP where the kernel does not tell). */
KVX_API int kvx_sys_dioalign(int fd, uint32_t *memory_align, uint32_t *offset_align);

/* ---- 3. Files ----------------------------------------------------------------------------- */

/* An open file, counted by reference: the descriptor is closed when the last transfer that uses it has
 * returned, so a read that never returned can't meet a descriptor that was given to another file. */
typedef struct kvx_file kvx_file;
/* Takes over `fd`. `label` (copied) names the file in errors; `direct` says O_DIRECT is set on it. */
KVX_API kvx_file *kvx_file_adopt(int fd, const char *label, int direct);
/* If it was the last reference, the file is closed when this returns, or, where the close takes longer than a
 * second, some time later: by another thread. */
KVX_API void kvx_file_release(kvx_file *file);
/* The descriptor, for who opens the same file in another way; it stays the file's. */
KVX_API int kvx_file_fd(const kvx_file *file);
/* Moves up to n bytes, looping over short transfers. Returns the bytes moved (less than n only at the end
 * of the file) or -errno; with an errno, *moved has the bytes that went before it. Never more than
 * 1 GiB is asked of one call. */
KVX_API int64_t kvx_file_pread(kvx_file *file, void *buf, uint64_t n, uint64_t offset, uint64_t *moved);
KVX_API int64_t kvx_file_pwrite(kvx_file *file, const void *buf, uint64_t n, uint64_t offset,
                                uint64_t *moved);

/* ---- 4. Slots and trailers (docs/format.md) ----------------------------------------------- */

#define KVX_TRAILER_BYTES                                                                                 \
  4096                       /* the part of a trailer page that has meaning; the page is `alignment` long \
                              */
#define KVX_TRAILER_SUMS 464 /* segment sums that one trailer page can hold */
#define KVX_MAX_KEY 64
#define KVX_MAX_BLOCKS 256 /* blocks of a chunk: the bits of the mask */

typedef struct kvx_slot_layout {
  uint64_t segment_bytes;      /* payload bytes of each segment but the last */
  uint64_t last_segment_bytes; /* payload bytes of the last segment; <= segment_bytes */
  uint64_t segment_stride;     /* bytes between segments: segment_bytes rounded up to the alignment */
  uint32_t num_segments;
  uint32_t segments_per_trailer; /* 1 where several writers share a slot, else KVX_TRAILER_SUMS */
  uint32_t alignment;            /* power of two >= 4096 */
  uint32_t blocks_per_chunk;     /* 1..256 */
} kvx_slot_layout;

/* Bytes of the payload area, number of trailer pages, and bytes of the slot. */
KVX_API uint64_t kvx_slot_payload_stride(const kvx_slot_layout *layout);
KVX_API uint32_t kvx_slot_trailers(const kvx_slot_layout *layout);
KVX_API uint64_t kvx_slot_bytes(const kvx_slot_layout *layout);

typedef struct kvx_trailer {
  uint8_t namespace_digest[32];
  uint8_t key[KVX_MAX_KEY];
  uint32_t key_bytes;
  uint32_t first_segment; /* segments whose sums this page holds */
  uint32_t segment_count;
  uint32_t num_segments; /* of the slot */
  uint32_t blocks_per_chunk;
  uint32_t reserved;
  uint64_t generation;
  uint64_t payload_bytes; /* of the slot: the sum of its segments' payload */
  uint64_t segment_bytes;
  uint64_t mask[4]; /* bit b: block b of the chunk is valid */
} kvx_trailer;

/* What a segment, trailer or transfer came to. Kept in one byte per chunk. */
enum kvx_status {
  KVX_OK = 0,
  KVX_PENDING = 1,     /* not attempted yet */
  KVX_CUT = 2,         /* the deadline closed the gate first */
  KVX_CANCELLED = 3,   /* shutdown or cancel came first */
  KVX_IO = 4,          /* a call failed: see the errno */
  KVX_TRUNCATED = 5,   /* the file ended inside the slot           (verification) */
  KVX_BAD_TRAILER = 6, /* magic, version, geometry or CRC wrong    (verification) */
  KVX_FOREIGN = 7,     /* another namespace, key, generation or segment (verification) */
  KVX_BAD_SUM = 8,     /* payload does not match its sums          (verification) */
  KVX_ABSENT = 9,      /* a requested block is not in the chunk's mask */
  KVX_LOST = 10,       /* a call outlived io_timeout and is still running: its slot must not be reused */
  KVX_STALLED = 11     /* too many calls never returned: no thread is left to run it */
};

/* Writes a whole trailer page (`page_bytes` >= 4096, zero-filled past the fields). */
KVX_API int kvx_trailer_seal(const kvx_trailer *fields, const uint64_t *sums, void *page,
                             uint64_t page_bytes);
/* Parses and checks magic, version, CRC and bounds. KVX_OK or KVX_BAD_TRAILER. `sums` has room for
 * KVX_TRAILER_SUMS. Trusts nothing: counts are checked before they are used. */
KVX_API int kvx_trailer_parse(const void *page, uint64_t page_bytes, kvx_trailer *fields, uint64_t *sums);

/* ---- 5. Converter ------------------------------------------------------------------------- */

/* A local tensor: block b of it starts at base + b * block_stride. */
typedef struct kvx_tensor {
  uint64_t base; /* address */
  uint64_t block_stride;
  uint64_t num_blocks;
} kvx_tensor;

/* For f in [0, num_fragments) and block position i of the chunk:
 *   canonical  segment[canonical_offset + i * canonical_block_stride + f * fragment_size, + fragment_size)
 *   local      tensor block[local_offset + f * local_stride, + fragment_size)
 * Canonical bytes of a run are contiguous (the canonical stride is the fragment size). */
typedef struct kvx_run {
  uint32_t tensor;
  uint32_t segment;
  uint64_t local_offset;
  uint64_t canonical_offset;
  uint64_t fragment_size;
  uint64_t num_fragments;
  uint64_t local_stride;
} kvx_run;

/* One rank's part of a slot over its live tensors: immutable, counted by reference.
 * `runs` must be sorted by (segment, canonical_offset) and tile each segment they name exactly once over the
 * chunk's blocks (kvxfer/layout.py proves it; this call checks bounds). `segments`: those named, ascending.
 * `live`: 1 if the tensors are read by others while a load runs (GPU blocks): they are then written only
 * after the whole part was verified; 0 if a load's result makes them live (host rows): filled while they are
 * summed. */
typedef struct kvx_mapping kvx_mapping;
KVX_API int kvx_mapping_new(const kvx_slot_layout *layout, const kvx_run *runs, uint64_t num_runs,
                            const uint32_t *segments, uint32_t num_segments, uint64_t canonical_block_stride,
                            const kvx_tensor *tensors, uint32_t num_tensors, int live, kvx_mapping **out);
KVX_API void kvx_mapping_release(kvx_mapping *mapping);

/* out[c, segment * segment_stride ...] = the mapping's segments of chunk c; block_ids [num_chunks,
 * blocks_per_chunk], -1 for an absent block (its bytes become zero, and count as zero in the sums).
 * `sums` [num_chunks, layout.num_segments] or NULL. Only this mapping's segments are written; their padding
 * becomes zero. `threads` <= 1 runs in the caller. -EINVAL for an id out of range, before anything is
 * written. */
KVX_API int kvx_gather(const kvx_mapping *mapping, const int64_t *block_ids, uint64_t num_chunks, void *out,
                       uint64_t out_chunk_stride, uint64_t *sums, int threads);
/* The other way; absent blocks (-1) are skipped. `sums`, if given, receives the sums of what was read. */
KVX_API int kvx_scatter(const kvx_mapping *mapping, const int64_t *block_ids, uint64_t num_chunks,
                        const void *src, uint64_t src_chunk_stride, uint64_t *sums, int threads);

/* ---- 6. Jobs ------------------------------------------------------------------------------ */

typedef struct kvx_engine kvx_engine;

typedef struct kvx_engine_config {
  uint32_t threads;          /* >= 1; stores leave an eighth of them (at least one) to loads */
  uint32_t max_lost_threads; /* threads whose call never returned that may be replaced */
  uint64_t io_timeout_ns;    /* a call running longer is given up as KVX_LOST; 0: never. Time in which the
                                process was stopped does not count. */
  uint64_t read_piece_bytes; /* reads are cut into pieces of about this size, on segment boundaries */
  uint32_t backend;          /* enum kvx_backend */
  uint32_t straight;         /* 1 << direction: chunks of host rows go without staging where they can */
  /* Writes without staging are cut likewise: a piece is summed, and written while a cache has it. UINT64_MAX:
   * a chunk is summed, and written by one call. */
  uint64_t write_piece_bytes;
  uint32_t depth; /* uring: transfers that a thread has under way at most, 1..KVX_MAX_DEPTH */
  uint32_t reserved;
} kvx_engine_config;

/* How bytes get to files. posix: a blocking call at a time, of each thread. uring: each thread has a ring,
 * and keeps several transfers of its chunk under way. */
enum kvx_backend { KVX_BACKEND_POSIX = 0, KVX_BACKEND_URING = 1 };
#define KVX_MAX_DEPTH 8

enum kvx_direction { KVX_STORE = 0, KVX_LOAD = 1 };

/* One chunk of a job: where its slot is and who it must be. */
typedef struct kvx_chunk {
  kvx_file *file;
  uint64_t slot_offset;
  uint64_t generation;
  uint32_t key_bytes;
  uint32_t reserved;
  uint8_t key[KVX_MAX_KEY];
} kvx_chunk;

typedef struct kvx_job {
  uint64_t job_id;
  int32_t direction;
  uint32_t num_chunks;
  uint32_t num_parts; /* mappings: ranks of this process whose pages take part; all of one layout and
                         all live or none. A chunk's parts succeed or fail together. */
  uint32_t reserved;
  kvx_mapping *const *parts;  /* [num_parts] */
  const uint8_t *part_writes; /* store: [num_chunks, num_parts], 1 where the part writes its segments of this
                                 chunk (the elected one of its replicas); NULL: all. A segment of several
                                 parts that write is written once, from the first. */
  const kvx_chunk *chunks;    /* [num_chunks], prefix order */
  const int64_t *block_ids;   /* [num_chunks, blocks_per_chunk]; -1 absent; the same ids on every part */
  const uint8_t *namespace_digest; /* [32] */
  uint64_t deadline_ns;            /* load: the gate closes then; 0: never */
} kvx_job;

typedef struct kvx_result {
  uint64_t job_id;
  int32_t direction;
  uint32_t num_chunks;
  uint32_t num_ok;
  uint32_t reserved;
  uint64_t nbytes;     /* payload bytes of the chunks that are OK, over all parts */
  uint64_t elapsed_ns; /* from submit to the end of the job */
} kvx_result;

/* The first failure of a chunk. */
typedef struct kvx_chunk_error {
  int32_t status;
  int32_t error;    /* errno, for KVX_IO */
  uint32_t segment; /* that failed, or UINT32_MAX */
  uint32_t reserved;
  uint64_t offset; /* of the failing transfer or segment in the file */
  uint64_t wanted; /* bytes */
  uint64_t moved;
} kvx_chunk_error;

/* -errno where a thread, or its ring, is not to be had. */
KVX_API int kvx_engine_new(const kvx_engine_config *config, kvx_engine **out);
/* Whether transfers can go by io_uring here, by trying: `bytes` (a multiple of what direct I/O asks for) are
 * written to the start of `file` by a ring, read back by the ring and by pread, and compared. `why` (room for
 * KVX_WHY_BYTES) gets the reason if not; else what is missing of it, such as registered buffers, or "". 0, or
 * -errno. */
#define KVX_WHY_BYTES 256
KVX_API int kvx_uring_try(kvx_file *file, uint64_t bytes, char *why);
/* Copies everything it needs. Does not block. -EINVAL: a block id out of range, a part of another layout.
 * -ESHUTDOWN. */
KVX_API int kvx_engine_submit(kvx_engine *engine, const kvx_job *job);
/* Takes one finished job of `direction`: 1 and fills *result, or 0. The details stay until
 * kvx_engine_forget(). */
KVX_API int kvx_engine_poll(kvx_engine *engine, int direction, kvx_result *result);
/* Per-chunk status bytes [num_chunks] and, for chunks that are not OK, errors [num_chunks] (either may be
 * NULL) of a polled job. */
KVX_API int kvx_engine_details(kvx_engine *engine, uint64_t job_id, uint8_t *status, kvx_chunk_error *errors);
KVX_API void kvx_engine_forget(kvx_engine *engine, uint64_t job_id);
/* A chunk of an earlier result was KVX_LOST and its last call has returned now: its slot may be reused. Take
 * these before polling results, or else one may be of a job whose result was not polled yet. Takes one such
 * (job_id, chunk index): 1, or 0 if none. */
KVX_API int kvx_engine_late(kvx_engine *engine, uint64_t *job_id, uint32_t *chunk);
/* Blocks until a job of a direction in `mask` (1 << direction) can be polled, a late chunk can be taken (with
 * the store bit), kvx_engine_wake() was called for one, or timeout_ns passed. 1 if woken, 0 on timeout. */
KVX_API int kvx_engine_wait(kvx_engine *engine, uint32_t mask, uint64_t timeout_ns);
/* Ends the wait for a direction in `mask` that is under way, or else the next one. Waits for no call. */
KVX_API void kvx_engine_wake(kvx_engine *engine, uint32_t mask);
/* Blocks until the source blocks of a store job may be reused, whatever its outcome: every chunk has been
 * gathered, or, without staging, its write has returned. (A write that was given up may go on reading them:
 * its slot is never believed.) 1; 0 on timeout; -ENOENT where the job isn't known. */
KVX_API int kvx_engine_wait_gathered(kvx_engine *engine, uint64_t job_id, uint64_t timeout_ns);
/* Closes the job's gate now: chunks not yet done become KVX_CANCELLED (KVX_LOST under a write that has not
 * returned); the result follows at once, or when a copy under way is done, or a read straight into the
 * caller's memory has returned. */
KVX_API int kvx_engine_cancel(kvx_engine *engine, uint64_t job_id);
/* Cancels what is queued, gives calls under way until timeout_ns, then gives those up. Results can still be
 * polled. May be called by several threads, and again. Returns the number of threads left behind (>= 0). A
 * load whose read without staging has not returned then ends with KVX_LOST: its memory must stay where it is.
 */
KVX_API int kvx_engine_shutdown(kvx_engine *engine, uint64_t timeout_ns);
KVX_API void kvx_engine_free(kvx_engine *engine); /* after shutdown */

/* Monotonic counters, except those marked as gauges. */
typedef struct kvx_stats {
  uint64_t chunks_stored, chunks_loaded;
  uint64_t bytes_written, bytes_read; /* moved by pwrite and pread, trailers and padding included */
  uint64_t chunks_verified;           /* loaded chunks whose verification ran to an answer, good or bad */
  uint64_t segments_verified;         /* segments compared with their sums */
  uint64_t truncated, bad_trailer, foreign, bad_sum; /* verification failures, one a chunk */
  uint64_t absent;
  uint64_t io_errors;
  uint64_t deadline_cuts; /* chunks */
  uint64_t lost_calls, late_returns;
  uint64_t lost_writes;        /* those of lost_calls that were a store's */
  uint64_t read_ns, write_ns;  /* spent in reads and writes that have returned, over all threads */
  uint64_t staging_peak_bytes; /* most that staging_bytes has been */
  uint64_t queued_chunks;      /* gauge */
  uint64_t busy_threads;       /* gauge */
  uint64_t threads;            /* gauge: in service, that is, not lost */
  uint64_t lost_threads;       /* gauge: calls that have not returned */
  uint64_t leaked_bytes;       /* gauge: staging under them */
  uint64_t staging_bytes;      /* gauge: all staging, that included */
  uint64_t rings;              /* gauge: threads, lost ones included, whose transfers go by io_uring */
  uint64_t registered_bytes;   /* gauge: staging that is registered with a ring */
} kvx_stats;
KVX_API void kvx_engine_stats(kvx_engine *engine, kvx_stats *out);

/* ---- 7. Host rows that ranks share byte by byte ------------------------------------------- */

/* Pages <-> rows in host memory (kvxfer/rows.py): a row is a chunk, and has for each tensor a cell with the
 * canonical pages of the chunk's blocks side by side. Nothing is summed.
 *
 * For f in [0, num_fragments), block b of a tensor and page p = row * blocks_per_chunk + position:
 *   local      tensor_base + b * block_stride + local_offset + f * local_stride, fragment_size bytes
 *   canonical  cell_base + row * row_stride + position * page_stride + canonical_offset + f *
 * canonical_stride */
typedef struct kvx_row_run {
  uint64_t local_offset;
  uint64_t canonical_offset;
  uint64_t fragment_size;
  uint64_t num_fragments;
  uint64_t local_stride;
  uint64_t canonical_stride;
} kvx_row_run;

/* A tensor of a group, and its cell. */
typedef struct kvx_row_cell {
  uint64_t tensor_base; /* address of block 0's page */
  uint64_t block_stride;
  uint64_t num_blocks;
  uint64_t local_bytes; /* of a page: its runs end within them */
  uint64_t cell_base;   /* address of the cell in row 0 */
  uint64_t page_stride; /* bytes of a canonical page's place in the cell: its runs end within them */
  uint32_t first_run;   /* [first_run, first_run + num_runs) of the plan's */
  uint32_t num_runs;
  uint32_t num_writers;  /* ranks that hold these bytes; a gather copies page p where p % num_writers ... */
  uint32_t writer_index; /* ... is this */
} kvx_row_cell;

/* Which byte is which, for all groups of a rank, over live memory that the caller keeps. Immutable.
 * `group_cells` [num_groups]: how many of `cells`, in order, are of each group. -EINVAL: a run leaves its
 * page or its place, a cell its row, or anything the address space. */
typedef struct kvx_row_plan kvx_row_plan;
KVX_API int kvx_row_plan_new(const kvx_row_cell *cells, const kvx_row_run *runs, uint64_t num_runs,
                             const uint32_t *group_cells, uint32_t num_groups, uint64_t row_stride,
                             uint64_t num_rows, uint32_t blocks_per_chunk, kvx_row_plan **out);
KVX_API void kvx_row_plan_free(kvx_row_plan *plan);

/* Copies blocks into their pages of the rows, or back. `block_ids` and `pages` go together and are of one
 * group after another, `group_pages` [num_groups] of each. A gather leaves out what other ranks are elected
 * to write; all bytes of the rows that no run names are kept. `threads` <= 1 runs in the caller. *nbytes:
 * what was copied. -EINVAL for a block or page out of range, before anything is written. */
KVX_API int kvx_row_gather(const kvx_row_plan *plan, const int64_t *block_ids, const int64_t *pages,
                           const uint64_t *group_pages, int threads, uint64_t *nbytes);
KVX_API int kvx_row_scatter(const kvx_row_plan *plan, const int64_t *block_ids, const int64_t *pages,
                            const uint64_t *group_pages, int threads, uint64_t *nbytes);

#ifdef __cplusplus
}
#endif
#endif
