#pragma once

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/optim/updates.h"
#include "kernels/optimizers.h"

namespace dltrain::bindings {

// The keys of an entry of the optimizer's state, counters first, without that of the master.
template <class Rule>
std::array<const char*, keys_count<Rule>> keys_of() {
  std::array<const char*, keys_count<Rule>> keys;
  auto next = keys.begin();
  for (const math::Counter& counter : math::counters_of<Rule>()) *next++ = counter.key;
  for (const math::State& state : Rule::states) *next++ = state.key;
  return keys;
}

// The updates of one step of an optimizer, for all choices of its optional states.
template <class Rule>
class RuleUpdates {
 public:
  static constexpr size_t keys = keys_count<Rule>;
  static constexpr int counters = static_cast<int>(math::counters_of<Rule>().size());

  void clear() {
    each([](auto& updates) { updates.clear(); });
  }
  void collect(Gradients& into) const {
    std::apply([&](const auto&... updates) { (updates.collect(into), ...); }, choices_);
  }
  void append(const RuleUpdates& others) { append(others, std::make_index_sequence<choices.size()>()); }

  // states: the bits of the states to read. Otherwise as Updates::add.
  bool add(unsigned states, bool flag, const Reading<keys>& reading, int64_t index, Layouts layouts) {
    bool added = false;
    each([&](auto& updates) {
      if (updates.states == states) added = updates.add(reading, flag, index, layouts);
    });
    return added;
  }

  void take_norms(const Rule& rule, StepArguments& arguments, const at::Tensor& sums) {
    each([&](auto& updates) { updates.take_norms(rule, arguments, sums); });
  }
  void run(const Rule& rule, StepArguments& arguments) {
    each([&](auto& updates) { updates.run(rule, arguments); });
  }

 private:
  static constexpr auto choices = math::choices_of<Rule>();

  template <class Visit>
  void each(Visit&& visit) {
    std::apply([&](auto&... updates) { (visit(updates), ...); }, choices_);
  }
  template <std::size_t... I>
  void append(const RuleUpdates& others, std::index_sequence<I...>) {
    (std::get<I>(choices_).append(std::get<I>(others.choices_)), ...);
  }

  template <std::size_t... I>
  static std::tuple<Updates<Rule, choices[I]>...> of(std::index_sequence<I...>);
  decltype(of(std::make_index_sequence<choices.size()>())) choices_;
};

}  // namespace dltrain::bindings
