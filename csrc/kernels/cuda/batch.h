#pragma once

// What one launch works on: so many rows of a tensor list as fit into a kernel's parameters. They travel by value, so a list of any length
// is a few launches, nothing has to be copied to the device first, and a captured graph holds all it needs. Short lists have kernels of
// their own, since all that there is room for is copied at each launch.
//
//   rows       |------ row 0 ------|- row 1 -|row 2|
//   chunks     |   0   |   1   | 2 |    3    |  4  |        a thread block each

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/cuda/check.h"
#include "core/cuda/runtime.h"
#include "core/execution_context.h"
#include "core/host_device.h"
#include "core/tensor_list.h"

namespace dltrain::cuda {

inline constexpr unsigned threads = 256;        // of a block
inline constexpr int resident = 4;              // blocks of a multiprocessor at once, which leaves a thread 64 registers
inline constexpr int64_t chunk_size = 1 << 13;  // elements; a multiple of the four that a 16-byte access takes

static_assert(CUDART_VERSION >= 12010, "kernels with 32 KiB of parameters need CUDA 12.1");
inline constexpr int64_t parameter_bytes = 32764;

template <class List>
struct BatchRow : List::RowNumbers {  // a base, as one that is empty then takes no room
  void* data[List::streams];
  void* copy;
  int64_t numel;
  int64_t first_chunk;
};

// Which of some stretches an index lies in: the last that begins there or before, since those without elements have none.
template <class First>
DLT_HD int stretch_of(int64_t index, int count, const First& first) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first(middle) <= index ? low : high) = middle;
  }
  return low;
}

inline constexpr int few = 8;  // rows

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

// Calls launch(batch, index of the batch's first row) for the list, batch by batch.
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
      batch.rows[i].copy = row.copy;
      static_cast<typename List::RowNumbers&>(batch.rows[i]) = row.numbers;
      batch.rows[i].numel = row.numel;
      batch.rows[i].first_chunk = batch.chunks;
      batch.chunks += (row.numel + chunk_size - 1) / chunk_size;
    }
    launch(batch, first);
  }
}

// Every kernel takes one struct of parameters; all of its loops go on by the size of the grid, so that the grid may be cut. It is cut to a
// few times what the device holds at once: what a block works out before its loop it then does seldom, and the last blocks still even out.
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
