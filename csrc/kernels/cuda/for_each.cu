#include "kernels/coding.h"
#include "kernels/cuda/batch.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/tile.h"
#include "kernels/operations.h"

#include <utility>

namespace dltrain::cuda {

namespace {

// The part of a row that a lane processes: four elements from i on, of which `present` exist. If `all` is true, all four exist.
template <bool all>
struct Quad {
  int64_t i;
  int present;

  __device__ bool is_whole() const { return all || present >= width; }
  __device__ bool has(int c) const { return all || c < present; }
};

// Four elements in their type in memory, so that all streams are being loaded before the first one is widened.
union Raw {
  Pack<float> fp32;
  Pack<Half> fp16;
  Pack<BFloat16> bf16;

  __device__ Pack<float>& of(const float*) { return fp32; }
  __device__ Pack<Half>& of(const Half*) { return fp16; }
  __device__ Pack<BFloat16>& of(const BFloat16*) { return bf16; }
};

template <class T, bool all>
__device__ void get(Pack<T>& pack, const T* from, const Quad<all>& quad) {
  if (quad.is_whole() && is_aligned(from)) {
    pack = *reinterpret_cast<const Pack<T>*>(from);
  } else {
    for (int c = 0; c < width; ++c) pack.values[c] = quad.has(c) ? from[c] : T{};
  }
}

template <class T, bool all>
__device__ void put(T* to, const Quad<all>& quad, const Pack<T>& pack) {
  if (quad.is_whole() && is_aligned(to)) {
    *reinterpret_cast<Pack<T>*>(to) = pack;
  } else {
    for (int c = 0; c < width; ++c) {
      if (quad.has(c)) to[c] = pack.values[c];
    }
  }
}

template <bool all>
__device__ Raw load(const TypedPointer& from, const Quad<all>& quad) {
  Raw raw;
  with_type(from.from(quad.i), [&]<class T>(const T* values) { get(raw.of(values), values, quad); });
  return raw;
}

__device__ void widen_to(float (&to)[width], Raw& raw, Dtype dtype) {
  with_type(TypedPointer{nullptr, dtype}, [&](const auto* typed) {
    for (int c = 0; c < width; ++c) to[c] = widen(raw.of(typed).values[c]);
  });
}

template <bool all>
__device__ void store(const TypedPointer& to, const Quad<all>& quad, const float (&values)[width]) {
  with_type(to.from(quad.i), [&]<class T>(T* out) {
    Pack<T> pack;
    for (int c = 0; c < width; ++c) pack.values[c] = narrow<T>(values[c]);
    put(out, quad, pack);
  });
}

__device__ void store(const TypedPointer& to, float value) {
  with_type(to, [&]<class T>(T* out) { *out = narrow<T>(value); });
}

// A stream of a row. If it is in a codec's format, the quads of a warp are one block.
template <bool compact>
struct Stream {
  void* data;
  void* beside;
  Format format;
  int64_t numel;  // of the row

  __device__ TypedPointer elements(int64_t first) const { return TypedPointer{data, format.dtype}.from(first); }

  template <class Quad>
  __device__ Raw load(const Quad& quad) const {
    if constexpr (compact) {
      if (format.is_coded()) return decoded(quad.i);
      if (format.narrowing == Narrowing::extended) return extended(quad);
    }
    return cuda::load(elements(0), quad);
  }

  // index: of the quad's first element in the whole tensor.
  template <class Quad>
  __device__ void store(const Quad& quad, const float (&values)[width], const math::RandomStream& random, int64_t index) const {
    if constexpr (compact) {
      if (format.is_coded()) return encode(quad.i, values);
      if (format.narrowing == Narrowing::stochastic) return round(quad, values, random, index);
      if (format.narrowing == Narrowing::extended) return extend(quad, values);
    }
    cuda::store(elements(0), quad, values);
  }
  __device__ void store(int64_t i, float value) const { cuda::store(elements(i), value); }

 private:
  static constexpr int block = width * warp;

  __device__ Tile<block, false> tile(int64_t i) const {
    const int64_t index = i / block, rest = numel - index * block;
    return Tile<block, false>(index, rest < block ? static_cast<int>(rest) : block);
  }

  __device__ Raw decoded(int64_t i) const {
    Raw raw;
    auto held = tile(i);
    with_codec(format, [&]<class C>(std::type_identity<C>) {
      static_assert(MessageLayout<C>::tile == block);
      decode<C>(held, static_cast<const uint8_t*>(data), numel, [](float, float x) { return x; });
    });
    held.give(raw.fp32.values);
    return raw;
  }

  __device__ void encode(int64_t i, const float (&values)[width]) const {
    auto held = tile(i);
    held.take(values);
    with_codec(format, [&]<class C>(std::type_identity<C>) { dltrain::encode<C>(held, static_cast<uint8_t*>(data), numel); });
  }

  template <class Quad>
  __device__ void round(const Quad& quad, const float (&values)[width], const math::RandomStream& random, int64_t index) const {
    const int before = static_cast<int>(index % width);  // not 0 if the row begins within four elements that share words
    const math::Words first = math::words_for(random, index), last = before ? math::words_for(random, index + width - 1) : first;
    Pack<BFloat16> pack;
    for (int c = 0; c < width; ++c) {
      uint32_t word = 0;
      for (int w = 0; w < width; ++w) {  // without an index that is not constant, so that the words stay in registers
        if (w == (before + c) % width) word = before + c < width ? first.word[w] : last.word[w];
      }
      pack.values[c] = math::stochastic_bfloat16(values[c], math::half_for(index + c, word));
    }
    put(static_cast<BFloat16*>(data) + quad.i, quad, pack);
  }

  template <class Quad>
  __device__ Raw extended(const Quad& quad) const {
    Pack<BFloat16> elements;
    Pack<uint8_t> rests;
    get(elements, static_cast<const BFloat16*>(data) + quad.i, quad);
    get(rests, static_cast<const uint8_t*>(beside) + quad.i, quad);
    Raw raw;
    for (int c = 0; c < width; ++c) raw.fp32.values[c] = math::widen({elements.values[c], rests.values[c]});
    return raw;
  }

  template <class Quad>
  __device__ void extend(const Quad& quad, const float (&values)[width]) const {
    Pack<BFloat16> elements;
    Pack<uint8_t> rests;
    for (int c = 0; c < width; ++c) {
      const math::Extended x = math::extended(values[c]);
      elements.values[c] = x.element;
      rests.values[c] = x.rest;
    }
    put(static_cast<BFloat16*>(data) + quad.i, quad, elements);
    put(static_cast<uint8_t*>(beside) + quad.i, quad, rests);
  }
};

// The type as which a stream's elements are loaded.
template <bool compact>
__device__ Dtype loaded(const Format& format) {
  return compact && format.narrowing == Narrowing::extended ? Dtype::fp32 : format.dtype;
}

// A constant outside of device code, because may_be_compact is a host function.
template <class Operation, bool compact, std::size_t k>
constexpr bool is_compact = compact && may_be_compact<Operation>(k);

template <class Operation, bool compact, std::size_t k, class B>
__device__ auto stream_of(const B& batch, const BatchRow<ListOf<Operation>>& row) {
  return Stream<is_compact<Operation, compact, k>>{row.data[k], row.beside, batch.signature.formats[k], row.numel};
}

template <bool written, class Stream, class... Given>
__device__ void store_if(const Stream& to, const Given&... given) {
  if constexpr (written) to.store(given...);
}

// All threads of a block process the elements [first, last) of a row.
template <class Operation, bool compact, class B, std::size_t... K>
__device__ void run(const typename Operation::Element& element, const B& batch, const BatchRow<ListOf<Operation>>& row, int64_t first,
                    int64_t last, std::index_sequence<K...>) {
  // If there may be codecs, the lanes of a warp stay together to the end of the row. Otherwise the last elements are processed one by one.
  const int64_t ahead = compact ? width * (threadIdx.x % warp) : 0;
  const int64_t end = compact ? last : first + (last - first) / width * width;
  math::RandomStream random;
  if constexpr (compact) random = random_of(batch.operation, row);
  for (int64_t i = first + width * threadIdx.x; i - ahead < end; i += width * threads) {
    const Quad<!compact> quad{i, static_cast<int>(last - i)};
    Raw raw[] = {stream_of<Operation, compact, K>(batch, row).load(quad)...};
    float values[sizeof...(K)][width];
    (widen_to(values[K], raw[K], loaded<compact>(batch.signature.formats[K])), ...);
    const int64_t index = first_index(row) + i;
#pragma unroll
    for (int c = 0; c < width; ++c) apply(element, index + c, values[K][c]...);
    (store_if<Operation::writes(K)>(stream_of<Operation, compact, K>(batch, row), quad, values[K], random, index), ...);
    if (batch.signature.copies) store({row.beside, batch.signature.copy}, quad, values[0]);
  }
  if constexpr (!compact) {
    if (const int64_t i = end + threadIdx.x; i < last) {
      float values[] = {first_of(stream_of<Operation, compact, K>(batch, row).elements(i))...};
      apply(element, first_index(row) + i, values[K]...);
      (store_if<Operation::writes(K)>(stream_of<Operation, compact, K>(batch, row), i, values[K]), ...);
      if (batch.signature.copies) store(TypedPointer{row.beside, batch.signature.copy}.from(i), values[0]);
    }
  }
}

// Blocks per multiprocessor: fewer where a thread needs more registers.
template <class Operation, bool compact>
constexpr int blocks_at_once = compact                  ? resident / 2
                               : Operation::streams > 4 ? resident - 1
                                                        : resident;

template <class Operation, int capacity, bool compact>
__global__ void __launch_bounds__(threads, blocks_at_once<Operation, compact>)
    for_each_kernel(const __grid_constant__ Batch<Operation, ListOf<Operation>, capacity> batch) {
  if (batch.operation.skip()) return;
  __shared__ typename Operation::Element prepared;
  int known = -1;  // the row that `prepared` belongs to
  // A block processes adjacent chunks, because most of them belong to the same row.
  const int64_t end = batch.chunks * (blockIdx.x + 1) / gridDim.x;
  for (int64_t chunk = batch.chunks * blockIdx.x / gridDim.x; chunk < end; ++chunk) {
    const int index = batch.row_of(chunk);
    const auto& row = batch.rows[index];
    if (index != known) {
      __syncthreads();  // all threads have read the previous one
      if (threadIdx.x == 0) prepared = batch.operation.at(row);
      __syncthreads();
      known = index;
    }
    const auto element = prepared;
    const int64_t first = (chunk - row.first_chunk) * chunk_size;
    const int64_t last = first + chunk_size < row.numel ? first + chunk_size : row.numel;
    run<Operation, compact>(element, batch, row, first, last, std::make_index_sequence<Operation::streams>{});
  }
}

template <int capacity, bool compact, class Operation>
void enqueue_up_to(const ExecutionContext& context, const ListOf<Operation>& list, const Operation& operation) {
  in_batches<capacity>(list, operation, [&](const auto& batch, int64_t) {
    launch(context, for_each_kernel<Operation, capacity, compact>, batch.chunks, batch, "starting for_each");
  });
}

template <class Operation>
void enqueue(const ExecutionContext& context, const ListOf<Operation>& list, const Operation& operation) {
  constexpr int many = most<Operation, ListOf<Operation>>;
  if constexpr (takes_compact<Operation>) {
    if (list.signature().is_compact()) return enqueue_up_to<many, true>(context, list, operation);
  }
  if (list.size() <= few) return enqueue_up_to<few, false>(context, list, operation);
  enqueue_up_to<many, false>(context, list, operation);
}

}  // namespace

const Table<ForEach, Elementwise> for_each_table =
    make_table<ForEach, Elementwise>([]<class O>(std::type_identity<O>) { return enqueue<O>; });

}  // namespace dltrain::cuda
