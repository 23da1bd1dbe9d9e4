// This file is compiled once for each instruction set (csrc/build.json), with its flags and its name as DLT_INSTRUCTION_SET. It must not
// export a function that the linker could use elsewhere: the loops have internal linkage, and call only inlined functions and the C
// library.

#include "kernels/codecs.h"
#include "kernels/coding.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/fetch_ahead.h"
#include "kernels/cpu/instruction_set.h"
#include "kernels/cpu/tile.h"
#include "kernels/operations.h"
#include "math/sum_squares.h"

#ifndef DLT_INSTRUCTION_SET
#define DLT_INSTRUCTION_SET portable
#endif

namespace dltrain::cpu {

namespace {

// Streams that are not fp32 are widened this many elements at a time, in the first-level cache.
constexpr int64_t piece = row_unit;

// Elements [at, at + count) of a row's stream.
struct Stretch {
  void* data;
  void* beside;  // of the row
  Format format;
  int64_t numel;  // of the row
  int64_t at, count;

  DLT_HD TypedPointer elements() const { return TypedPointer{data, format.dtype}.from(at); }
  DLT_HD BFloat16* bfloat16() const { return static_cast<BFloat16*>(data) + at; }
  DLT_HD uint8_t* rest() const { return static_cast<uint8_t*>(beside) + at; }
};

// Calls visit(tile) for each tile of codec C in the stretch, whose first element is a multiple of the tile's size.
template <class C, class Visit>
DLT_HD void each_tile(const Stretch& stretch, const Visit& visit) {
  constexpr int size = MessageLayout<C>::tile;
  for (int64_t first = 0; first < stretch.count; first += size) {
    const int64_t index = (stretch.at + first) / size, rest = stretch.count - first;
    if (rest >= size) {
      Tile<size, true> tile(index, size, first);
      visit(tile);
    } else {
      Tile<size, false> tile(index, static_cast<int>(rest), first);
      visit(tile);
    }
  }
}

// These functions are not inlined, because they are the same for every operation.
[[gnu::noinline]] void decode_to(float* buffer, const Stretch& from) {
  if (!from.format.is_coded()) return widen_run(buffer, from.bfloat16(), from.rest(), from.count);
  with_codec(from.format, [&]<class C>(std::type_identity<C>) DLT_HD_LAMBDA {
    using Layout = MessageLayout<C>;
    static_assert(Layout::codes == 1);
    const auto* const message = static_cast<const uint8_t*>(from.data);
    for (int64_t first = 0; first < from.count; first += Layout::tile) {  // without a tile, which would be copied
      const int64_t index = (from.at + first) / Layout::tile, rest = from.count - first;
      const float scale = *Layout::scale_at(message, index);
      const auto* const words = Layout::words_at(message, from.numel, index);
      float* const values = buffer + first;
      const int64_t n = rest < Layout::tile ? rest : Layout::tile;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) values[i] = math::decoded<C>(words[i], scale);
    }
  });
}
// index: of the first element in its whole tensor.
[[gnu::noinline]] void encode_from(const float* values, const Stretch& to, const math::RandomStream& random, int64_t index) {
  if (to.format.narrowing == Narrowing::stochastic) return narrow_run<piece>(to.bfloat16(), values, to.count, random, index);
  if (to.format.narrowing == Narrowing::extended) return narrow_run(to.bfloat16(), to.rest(), values, to.count);
  with_codec(to.format, [&]<class C>(std::type_identity<C>) DLT_HD_LAMBDA {
    each_tile<C>(to, [&](auto& tile) DLT_HD_LAMBDA {
      tile.view(values);
      encode<C>(tile, static_cast<uint8_t*>(to.data), to.numel);
    });
  });
}

// The elements as fp32: the stream itself if it is fp32, otherwise the buffer.
DLT_HD float* widened(const Stretch& from, float* buffer) {
  if (from.format.is_coded() || from.format.narrowing == Narrowing::extended) {
    decode_to(buffer, from);
    return buffer;
  }
  const TypedPointer elements = from.elements();
  if (elements.dtype == Dtype::fp32) return static_cast<float*>(elements.data);
  with_type(elements, [&](const auto* values) DLT_HD_LAMBDA { widen_run(buffer, values, from.count); });
  return buffer;
}

template <class Operation, class Streams>
struct ElementRun;
template <class Operation, std::size_t... K>
struct ElementRun<Operation, std::index_sequence<K...>> {
  using Element = typename Operation::Element;

  static void run(const Element& given, const Signature<Operation::streams>& signature, const typename ListOf<Operation>::Row& row,
                  int64_t begin, int64_t end, const math::RandomStream& random) {
    // A copy, which no store into a stream can change.
    const Element element = given;
    if (signature.is_plain()) {
      float* const data[] = {static_cast<float*>(row.data[K])...};
      const int64_t index = first_index(row.numbers);
      constexpr int unit = 128;
      for (; begin + unit <= end; begin += unit) {
        (fetch_ahead<unit, first_level>(data[K] + begin), ...);
        over(element, index, data, begin, begin + unit);
      }
      return over(element, index, data, begin, end);
    }
    alignas(cache_line) float buffer[Operation::streams][piece];
    for (int64_t at = begin; at < end; at += piece) {
      const int64_t count = end - at < piece ? end - at : piece;
      const Stretch stretches[] = {{row.data[K], row.beside, signature.formats[K], row.numel, at, count}...};
      float* const data[] = {widened(stretches[K], buffer[K])...};
      const int64_t index = first_index(row.numbers) + at;
      over(element, index, data, 0, count);
      (narrow_if<Operation::writes(K)>(data[K], stretches[K], random, index), ...);
      if (signature.copies) narrow_to(data[0], count, TypedPointer{row.beside, signature.copy}.from(at));
    }
  }

 private:
  // first: the index of the element at 0.
  DLT_HD static void over(const Element& element, int64_t first, float* const* data, int64_t begin, int64_t end) {
    float* const streams[] = {data[K]...};
    // The streams never overlap, so the compiler may vectorize the loop.
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) apply(element, first + i, streams[K][i]...);
  }

  DLT_HD static void narrow_to(const float* values, int64_t count, const TypedPointer& to) {
    with_type(to, [&](auto* out) DLT_HD_LAMBDA { narrow_run(out, values, count); });
  }

  template <bool written>
  DLT_HD static void narrow_if(const float* values, const Stretch& to, const math::RandomStream& random, int64_t index) {
    if constexpr (written) {
      if (to.format.is_compact()) {
        encode_from(values, to, random, index);
      } else if (to.format.dtype != Dtype::fp32) {
        narrow_to(values, to.count, to.elements());
      }
    }
  }
};

// This function is marked cold, so that it is optimized for size: otherwise compiling it takes longer than the rest of the file.
template <class Operation>
[[gnu::cold, gnu::noinline]] void run_last(const Operation& operation, int64_t index, int count) {
  Tile<Operation::elements, false> tile(index, count);
  operation(tile);
}

template <class Operation>
void run_blocks(const Operation& given, int64_t numel, int64_t begin, int64_t end) {
  constexpr int size = Operation::elements;
  const Operation operation = given;
  for (int64_t index = begin; index < end; ++index) {
    if (const int64_t rest = numel - index * size; rest >= size) {
      Tile<size, true> tile(index, size);
      operation(tile);
    } else {
      run_last(operation, index, static_cast<int>(rest));
    }
  }
  finish_stores();
}

template <class Reduction, class Streams>
struct ReduceRun;
template <class Reduction, std::size_t... K>
struct ReduceRun<Reduction, std::index_sequence<K...>> {
  using Element = typename Reduction::Element;

  // The number of running sums is the same for every instruction set, so that all of them give the same bits.
  static constexpr int lanes = 32;
  using Running = double[lanes];

  static void run(const Element& given, const Signature<Reduction::streams>& signature, const typename ListOf<Reduction>::Row& row,
                  int64_t begin, int64_t end, double* sums) {
    const Element element = given;
    Running running[Reduction::sums];
    for (auto& each : running) {
      for (double& value : each) value = math::SumSquares::none();
    }
    alignas(cache_line) float buffer[Reduction::streams][piece];
    const int64_t step = Reduction::sums == 1 && signature.is_plain() ? end - begin : piece;  // a multiple of `lanes`, or all elements
    for (int64_t at = begin; at < end; at += step) {
      const int64_t count = end - at < step ? end - at : step;
      const float* const data[] = {widened({row.data[K], row.beside, signature.formats[K], row.numel, at, count}, buffer[K])...};
      add_all(element, data, count, running, std::make_integer_sequence<int, Reduction::sums>{});
    }
    for (int s = 0; s < Reduction::sums; ++s) sums[s] = merged(running[s]);
  }

 private:
  template <int... S>
  DLT_HD static void add_all(const Element& element, const float* const* data, int64_t count, Running* running,
                             std::integer_sequence<int, S...>) {
    (add(element, SumNumber<S>{}, data, count, running[S]), ...);
  }

  template <class Sum>
  DLT_HD static void add(const Element& element, Sum sum, const float* const* data, int64_t count, Running& running) {
    const float* const streams[] = {data[K]...};
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      for (int lane = 0; lane < lanes; ++lane) {
        running[lane] = math::SumSquares::add(running[lane], element(sum, streams[K][i + lane]...));
      }
    }
    for (int lane = 0; i < count; ++i, ++lane) running[lane] = math::SumSquares::add(running[lane], element(sum, streams[K][i]...));
  }

  DLT_HD static double merged(Running& running) {
    for (int half = lanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) running[lane] = math::SumSquares::merge(running[lane], running[lane + half]);
    }
    return running[0];
  }
};

}  // namespace

namespace DLT_INSTRUCTION_SET {
extern const Loops loops;
constinit const Loops loops = {
    make_table<ElementLoop, Elementwise>(
        []<class O>(std::type_identity<O>) { return ElementRun<O, std::make_index_sequence<O::streams>>::run; }),
    make_table<BlockLoop, Blockwise>([]<class O>(std::type_identity<O>) { return run_blocks<O>; }),
    make_table<ReduceLoop, Reductions>(
        []<class R>(std::type_identity<R>) { return ReduceRun<R, std::make_index_sequence<R::streams>>::run; }),
};
}  // namespace DLT_INSTRUCTION_SET

}  // namespace dltrain::cpu
