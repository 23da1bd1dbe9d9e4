#pragma once

namespace dltrain {

inline constexpr int cache_line = 64;  // bytes, on every processor that is built for

}  // namespace dltrain
