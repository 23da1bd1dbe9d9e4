// Compiled once for each instruction set (csrc/build.json), with its flags and its name as DLT_INSTRUCTION_SET. Nothing in here may leave
// a function that another file could be linked with: the loops have no linkage, what they call is inlined or the C library's.

#include "kernels/cpu/instruction_set.h"
#include "kernels/cpu/tile.h"

#ifndef DLT_INSTRUCTION_SET
#define DLT_INSTRUCTION_SET portable
#endif

namespace dltrain::cpu {

namespace {

template <class Operation, class Streams>
struct ElementRun;
template <class Operation, std::size_t... K>
struct ElementRun<Operation, std::index_sequence<K...>> {
  static void run(const typename Operation::Element& given, float* const* streams, int64_t begin, int64_t end) {
    // Copies, which no store into a stream can change.
    const auto element = given;
    float* const data[] = {streams[K]...};
    // Rows never overlap, which lets the compiler work on many elements at once.
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) element(data[K][i]...);
  }
};

template <class Operation>
void run_blocks(const Operation& given, int64_t numel, int64_t begin, int64_t end) {
  constexpr int size = Operation::elements;
  const Operation operation = given;
  for (int64_t index = begin; index < end; ++index) {
    if (const int64_t rest = numel - index * size; rest >= size) {
      Tile<size, true> tile(index, size);
      operation(tile);
    } else {
      Tile<size, false> tile(index, static_cast<int>(rest));
      operation(tile);
    }
  }
  finish_stores();
}

// As many running values for every instruction set, so that all of them give the same bits.
template <class Reduction>
typename Reduction::Value reduce(const float* values, int64_t numel) {
  constexpr int lanes = 32;
  typename Reduction::Value running[lanes];
  for (auto& value : running) value = Reduction::none();
  int64_t i = 0;
  for (; i + lanes <= numel; i += lanes) {
    for (int lane = 0; lane < lanes; ++lane) running[lane] = Reduction::add(running[lane], values[i + lane]);
  }
  for (int lane = 0; i < numel; ++i, ++lane) running[lane] = Reduction::add(running[lane], values[i]);
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) running[lane] = Reduction::merge(running[lane], running[lane + half]);
  }
  return running[0];
}

}  // namespace

namespace DLT_INSTRUCTION_SET {
extern const Loops loops;
constinit const Loops loops = {
    make_table<ElementLoop, Elementwise>(
        []<class O>(std::type_identity<O>) { return ElementRun<O, std::make_index_sequence<O::streams>>::run; }),
    make_table<BlockLoop, Blockwise>([]<class O>(std::type_identity<O>) { return run_blocks<O>; }),
    make_table<ReduceLoop, Reductions>([]<class O>(std::type_identity<O>) { return reduce<O>; }),
};
}  // namespace DLT_INSTRUCTION_SET

}  // namespace dltrain::cpu
