#pragma once

// What one launch processes: as many rows of a tensor list as fit into a kernel's parameters. They are passed by value, so a list of any
// length takes a few launches, nothing has to be copied to the device first, and a captured graph contains all it needs. Short lists have
// kernels of their own, because every launch copies the whole parameters, with unused rows.
//
//   rows       |------ row 0 ------|- row 1 -|row 2|
//   chunks     |   0   |   1   | 2 |    3    |  4  |        a thread block processes one chunk at a time

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/cuda/check.h"
#include "core/cuda/runtime.h"
#include "core/execution_context.h"
#include "core/host_device.h"
#include "core/tensor_list.h"

namespace dltrain::cuda {

inline constexpr unsigned threads = 256;        // per block
inline constexpr int resident = 4;              // blocks per multiprocessor at the same time, which leaves a thread 64 registers
inline constexpr int64_t chunk_size = 1 << 13;  // in elements; a multiple of four, which are one 16-byte access

static_assert(CUDART_VERSION >= 12010, "kernels with 32 KiB of parameters need CUDA 12.1");
inline constexpr int64_t parameter_bytes = 32764;

template <class List>
struct BatchRow : List::RowNumbers {  // a base, because an empty base takes no space
  void* data[List::streams];
  void* beside;
  int64_t numel;
  int64_t first_chunk;
};

// The stretch that contains an index: the last one that begins at the index or before it, since stretches may be empty.
template <class First>
DLT_HD int stretch_of(int64_t index, int count, const First& first) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first(middle) <= index ? low : high) = middle;
  }
  return low;
}

inline constexpr int few = 8;  // rows of a short list

template <class Operation, class List>
inline constexpr int most =
    static_cast<int>((parameter_bytes - 32 - static_cast<int64_t>(sizeof(Operation))) / static_cast<int64_t>(sizeof(BatchRow<List>)));

template <class Operation, class List, int capacity = most<Operation, List>>
struct Batch {
  Operation operation;
  Signature<List::streams> signature;
  int64_t chunks;
  int size;
  BatchRow<List> rows[capacity];

  DLT_HD int row_of(int64_t chunk) const {
    return stretch_of(chunk, size, [this](int row) DLT_HD_LAMBDA { return rows[row].first_chunk; });
  }
};

// Calls launch(batch, index of the batch's first row) for each batch of the list.
template <int capacity, class List, class Operation, class Launch>
void in_batches(const List& list, const Operation& operation, Launch&& launch) {
  using B = Batch<Operation, List, capacity>;
  static_assert(sizeof(B) <= parameter_bytes && most<Operation, List> > 64);
  B batch;
  batch.operation = operation;
  batch.signature = list.signature();
  for (int64_t first = 0; first < list.size(); first += batch.size) {
    batch.size = static_cast<int>(std::min<int64_t>(capacity, list.size() - first));
    batch.chunks = 0;
    for (int i = 0; i < batch.size; ++i) {
      const auto& row = list.row(first + i);
      std::copy(row.data.begin(), row.data.end(), batch.rows[i].data);
      batch.rows[i].beside = row.beside;
      static_cast<typename List::RowNumbers&>(batch.rows[i]) = row.numbers;
      batch.rows[i].numel = row.numel;
      batch.rows[i].first_chunk = batch.chunks;
      batch.chunks += (row.numel + chunk_size - 1) / chunk_size;
    }
    launch(batch, first);
  }
}

// Every kernel takes one struct of parameters, and its loops work with a grid of any size. The grid is limited to a few times the number of
// blocks that run at once: then few blocks repeat what they compute before their loop, and the load is still balanced at the end.
template <class Parameters>
void launch(const ExecutionContext& context, void (*kernel)(Parameters), int64_t blocks, const Parameters& parameters, const char* what) {
  if (blocks == 0) return;
  const DeviceGuard guard(context.device);
  void* arguments[] = {const_cast<Parameters*>(&parameters)};
  constexpr int waves = 4;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{waves} * resident * multiprocessors(context.device)));
  check(cudaLaunchKernel(kernel, dim3(grid), dim3(threads), arguments, 0, context.stream), what);
}

}  // namespace dltrain::cuda
