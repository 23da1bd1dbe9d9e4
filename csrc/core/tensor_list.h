#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace dltrain {

// K parallel lists of tensors. Row i is one element-wise operation: K pointers to numel elements each, e.g. the parameter, the gradient and
// the moments of one AdamW update, and where the row has any, numbers of its own, e.g. its step count. The rows lie end to end in one index
// space [0, numel()), which a kernel cuts into equal parts whatever the sizes of the tensors.
template <int K>
class TensorList {
 public:
  struct Row {
    std::array<float*, K> data;
    int64_t numel;
    const float* scalars;  // where the tensors lie
  };

  void clear() {
    rows_.clear();
    ends_.clear();
  }

  void add(const std::array<float*, K>& data, int64_t numel, const float* scalars = nullptr) {
    rows_.push_back({data, numel, scalars});
    ends_.push_back(this->numel() + numel);
  }

  int64_t size() const { return static_cast<int64_t>(rows_.size()); }
  const Row& row(int64_t index) const { return rows_[index]; }
  int64_t numel() const { return ends_.empty() ? 0 : ends_.back(); }

  auto begin() const { return rows_.begin(); }
  auto end() const { return rows_.end(); }

  // Calls visit(row index, row, first, last) for each stretch [first, last) of a row that lies in [begin, end) of the index space.
  template <class Visit>
  void visit(int64_t begin, int64_t end, Visit&& visit) const {
    auto row = std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin();
    for (int64_t at = begin; at < end; ++row) {
      const int64_t start = ends_[row] - rows_[row].numel;
      const int64_t last = std::min(end, ends_[row]);
      if (last > at) visit(row, rows_[row], at - start, last - start);
      at = last;
    }
  }

 private:
  std::vector<Row> rows_;
  std::vector<int64_t> ends_;
};

}  // namespace dltrain
