#pragma once

namespace dltrain::comm {

// The phases of a call.
enum class Phase { encode, send, wait, decode };
inline constexpr int phases = 4;

// Is called when a thread begins and ends a phase. Phases do not nest.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void begin(Phase phase) = 0;
  virtual void end(Phase phase) = 0;
};

class PhaseScope {
 public:
  PhaseScope(Observer* observer, Phase phase) : observer_(observer), phase_(phase) {
    if (observer_) observer_->begin(phase_);
  }
  ~PhaseScope() {
    if (observer_) observer_->end(phase_);
  }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  Observer* const observer_;
  const Phase phase_;
};

}  // namespace dltrain::comm
