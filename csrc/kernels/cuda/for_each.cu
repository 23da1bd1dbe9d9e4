#include "kernels/cuda/batch.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/operations.h"

#include <utility>

namespace dltrain::cuda {

namespace {

// Four elements as they lie in memory: all streams are on their way before the first is widened.
union Raw {
  Pack<float> fp32;
  Pack<Half> fp16;
  Pack<BFloat16> bf16;

  __device__ Pack<float>& of(const float*) { return fp32; }
  __device__ Pack<Half>& of(const Half*) { return fp16; }
  __device__ Pack<BFloat16>& of(const BFloat16*) { return bf16; }
};

__device__ Raw load(const Elements& from) {
  Raw raw;
  with_type(from, [&]<class T>(const T* values) {
    if (is_aligned(values)) {
      raw.of(values) = *reinterpret_cast<const Pack<T>*>(values);
    } else {
      for (int i = 0; i < width; ++i) raw.of(values).values[i] = values[i];
    }
  });
  return raw;
}

__device__ void widen_to(float (&to)[width], Raw& raw, Dtype dtype) {
  with_type(Elements{nullptr, dtype}, [&](const auto* typed) {
    for (int i = 0; i < width; ++i) to[i] = widen(raw.of(typed).values[i]);
  });
}

__device__ void store(const Elements& to, const float (&from)[width]) {
  with_type(to, [&]<class T>(T* out) {
    Pack<T> pack;
    for (int i = 0; i < width; ++i) pack.values[i] = narrow<T>(from[i]);
    if (is_aligned(out)) {
      *reinterpret_cast<Pack<T>*>(out) = pack;
    } else {
      for (int i = 0; i < width; ++i) out[i] = pack.values[i];
    }
  });
}

__device__ void store(const Elements& to, float value) {
  with_type(to, [&]<class T>(T* out) { *out = narrow<T>(value); });
}

template <bool written, class Value>
__device__ void store_if(const Elements& to, const Value& value) {
  if constexpr (written) store(to, value);
}

template <class Operation, class B, std::size_t... K>
__device__ void run(const typename Operation::Element& element, const B& batch, const BatchRow<ListOf<Operation>>& row, int64_t first,
                    int64_t last, std::index_sequence<K...>) {
  const auto stream = [&](std::size_t k, int64_t i) { return Elements{row.data[k], batch.form.dtypes[k]}.from(i); };
  const int64_t whole = first + (last - first) / width * width;
  for (int64_t i = first + width * threadIdx.x; i < whole; i += width * threads) {
    Raw raw[] = {load(stream(K, i))...};
    float values[sizeof...(K)][width];
    (widen_to(values[K], raw[K], batch.form.dtypes[K]), ...);
#pragma unroll
    for (int lane = 0; lane < width; ++lane) element(values[K][lane]...);
    (store_if<Operation::writes(K)>(stream(K, i), values[K]), ...);
    if (batch.form.copies) store(Elements{row.copy, batch.form.copy}.from(i), values[0]);
  }
  if (const int64_t i = whole + threadIdx.x; i < last) {
    float values[] = {first_of(stream(K, i))...};
    element(values[K]...);
    (store_if<Operation::writes(K)>(stream(K, i), values[K]), ...);
    if (batch.form.copies) store(Elements{row.copy, batch.form.copy}.from(i), values[0]);
  }
}

template <class Operation, int capacity>
__global__ void __launch_bounds__(threads, Operation::streams <= 4 ? resident : resident - 1)
    for_each_kernel(const __grid_constant__ Batch<Operation, ListOf<Operation>, capacity> batch) {
  if (batch.operation.skip()) return;
  __shared__ typename Operation::Element prepared;
  int known = -1;  // the row that it is prepared for
  // Side by side, so that most are of one row.
  const int64_t end = batch.chunks * (blockIdx.x + 1) / gridDim.x;
  for (int64_t chunk = batch.chunks * blockIdx.x / gridDim.x; chunk < end; ++chunk) {
    const int index = batch.row_of(chunk);
    const auto& row = batch.rows[index];
    if (index != known) {
      __syncthreads();  // all have taken the one before
      if (threadIdx.x == 0) prepared = batch.operation.at(row);
      __syncthreads();
      known = index;
    }
    const auto element = prepared;
    const int64_t first = (chunk - row.first_chunk) * chunk_size;
    const int64_t last = first + chunk_size < row.numel ? first + chunk_size : row.numel;
    run<Operation>(element, batch, row, first, last, std::make_index_sequence<Operation::streams>{});
  }
}

template <int capacity, class Operation>
void enqueue_up_to(const Place& place, const ListOf<Operation>& list, const Operation& operation) {
  in_batches<capacity>(list, operation, [&](const auto& batch, int64_t) {
    launch(place, for_each_kernel<Operation, capacity>, batch.chunks, batch, "starting for_each");
  });
}

template <class Operation>
void enqueue(const Place& place, const ListOf<Operation>& list, const Operation& operation) {
  if (list.size() <= few) return enqueue_up_to<few>(place, list, operation);
  enqueue_up_to<most<Operation, ListOf<Operation>>>(place, list, operation);
}

}  // namespace

const Table<ForEach, Elementwise> for_each_table =
    make_table<ForEach, Elementwise>([]<class O>(std::type_identity<O>) { return enqueue<O>; });

}  // namespace dltrain::cuda
