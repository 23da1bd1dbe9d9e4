#pragma once

#include <memory>
#include <vector>

#include "comm/transport/mailbox.h"

namespace dltrain::comm {

// The mailboxes of a group whose ranks are threads of this process. A message is in the receiver's queue when send() returns.
std::vector<std::unique_ptr<Mailbox>> in_process_mailboxes(int world_size, int64_t limit = Mailbox::default_limit);

}  // namespace dltrain::comm
