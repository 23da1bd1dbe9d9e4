#pragma once

namespace dltrain {

inline constexpr int cache_line = 64;  // bytes, on all supported processors

}  // namespace dltrain
