#include "comm/failure.h"

#include "core/tensor_list.h"
#include "kernels/for_each.h"
#include "kernels/spoil.h"

namespace dltrain::comm {

void Failure::prepare_for_device() {
  flag_ = Memory::pinned(sizeof(int));
  *static_cast<int*>(flag_.data()) = 0;
}

void Failure::set(const std::string& reason) { set(reason, true); }

void Failure::set_for_now(const std::string& reason) { set(reason, false); }

void Failure::set(const std::string& reason, bool whole) {
  std::lock_guard lock(mutex_);
  if (!reason_.empty() && (whole_ || !whole)) return;
  reason_ = reason;
  whole_ = whole;
  if (auto* const flag = static_cast<int*>(flag_.data())) __atomic_store_n(flag, 1, __ATOMIC_SEQ_CST);
}

std::string Failure::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

bool Failure::is_set() const {
  std::lock_guard lock(mutex_);
  return whole_;
}

void Failure::spoil(const Place& place, const Elements& values, int64_t numel) {
  const Memory flag(place, sizeof(int));  // on the device, where thousands of threads read it
  copy(place, flag.data(), flag_.data(), sizeof(int));
  read_ = Event::record(place);
  TensorList<Spoil::streams> list(Form<Spoil::streams>{{values.dtype}});
  list.add({values.data}, numel);
  for_each(place, list, Spoil{static_cast<const int*>(flag.data())});
}

}  // namespace dltrain::comm
