#include "kernels/cuda/batch.h"
#include "kernels/cuda/launch.h"
#include "kernels/operations.h"

#include <utility>

namespace dltrain::cuda {

namespace {

constexpr int width = 4;  // elements of a 16-byte access

__device__ bool is_aligned(const float* data) { return reinterpret_cast<uintptr_t>(data) % (width * sizeof(float)) == 0; }

__device__ void load(float (&to)[width], const float* from) {
  if (is_aligned(from)) {
    const float4 values = *reinterpret_cast<const float4*>(from);
    to[0] = values.x;
    to[1] = values.y;
    to[2] = values.z;
    to[3] = values.w;
  } else {
    for (int i = 0; i < width; ++i) to[i] = from[i];
  }
}

__device__ void store(float* to, const float (&from)[width]) {
  if (is_aligned(to)) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
  } else {
    for (int i = 0; i < width; ++i) to[i] = from[i];
  }
}

template <bool written>
__device__ void store_if(float* to, const float (&from)[width]) {
  if constexpr (written) store(to, from);
}

template <class Operation, std::size_t... K>
__device__ void run(const typename Operation::Element& element, float* const* streams, int64_t first, int64_t last,
                    std::index_sequence<K...>) {
  const int64_t whole = first + (last - first) / width * width;
  for (int64_t i = first + width * threadIdx.x; i < whole; i += width * threads) {
    float values[sizeof...(K)][width];
    (load(values[K], streams[K] + i), ...);
#pragma unroll
    for (int lane = 0; lane < width; ++lane) element(values[K][lane]...);
    (store_if<Operation::written[K]>(streams[K] + i, values[K]), ...);
  }
  if (const int64_t i = whole + threadIdx.x; i < last) element(streams[K][i]...);
}

template <class Operation>
__global__ void __launch_bounds__(threads) for_each_kernel(const __grid_constant__ Batch<Operation, Operation::streams> batch) {
  if (batch.operation.skip()) return;
  __shared__ typename Operation::Element prepared;
  int known = -1;  // the row that it is prepared for
  for (int64_t chunk = blockIdx.x; chunk < batch.chunks; chunk += gridDim.x) {
    const int index = batch.row_of(chunk);
    const auto& row = batch.rows[index];
    if (index != known) {
      __syncthreads();  // all have taken the one before
      if (threadIdx.x == 0) prepared = batch.operation.at(row.scalars);
      __syncthreads();
      known = index;
    }
    const auto element = prepared;
    const int64_t first = (chunk - row.first_chunk) * chunk_size;
    const int64_t last = first + chunk_size < row.numel ? first + chunk_size : row.numel;
    run<Operation>(element, row.data, first, last, std::make_index_sequence<Operation::streams>{});
  }
}

template <class Operation>
void enqueue(const Place& place, const TensorList<Operation::streams>& list, const Operation& operation) {
  in_batches(list, operation,
             [&](const auto& batch, int64_t) { launch(place, for_each_kernel<Operation>, batch.chunks, batch, "starting for_each"); });
}

}  // namespace

const Table<ForEach, Elementwise> for_each_table =
    make_table<ForEach, Elementwise>([]<class O>(std::type_identity<O>) { return enqueue<O>; });

}  // namespace dltrain::cuda
