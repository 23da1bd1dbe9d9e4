#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/execution_context.h"

namespace dltrain::ps {

// Updates blocks of a parameter group by an optimizer of kernels/optimizers.h.
class Updater {
 public:
  // A block's memory: of the parameter, of those of the rule's states that are present, in their order, and of its counters.
  struct Slot {
    float* value = nullptr;
    int64_t numel = 0;
    std::vector<float*> states, counters;
    bool flag_at_first = false, flag = false;  // the rule's flag in the block's first step, and in all later ones
    bool is_first = true;                      // whether the next step is its first
  };
  struct Item {
    int slot;
    const float* grad;
  };

  virtual ~Updater() = default;
  virtual std::vector<Slot>& slots() = 0;
  // Gradients are divided by the divisor.
  virtual void step(const ExecutionContext& context, std::span<const Item> items, double lr, double divisor) = 0;
};

struct Rule {
  std::string name;
  std::map<std::string, double> hyper;  // the others have their defaults
  std::vector<std::string> states;      // the keys of those that are present, in the rule's order
  bool maximize = false;
};

// Throws std::invalid_argument if there is no such optimizer, hyper-parameter or choice of states.
std::unique_ptr<Updater> make_updater(const Rule& rule, std::vector<Updater::Slot> slots);

}  // namespace dltrain::ps
