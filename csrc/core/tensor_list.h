#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <vector>

#include "core/dtype.h"

namespace dltrain {

// How fp32 values become elements: rounded to nearest or, for bf16 only, stochastically, or with eight more bits of each element, which are
// in the row's `beside` (math/narrowing.h).
enum class Narrowing : uint8_t { nearest, stochastic, extended };

// How a stream's elements are stored: one after another, or each row as a message of a codec, given by its index in StreamCodecs.
struct Format {
  Dtype dtype = Dtype::fp32;  // with a codec, the type of the decoded elements
  int8_t codec = none;
  Narrowing narrowing = Narrowing::nearest;
  static constexpr int8_t none = -1;

  constexpr Format() = default;
  constexpr Format(Dtype elements, Narrowing how = Narrowing::nearest) : dtype(elements), narrowing(how) {}

  bool operator==(const Format&) const = default;
  DLT_HD bool is_coded() const { return codec != none; }
  DLT_HD bool is_compact() const { return is_coded() || narrowing != Narrowing::nearest; }
  bool is_plain() const { return dtype == Dtype::fp32 && !is_coded(); }
};

// The formats of a list's streams, and the type of a copy of the first stream, if one is written.
template <int K>
struct Signature {
  Format formats[K] = {};
  bool copies = false;
  Dtype copy = Dtype::fp32;

  bool operator==(const Signature&) const = default;

  // Whether arithmetic can use the streams in place.
  bool is_plain() const {
    return !copies && std::all_of(std::begin(formats), std::end(formats), [](const Format& format) { return format.is_plain(); });
  }
  bool is_compact() const {
    return std::any_of(std::begin(formats), std::end(formats), [](const Format& format) { return format.is_compact(); });
  }
};

inline constexpr int64_t row_unit = 512;  // in elements; a power of two, and a multiple of the block of every codec

// The numbers of a row that has none.
struct None {};

// K parallel lists of tensors. Row i is one element-wise operation: K pointers to numel elements each, e.g. the parameter, the gradient and
// the moments of one AdamW update, and numbers of the row, if it has any, e.g. its step count. The rows follow each other in one index
// space [0, numel()), which a kernel divides into equal parts, whatever the sizes of the tensors are.
template <int K, class Numbers = None>
class TensorList {
 public:
  static constexpr int streams = K;
  using RowNumbers = Numbers;

  struct Row {
    std::array<void*, K> data;
    void* beside;  // the copy of the first stream, in the signature's type: the half parameter beside its fp32 master; or more bits of each
                   // element of the stream that is extended
    int64_t numel;
    Numbers numbers;
  };

  explicit TensorList(const Signature<K>& signature = {}) : signature_(signature) {}

  void clear() {
    rows_.clear();
    ends_.clear();
  }

  void add(const std::array<void*, K>& data, int64_t numel, const Numbers& numbers = {}, void* beside = nullptr) {
    rows_.push_back({data, beside, numel, numbers});
    ends_.push_back(this->numel() + numel);
  }

  // For rows with nothing but their elements. Adds a row, or extends the last row if the memory directly follows it.
  void extend(const std::array<void*, K>& data, int64_t numel) {
    if (!rows_.empty()) {
      Row& last = rows_.back();
      bool follows = true;
      for (int k = 0; k < K; ++k) {
        const Format& format = signature_.formats[k];
        follows &= !format.is_compact() && data[k] == TypedPointer{last.data[k], format.dtype}.from(last.numel).data;
      }
      if (follows) {
        last.numel += numel;
        ends_.back() += numel;
        return;
      }
    }
    add(data, numel);
  }

  void append(const TensorList& others) {
    const int64_t before = numel();
    rows_.insert(rows_.end(), others.rows_.begin(), others.rows_.end());
    for (const int64_t end : others.ends_) ends_.push_back(before + end);
  }

  const Signature<K>& signature() const { return signature_; }
  int64_t size() const { return static_cast<int64_t>(rows_.size()); }
  Row& row(int64_t index) { return rows_[index]; }
  const Row& row(int64_t index) const { return rows_[index]; }
  int64_t numel() const { return ends_.empty() ? 0 : ends_.back(); }

  auto begin() const { return rows_.begin(); }
  auto end() const { return rows_.end(); }

  // A list of the k-th stream of each row.
  TensorList<1> stream(int k) const {
    TensorList<1> list(Signature<1>{{signature_.formats[k]}});
    for (const Row& row : rows_) list.add({row.data[k]}, row.numel);
    return list;
  }

  // Calls visit(row index, row, first, last) for each part [first, last) of a row in [begin, end) of the index space. Rows are only divided
  // at multiples of row_unit of their elements: a border that is elsewhere is moved forward to the next multiple.
  template <class Visit>
  void visit(int64_t begin, int64_t end, Visit&& visit) const {
    auto row = std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin();
    for (int64_t at = begin; at < end; ++row) {
      const int64_t start = ends_[row] - rows_[row].numel;
      const auto border = [&](int64_t index) { return std::min(rows_[row].numel, (index - start + row_unit - 1) & -row_unit); };
      const int64_t next = std::min(end, ends_[row]), first = border(at), last = border(next);
      if (last > first) visit(row, rows_[row], first, last);
      at = next;
    }
  }

 private:
  Signature<K> signature_;
  std::vector<Row> rows_;
  std::vector<int64_t> ends_;
};

// The list that an operation of for_each or reduce takes.
template <class Operation>
using ListOf = TensorList<Operation::streams, typename Operation::Numbers>;

}  // namespace dltrain
