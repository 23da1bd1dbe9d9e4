#pragma once

#include <memory>
#include <vector>

#include "comm/fault/channel.h"

namespace dltrain::comm {

// The ends of a group whose ranks are threads of this process.
std::vector<std::unique_ptr<Channel>> in_process_channels(int world_size);

}  // namespace dltrain::comm
