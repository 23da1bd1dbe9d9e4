#include "core/memory.h"
#include "kernels/cuda/batch.h"
#include "kernels/cuda/launch.h"
#include "kernels/operations.h"

namespace dltrain::cuda {

namespace {

// Both kernels of a batch: a part for each chunk, then the parts of each row. Every sum has one order, whatever the device.
template <class Reduction>
struct Parts {
  typename Reduction::Value* parts;
  typename Reduction::Value* results;
};

// The threads' values merged as a tree, for thread 0.
template <class Reduction>
__device__ typename Reduction::Value merge_threads(typename Reduction::Value mine) {
  __shared__ typename Reduction::Value values[threads];
  __syncthreads();  // the tree before has been read
  values[threadIdx.x] = mine;
  for (unsigned half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) values[threadIdx.x] = Reduction::merge(values[threadIdx.x], values[threadIdx.x + half]);
  }
  return values[threadIdx.x];  // what it wrote itself: another's may still be on its way
}

template <class Reduction>
__global__ void __launch_bounds__(threads) chunks_kernel(const __grid_constant__ Batch<Parts<Reduction>, TensorList<1>> batch) {
  for (int64_t chunk = blockIdx.x; chunk < batch.chunks; chunk += gridDim.x) {
    const auto& row = batch.rows[batch.row_of(chunk)];
    const int64_t first = (chunk - row.first_chunk) * chunk_size;
    const int64_t last = first + chunk_size < row.numel ? first + chunk_size : row.numel;
    auto value = Reduction::none();
    with_type(Elements{row.data[0], batch.form.dtypes[0]}, [&](const auto* values) {
      for (int64_t i = first + threadIdx.x; i < last; i += threads) value = Reduction::add(value, widen(values[i]));
    });
    value = merge_threads<Reduction>(value);
    if (threadIdx.x == 0) batch.operation.parts[chunk] = value;
  }
}

template <class Reduction>
__global__ void __launch_bounds__(threads) rows_kernel(const __grid_constant__ Batch<Parts<Reduction>, TensorList<1>> batch) {
  for (int index = blockIdx.x; index < batch.size; index += gridDim.x) {
    const int64_t last = index + 1 < batch.size ? batch.rows[index + 1].first_chunk : batch.chunks;
    auto value = Reduction::none();
    for (int64_t chunk = batch.rows[index].first_chunk + threadIdx.x; chunk < last; chunk += threads) {
      value = Reduction::merge(value, batch.operation.parts[chunk]);
    }
    value = merge_threads<Reduction>(value);
    if (threadIdx.x == 0) batch.operation.results[index] = value;
  }
}

template <class Reduction>
void enqueue(const Place& place, const TensorList<1>& list, typename Reduction::Value* results) {
  in_batches<most<Parts<Reduction>, TensorList<1>>>(list, Parts<Reduction>{}, [&](auto& batch, int64_t first) {
    const Memory parts(place, batch.chunks * static_cast<int64_t>(sizeof(typename Reduction::Value)));
    batch.operation = {static_cast<typename Reduction::Value*>(parts.data()), results + first};
    launch(place, chunks_kernel<Reduction>, batch.chunks, batch, "starting reduce");
    launch(place, rows_kernel<Reduction>, batch.size, batch, "starting the second half of reduce");
  });
}

}  // namespace

const Table<Reduce, Reductions> reduce_table = make_table<Reduce, Reductions>([]<class O>(std::type_identity<O>) { return enqueue<O>; });

}  // namespace dltrain::cuda
