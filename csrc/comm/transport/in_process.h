#pragma once

#include <memory>
#include <vector>

#include "comm/transport/transport.h"

namespace dltrain::comm {

// The transports of a group whose ranks are threads of this process: many virtual ranks without a network, on the CPU or on one CUDA device
// with a stream per rank.
std::vector<std::unique_ptr<Transport>> in_process_group(int world_size);

}  // namespace dltrain::comm
