#include "ps/run/updater.h"

#include <array>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "kernels/optimizers.h"
#include "kernels/take_step.h"

namespace dltrain::ps {

namespace {

template <class Rule, unsigned states>
class UpdaterOf final : public Updater {
 public:
  UpdaterOf(const Rule& rule, bool maximize, std::vector<Slot> slots) : rule_(rule), maximize_(maximize), slots_(std::move(slots)) {
    for (const Slot& slot : slots_) {
      check(slot.states.size() == Operation::streams - 2 && slot.counters.size() == counters, "slots: expected ", Operation::streams - 2,
            " states and ", counters, " counters of ", Rule::name, ", got ", slot.states.size(), " and ", slot.counters.size());
    }
  }

  std::vector<Slot>& slots() override { return slots_; }

  void step(const ExecutionContext& context, std::span<const Item> items, double lr, double divisor) override {
    const Step step{lr, maximize_, {.grad_scale = &divisor}};
    for (const bool flag : {false, true}) {
      ListOf<Operation> list;
      CountersOf<Rule> counts;
      for (const Item& item : items) {
        const Slot& slot = slots_[static_cast<size_t>(item.slot)];
        if ((slot.is_first ? slot.flag_at_first : slot.flag) == flag) add(slot, item.grad, list, counts);
      }
      if (list.size() > 0) take_step<Rule, states>(context, rule_, step, flag, list, counts);
    }
    for (const Item& item : items) slots_[static_cast<size_t>(item.slot)].is_first = false;
  }

 private:
  using Operation = Update<Rule, states>;
  static constexpr size_t counters = math::counters_of<Rule>().size();

  static void add(const Slot& slot, const float* grad, ListOf<Operation>& list, CountersOf<Rule>& counts) {
    std::array<void*, Operation::streams> data{};
    data[0] = slot.value;
    data[1] = const_cast<float*>(grad);  // kernels only read it
    for (size_t i = 2; i < data.size(); ++i) data[i] = slot.states[i - 2];
    typename Operation::Numbers numbers;
    if constexpr (counters > 0) {
      std::array<void*, counters> counting{};
      for (size_t i = 0; i < counters; ++i) counting[i] = const_cast<float*>(numbers.counters().values[i] = slot.counters[i]);
      counts.extend(counting, 1);
    }
    list.add(data, slot.numel, numbers);
  }

  const Rule rule_;
  const bool maximize_;
  std::vector<Slot> slots_;
};

template <class Rule>
Rule with_hyper(const std::map<std::string, double>& hyper) {
  Rule rule;
  size_t known = 0;
  const auto set = [&](const auto& each) {
    const auto given = hyper.find(each.name);
    if (given == hyper.end()) return;
    ++known;
    rule.*each.member = static_cast<std::remove_reference_t<decltype(rule.*each.member)>>(given->second);
  };
  std::apply([&](const auto&... each) { (set(each), ...); }, Rule::hyper());
  check(known == hyper.size(), "hyper: expected only hyper-parameters of ", Rule::name, ", got others");
  return rule;
}

template <class Rule>
std::unique_ptr<Updater> make(const ps::Rule& given, std::vector<Updater::Slot> slots) {
  unsigned bits = 0;
  size_t known = 0;
  for (unsigned k = 0; k < Rule::states.size(); ++k) {
    if (known < given.states.size() && given.states[known] == Rule::states[k].key) {
      bits |= 1u << k;
      ++known;
    }
  }
  std::unique_ptr<Updater> updater;
  const Rule rule = with_hyper<Rule>(given.hyper);
  constexpr auto choices = math::choices_of<Rule>();
  const auto try_choice = [&]<size_t i>(std::integral_constant<size_t, i>) {
    if (bits == choices[i]) updater = std::make_unique<UpdaterOf<Rule, choices[i]>>(rule, given.maximize, std::move(slots));
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (try_choice(std::integral_constant<size_t, i>()), ...);
  }(std::make_index_sequence<choices.size()>());
  check(updater && known == given.states.size(), "states: expected a choice of the states of ", Rule::name, " in their order");
  return updater;
}

}  // namespace

std::unique_ptr<Updater> make_updater(const Rule& rule, std::vector<Updater::Slot> slots) {
  std::unique_ptr<Updater> updater;
  std::vector<std::string> names;
  const auto try_rule = [&]<class R>(std::type_identity<R>) {
    names.emplace_back(R::name);
    if (rule.name == R::name) updater = make<R>(rule, std::move(slots));
  };
  [&]<class... Rules>(std::type_identity<std::tuple<Rules...>>) {
    (try_rule(std::type_identity<Rules>()), ...);
  }(std::type_identity<Optimizers>());
  if (!updater) unknown_name("optimizer", names, rule.name);
  return updater;
}

}  // namespace dltrain::ps
