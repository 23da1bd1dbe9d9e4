#pragma once

#include <memory>
#include <vector>

#include "comm/transport/transport.h"

namespace dltrain::comm {

// The ends of a group whose ranks are threads of this process: many virtual ranks without a network, on the CPU or, each with a stream of
// its own, on one CUDA device.
std::vector<std::unique_ptr<Transport>> in_process_group(int world_size);

}  // namespace dltrain::comm
