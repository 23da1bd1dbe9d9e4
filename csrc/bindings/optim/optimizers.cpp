// For each optimizer of kernels/optimizers.h: a group, which reads Python's state, and a torch op. Both run the same updates.

#include "kernels/optimizers.h"

#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/module.h"
#include "bindings/optim/group.h"
#include "bindings/optim/rule_updates.h"
#include "core/check.h"

namespace dltrain::bindings {

namespace {

template <class Visit>
void for_each_optimizer(Visit&& visit) {
  const auto all = [&]<class... Rules>(std::type_identity<std::tuple<Rules...>>) { (visit(std::type_identity<Rules>()), ...); };
  all(std::type_identity<Optimizers>());
}

template <class Rule, class Visit>
void for_each_hyper(Visit&& visit) {
  std::apply([&](const auto&... hyper) { (visit(hyper), ...); }, Rule::hyper());
}

// The rule with the hyper-parameters that are given by name; the others have their defaults.
template <class Rule>
Rule rule_of(const py::dict& given) {
  Rule rule;
  size_t known = 0;
  for_each_hyper<Rule>([&](const auto& hyper) {
    if (!given.contains(hyper.name)) return;
    ++known;
    rule.*hyper.member = given[hyper.name].template cast<std::remove_reference_t<decltype(rule.*hyper.member)>>();
  });
  TORCH_CHECK_TYPE(known == given.size(), Rule::name, ": expected only hyper-parameters of this optimizer, got ",
                   std::string(py::str(given.attr("keys")())));
  return rule;
}

// The bits of the states that are present: all that are not optional, and the wanted ones.
template <class Rule>
unsigned states_of(const std::vector<std::string>& wanted) {
  unsigned bits = 0;
  for (unsigned k = 0; k < Rule::states.size(); ++k) {
    const auto& state = Rule::states[k];
    if (!state.optional || std::find(wanted.begin(), wanted.end(), state.key) != wanted.end()) bits |= 1u << k;
  }
  return bits;
}

template <class Rule>
class RuleGroup : public GroupOf<RuleUpdates<Rule>> {
 public:
  using Base = GroupOf<RuleUpdates<Rule>>;
  RuleGroup() : Base(keys_of<Rule>()) {}

  py::list gather(const py::dict& state, const py::list& params, bool masters, const std::vector<std::string>& optional,
                  const py::list& flagged, int64_t flagged_from, const std::vector<std::optional<at::Tensor>>& runs,
                  const std::vector<uint32_t>& numbers) override {
    std::unordered_set<const c10::TensorImpl*> marked;
    for (const py::handle param : flagged) marked.insert(THPVariable_Unpack(param.ptr()).unsafeGetTensorImpl());
    const unsigned states = states_of<Rule>(optional);
    const auto take = [&](auto& updates, int64_t index, const Reading<keys_count<Rule>>& reading, Layouts layouts) {
      const bool flag = reading.param->dim() >= flagged_from || (!marked.empty() && marked.count(reading.param->unsafeGetTensorImpl()) > 0);
      if (runs.empty() && numbers.empty()) return updates.add(states, flag, reading, index, layouts);
      Reading<keys_count<Rule>> numbered = reading;
      if (!runs.empty() && runs[index]) numbered.runs = &*runs[index];
      if (!numbers.empty()) {
        numbered.stochastic = true;
        numbered.number = numbers[index];
      }
      return updates.add(states, flag, numbered, index, layouts);
    };
    constexpr unsigned counters = (1u << RuleUpdates<Rule>::counters) - 1;
    return Base::read_all(state, params, counters | states << RuleUpdates<Rule>::counters, masters, take);
  }

  void take_norms(const StepArguments& arguments, const py::dict& hyper, const at::Tensor& sums) override {
    Base::take_norms_of(rule_of<Rule>(hyper), arguments, sums);
  }
  void step(const StepArguments& arguments, const py::dict& hyper) override { Base::run(rule_of<Rule>(hyper), arguments); }
};

std::unique_ptr<FusedGroup> make_group(const std::string& name) {
  std::unique_ptr<FusedGroup> group;
  for_each_optimizer([&]<class Rule>(std::type_identity<Rule>) {
    if (name == Rule::name) group = std::make_unique<RuleGroup<Rule>>();
  });
  TORCH_CHECK_VALUE(group, "name: expected the name of an optimizer, got ", name);
  return group;
}

// Describes all optimizers to Python. The keys are the interned strings that a group looks up.
py::list optimizers() {
  py::list all;
  for_each_optimizer([&]<class Rule>(std::type_identity<Rule>) {
    py::dict hyper;
    for_each_hyper<Rule>([&](const auto& each) { hyper[each.name] = Rule().*each.member; });
    py::list states, counters;
    for (const math::State& state : Rule::states) {
      states.append(py::make_tuple(interned(state.key), state.optional, state.initial, state.nonnegative, state.coded));
    }
    for (const math::Counter& counter : math::counters_of<Rule>()) counters.append(py::make_tuple(interned(counter.key), counter.initial));
    const char* const flag = math::flag_of<Rule>().name;
    all.append(py::make_tuple(Rule::name, hyper, states, counters, flag ? py::object(py::str(flag)) : py::none(), math::norms_of<Rule>(),
                              math::is_compact<Rule>()));
  });
  return all;
}

// name_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] STATEs ..., Tensor(c!)[] COUNTERs ..., Tensor(d!)[] masters, *, float lr,
//       HYPER=default ..., bool FLAG=default, bool maximize=False, Tensor? tensor_lr=None, ...) -> ()
// If `seed` is given, bf16 parameters without a master are rounded stochastically; the number of each is its index.
template <class Rule>
std::string schema() {
  char alias = 'a';
  const auto written = [&](const std::string& list) { return c10::str("Tensor(", alias++, "!)[] ", list, ", "); };
  const auto text = [](auto value) -> std::string {
    if constexpr (std::is_same_v<decltype(value), bool>) return value ? "True" : "False";
    return dltrain::text(value);
  };
  std::string out = c10::str(Rule::name, "_(", written("params"), "Tensor[] grads, ");
  for (const std::string& list : lists_of<Rule>()) out += written(list);
  out += written("masters") + "*, float lr, ";
  for_each_hyper<Rule>([&](const auto& hyper) {
    const auto value = Rule().*hyper.member;
    out += c10::str(std::is_same_v<decltype(value), const bool> ? "bool " : "float ", hyper.name, "=", text(value), ", ");
  });
  if (constexpr math::Flag flag = math::flag_of<Rule>(); flag.name) out += c10::str("bool ", flag.name, "=", text(flag.by_default), ", ");
  out += "bool maximize=False, Tensor? tensor_lr=None, Tensor? grad_scale=None, Tensor? found_inf=None";
  if (math::is_compact<Rule>()) out += ", int? seed=None, Tensor? rounding_step=None";
  return out + ") -> ()";
}

// Reads the arguments from the stack, in the order of the schema.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack) : values_(torch::jit::pop(stack, op.schema().arguments().size())) {}
  std::vector<at::Tensor> tensors() { return values_[next_++].toTensorVector(); }
  void take(bool& value) { value = values_[next_++].toBool(); }
  void take(double& value) { value = values_[next_++].toDouble(); }
  std::optional<at::Tensor> tensor() { return values_[next_++].toOptional<at::Tensor>(); }
  std::optional<int64_t> integer() { return values_[next_++].toOptional<int64_t>(); }

 private:
  std::vector<c10::IValue> values_;
  size_t next_ = 0;
};

template <class Rule>
void op(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  Arguments arguments(handle, *stack);
  const std::vector<at::Tensor> params = arguments.tensors(), grads = arguments.tensors();
  check_lengths(params, {{"grads", grads}});
  const std::vector<std::string> names = lists_of<Rule>();
  std::vector<std::vector<at::Tensor>> lists;
  for (size_t i = 0; i < names.size(); ++i) lists.push_back(arguments.tensors());
  const std::vector<at::Tensor> masters = arguments.tensors();
  double lr = 0.0;
  arguments.take(lr);
  Rule rule;
  for_each_hyper<Rule>([&](const auto& hyper) { arguments.take(rule.*hyper.member); });
  bool flag = false, maximize = false;
  if (math::flag_of<Rule>().name) arguments.take(flag);
  arguments.take(maximize);
  const auto tensor_lr = arguments.tensor(), grad_scale = arguments.tensor(), found_inf = arguments.tensor();
  std::optional<int64_t> seed;
  std::optional<at::Tensor> rounding_step;
  if constexpr (math::is_compact<Rule>()) {
    seed = arguments.integer();
    rounding_step = arguments.tensor();
  }

  unsigned states = 0;
  for (size_t k = 0; k < names.size(); ++k) {
    const bool is_state = k < Rule::states.size();
    bool wanted = true;
    if (is_state && Rule::states[k].optional) {
      wanted = !lists[k].empty();
      if constexpr (requires { rule.needs(0); }) wanted = rule.needs(static_cast<unsigned>(k));
    }
    if (wanted) check_lengths(params, {{names[k].c_str(), lists[k]}});
    if (is_state && wanted) states |= 1u << k;
  }
  if (!masters.empty()) check_lengths(params, {{"masters", masters}});
  RuleUpdates<Rule> updates;
  for (size_t i = 0; i < params.size(); ++i) {
    Reading<keys_count<Rule>> reading{&params[i], &grads[i], {}, masters.empty() ? nullptr : &masters[i], true};
    reading.stochastic = seed.has_value();
    reading.number = static_cast<uint32_t>(i);
    for (size_t k = 0; k < names.size(); ++k) {
      const size_t value = (k + RuleUpdates<Rule>::counters) % names.size();  // in a Reading the counters come first
      reading.values[value] = lists[k].empty() ? nullptr : &lists[k][i];
    }
    updates.add(states, flag, reading, static_cast<int64_t>(i), Layouts::any);
  }
  StepArguments step(lr, maximize, tensor_lr, grad_scale, found_inf, seed.value_or(0), rounding_step);
  updates.run(rule, step);
}

template <class Rule>
std::string op_name() {
  return std::string(Rule::name) + "_";
}

TORCH_LIBRARY_FRAGMENT(dltrain_ext, library) {
  for_each_optimizer([&]<class Rule>(std::type_identity<Rule>) { library.def(torch::schema(schema<Rule>().c_str())); });
}

void implement(torch::Library& library) {
  for_each_optimizer([&]<class Rule>(std::type_identity<Rule>) {
    library.impl(op_name<Rule>().c_str(), torch::CppFunction::makeFromBoxedFunction<&op<Rule>>());
  });
}
TORCH_LIBRARY_IMPL(dltrain_ext, CPU, library) { implement(library); }
TORCH_LIBRARY_IMPL(dltrain_ext, CUDA, library) {
  if constexpr (built_with_cuda) implement(library);
}

}  // namespace

std::vector<std::string> optimizer_ops() {
  std::vector<std::string> names;
  for_each_optimizer([&]<class Rule>(std::type_identity<Rule>) { names.push_back(op_name<Rule>()); });
  return names;
}

void bind_optimizers(py::module_& module) {
  module.def("make_group", make_group, py::arg("name"));
  module.def("optimizers", optimizers);
}

}  // namespace dltrain::bindings
