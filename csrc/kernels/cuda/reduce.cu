#include "core/memory.h"
#include "kernels/coding.h"
#include "kernels/cuda/batch.h"
#include "kernels/cuda/launch.h"
#include "kernels/operations.h"
#include "math/sum_squares.h"

#include <utility>

namespace dltrain::cuda {

namespace {

// The parameters of both kernels of a batch: the first one computes a part for each chunk, and the second one adds up the parts of each
// row. The order of the additions does not depend on the device.
template <class Reduction>
struct Parts {
  Reduction reduction;
  double* parts;
  int64_t first_row;
};
template <class Reduction>
using BatchOf = Batch<Parts<Reduction>, ListOf<Reduction>>;

// Merges the values of the threads as a tree. The result is that of thread 0.
__device__ double merge_threads(double mine) {
  __shared__ double values[threads];
  __syncthreads();  // the previous result has been read
  values[threadIdx.x] = mine;
  for (unsigned half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) values[threadIdx.x] = math::SumSquares::merge(values[threadIdx.x], values[threadIdx.x + half]);
  }
  return values[threadIdx.x];  // each thread reads what it wrote itself: the writes of others may not be visible yet
}

// A constant outside of device code, because may_be_compact is a host function.
template <class Reduction, std::size_t k>
constexpr bool is_compact = may_be_compact<Reduction>(k);

template <class Reduction, std::size_t k>
__device__ float value_of(const BatchOf<Reduction>& batch, const BatchRow<ListOf<Reduction>>& row, int64_t i) {
  const Format& format = batch.signature.formats[k];
  if constexpr (is_compact<Reduction, k>) {
    if (format.is_coded()) {
      float value = 0.0f;
      with_codec(format,
                 [&]<class C>(std::type_identity<C>) { value = decoded_at<C>(static_cast<const uint8_t*>(row.data[k]), row.numel, i); });
      return value;
    }
    if (format.narrowing == Narrowing::extended) {
      return math::widen({static_cast<const BFloat16*>(row.data[k])[i], static_cast<const uint8_t*>(row.beside)[i]});
    }
  }
  return first_of(TypedPointer{row.data[k], format.dtype}.from(i));
}

template <class Reduction, std::size_t... K, int... S>
__device__ void add_chunk(const BatchOf<Reduction>& batch, int64_t chunk, std::index_sequence<K...>, std::integer_sequence<int, S...>) {
  const auto& row = batch.rows[batch.row_of(chunk)];
  const int64_t first = (chunk - row.first_chunk) * chunk_size;
  const int64_t last = first + chunk_size < row.numel ? first + chunk_size : row.numel;
  const auto element = batch.operation.reduction.at(row);
  double sums[Reduction::sums];
  for (double& sum : sums) sum = math::SumSquares::none();
  for (int64_t i = first + threadIdx.x; i < last; i += threads) {
    const float values[] = {value_of<Reduction, K>(batch, row, i)...};
    ((sums[S] = math::SumSquares::add(sums[S], element(SumNumber<S>{}, values[K]...))), ...);
  }
  for (int s = 0; s < Reduction::sums; ++s) {
    const double sum = merge_threads(sums[s]);
    if (threadIdx.x == 0) batch.operation.parts[chunk * Reduction::sums + s] = sum;
  }
}

template <class Reduction>
__global__ void __launch_bounds__(threads) chunks_kernel(const __grid_constant__ BatchOf<Reduction> batch) {
  for (int64_t chunk = blockIdx.x; chunk < batch.chunks; chunk += gridDim.x) {
    add_chunk<Reduction>(batch, chunk, std::make_index_sequence<Reduction::streams>{}, std::make_integer_sequence<int, Reduction::sums>{});
  }
}

template <class Reduction>
__global__ void __launch_bounds__(threads) rows_kernel(const __grid_constant__ BatchOf<Reduction> batch) {
  constexpr int sums = Reduction::sums;
  for (int index = blockIdx.x; index < batch.size; index += gridDim.x) {
    const int64_t last = index + 1 < batch.size ? batch.rows[index + 1].first_chunk : batch.chunks;
    for (int s = 0; s < sums; ++s) {
      double sum = math::SumSquares::none();
      for (int64_t chunk = batch.rows[index].first_chunk + threadIdx.x; chunk < last; chunk += threads) {
        sum = math::SumSquares::merge(sum, batch.operation.parts[chunk * sums + s]);
      }
      sum = merge_threads(sum);
      if (threadIdx.x == 0) batch.operation.reduction.results(batch.operation.first_row + index, batch.rows[index])[s] = sum;
    }
  }
}

template <class Reduction>
void enqueue(const ExecutionContext& context, const ListOf<Reduction>& list, const Reduction& reduction) {
  constexpr int sums = Reduction::sums;
  in_batches<most<Parts<Reduction>, ListOf<Reduction>>>(list, Parts<Reduction>{reduction, nullptr, 0}, [&](auto& batch, int64_t first) {
    const Memory parts(context, batch.chunks * sums * static_cast<int64_t>(sizeof(double)));
    batch.operation = {reduction, static_cast<double*>(parts.data()), first};
    launch(context, chunks_kernel<Reduction>, batch.chunks, batch, "starting reduce");
    launch(context, rows_kernel<Reduction>, batch.size, batch, "starting the second half of reduce");
  });
}

}  // namespace

const Table<Reduce, Reductions> reduce_table = make_table<Reduce, Reductions>([]<class O>(std::type_identity<O>) { return enqueue<O>; });

}  // namespace dltrain::cuda
