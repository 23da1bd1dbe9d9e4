#pragma once

#include <memory>
#include <vector>

#include "comm/fault/control_channel.h"

namespace dltrain::comm {

// The control channels of a group whose ranks are threads of this process.
std::vector<std::unique_ptr<ControlChannel>> in_process_control_channels(int world_size);

}  // namespace dltrain::comm
