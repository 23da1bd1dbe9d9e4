#pragma once

// The part of NCCL's binary interface that is used here, as of version 2.14. Later versions keep it, and the build needs no header of NCCL.
// A test compares it with NCCL's own header. Source: NCCL's documentation, "API".

#include <cstddef>
#include <cstdint>
#include <type_traits>

struct CUstream_st;
struct ncclComm;

namespace dltrain::comm::nccl {

inline constexpr int oldest = 21400;  // the first version with ncclConfig_t

using Comm = ncclComm*;
using Result = int;
inline constexpr Result success = 0, internal_error = 3, remote_error = 6;

struct UniqueId {
  char bytes[128];
};

struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = oldest;  // the version of this struct
  int blocking = 1;           // 0: NCCL launches each group from a new thread
};

using DataType = int;
inline constexpr DataType int8 = 0, uint8 = 1, int32 = 2, int64 = 4, fp16 = 6, fp32 = 7, fp64 = 8, bf16 = 9;
using RedOp = int;
inline constexpr RedOp sum = 0, avg = 4;

// DLT_NCCL(name in NCCL, name here, type)
#define DLT_NCCL_FUNCTIONS(DLT_NCCL)                                                                                                 \
  DLT_NCCL(ncclGetVersion, get_version, Result(int* version))                                                                        \
  DLT_NCCL(ncclGetErrorString, get_error_string, const char*(Result))                                                                \
  DLT_NCCL(ncclGetLastError, get_last_error, const char*(Comm))                                                                      \
  DLT_NCCL(ncclGetUniqueId, get_unique_id, Result(UniqueId*))                                                                        \
  DLT_NCCL(ncclCommInitRankConfig, comm_init_rank_config, Result(Comm*, int ranks, UniqueId, int rank, Config*))                     \
  DLT_NCCL(ncclCommGetAsyncError, comm_get_async_error, Result(Comm, Result*))                                                       \
  DLT_NCCL(ncclCommFinalize, comm_finalize, Result(Comm))                                                                            \
  DLT_NCCL(ncclCommDestroy, comm_destroy, Result(Comm))                                                                              \
  DLT_NCCL(ncclCommAbort, comm_abort, Result(Comm))                                                                                  \
  DLT_NCCL(ncclGroupStart, group_start, Result())                                                                                    \
  DLT_NCCL(ncclGroupEnd, group_end, Result())                                                                                        \
  DLT_NCCL(ncclSend, send, Result(const void* from, size_t count, DataType, int peer, Comm, CUstream_st*))                           \
  DLT_NCCL(ncclRecv, recv, Result(void* to, size_t count, DataType, int peer, Comm, CUstream_st*))                                   \
  DLT_NCCL(ncclAllReduce, all_reduce, Result(const void* from, void* to, size_t count, DataType, RedOp, Comm, CUstream_st*))         \
  DLT_NCCL(ncclReduce, reduce, Result(const void* from, void* to, size_t count, DataType, RedOp, int root, Comm, CUstream_st*))      \
  DLT_NCCL(ncclBroadcast, broadcast, Result(const void* from, void* to, size_t count, DataType, int root, Comm, CUstream_st*))       \
  DLT_NCCL(ncclReduceScatter, reduce_scatter, Result(const void* from, void* to, size_t count, DataType, RedOp, Comm, CUstream_st*)) \
  DLT_NCCL(ncclAllGather, all_gather, Result(const void* from, void* to, size_t count, DataType, Comm, CUstream_st*))

struct Api {
#define DLT_NCCL(theirs, ours, ...) std::add_pointer_t<__VA_ARGS__> ours = nullptr;
  DLT_NCCL_FUNCTIONS(DLT_NCCL)
#undef DLT_NCCL
};

}  // namespace dltrain::comm::nccl
