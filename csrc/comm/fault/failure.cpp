#include "comm/fault/failure.h"

#include <algorithm>
#include <vector>

#include "core/tensor_list.h"
#include "kernels/elementwise.h"
#include "kernels/for_each.h"

namespace dltrain::comm {

void Failure::set(const std::string& reason) { set(reason, true); }

void Failure::set_for_now(const std::string& reason) { set(reason, false); }

void Failure::set(const std::string& reason, bool complete) {
  std::lock_guard lock(mutex_);
  if (!reason_.empty() && (complete_ || !complete)) return;
  reason_ = reason;
  complete_ = complete;
  if (flag_) __atomic_store_n(static_cast<int*>(flag_->data()), 1, __ATOMIC_SEQ_CST);
}

std::string Failure::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

bool Failure::is_set() const {
  std::lock_guard lock(mutex_);
  return complete_;
}

int* Failure::flag_on(int device) {
  std::lock_guard lock(mutex_);
  if (!flag_) {
    flag_ = std::make_shared<Memory>(Memory::pinned(device, sizeof(int)));
    *static_cast<int*>(flag_->data()) = reason_.empty() ? 0 : 1;
  }
  return static_cast<int*>(flag_->data());
}

void Failure::poison(const ExecutionContext& context, const TypedPointer& values, int64_t numel) {
  const Memory flag(context, sizeof(int));  // on the device, where thousands of threads read it
  copy(context, flag.data(), flag_on(context.device), sizeof(int));
  read_ = Event::record(context);
  TensorList<Poison::streams> list(Signature<Poison::streams>{{values.dtype}});
  list.add({values.data}, numel);
  for_each(context, list, Poison{static_cast<const int*>(flag.data())});
}

// There is no notification when a graph is destroyed, so the flag that it reads is never freed.
void Failure::captured() {
  static std::mutex guards;
  static auto& read_by_graphs = *new std::vector<std::shared_ptr<Memory>>;
  const std::lock_guard lock(guards);
  if (std::find(read_by_graphs.begin(), read_by_graphs.end(), flag_) == read_by_graphs.end()) read_by_graphs.push_back(flag_);
  read_ = {};
}

}  // namespace dltrain::comm
