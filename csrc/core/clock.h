#pragma once

#include <chrono>

namespace dltrain {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

}  // namespace dltrain
