#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "core/tensor_list.h"
#include "tests/contexts.h"

// Tensor lists for the tests of for_each and reduce.

namespace dltrain {

inline void two_threads(int64_t n, int64_t, const Range& body) {
  std::thread other([&] { body(0, n / 3); });
  body(n / 3, n);
  other.join();
}

inline float read(const TypedPointer& from, int64_t i) {
  float value = 0.0f;
  with_type(from, [&](const auto* values) { value = widen(values[i]); });
  return value;
}

inline void write(const TypedPointer& to, int64_t i, float value) {
  with_type(to, [&]<class T>(T* values) { values[i] = narrow<T>(value); });
}

// A list of tensors with K streams each, whose values do not depend on the context and the alignment, and copies if the signature has them.
template <int K, class Numbers = None>
struct Rows {
  Rows(const ExecutionContext& context, const std::vector<int64_t>& sizes, bool aligned = true, const Signature<K>& form = {})
      : counts(context, std::vector<float>(sizes.size(), 3.0f)), list(form) {
    for (size_t row = 0; row < sizes.size(); ++row) {
      std::array<void*, K> data;
      for (int k = 0; k < K; ++k) data[k] = add(context, form.formats[k].dtype, sizes[row], k, row, aligned);
      Numbers numbers;
      if constexpr (requires { numbers.counters().values[0]; }) {
        for (auto& counter : numbers.counters().values) counter = counts.data() + row;
      }
      list.add(data, sizes[row], numbers, form.copies ? add(context, form.copy, sizes[row], K, row, aligned) : nullptr);
    }
  }
  // Returns the values of each stream of each row, and of its copy.
  std::vector<std::vector<float>> values() const {
    std::vector<std::vector<float>> out;
    for (size_t i = 0; i < arrays.size(); ++i) {
      auto bytes = arrays[i].values();
      auto& numbers = out.emplace_back();
      for (int64_t k = 0; k < sizes[i]; ++k) numbers.push_back(read({bytes.data(), dtypes[i]}, k));
    }
    return out;
  }

  Array<float> counts;
  std::deque<Array<uint8_t>> arrays;
  std::vector<Dtype> dtypes;
  std::vector<int64_t> sizes;
  TensorList<K, Numbers> list;

 private:
  void* add(const ExecutionContext& context, Dtype dtype, int64_t size, int64_t k, size_t row, bool aligned) {
    const TypedPointer word{nullptr, dtype};
    std::vector<uint8_t> bytes(word.bytes(size));
    const float divisor = k < 3 ? 100 : 1000;  // a mean of gradients has a square below the mean of their squares
    for (int64_t i = 0; i < size; ++i) {
      write({bytes.data(), dtype}, i, static_cast<float>((i * 7 + k * 5 + static_cast<int64_t>(row)) % 97 + 1) / divisor);
    }
    dtypes.push_back(dtype);
    sizes.push_back(size);
    return arrays.emplace_back(context, bytes, aligned ? 0 : word.bytes((static_cast<int64_t>(row) + k) % 4)).data();
  }
};

template <class Operation>
using RowsOf = Rows<Operation::streams, typename Operation::Numbers>;

inline constexpr Dtype fp32 = Dtype::fp32, fp16 = Dtype::fp16, bf16 = Dtype::bf16;

}  // namespace dltrain
