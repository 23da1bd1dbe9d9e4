// What a server does where a quorum has a grace.

#include "ps/run/server.h"

namespace dltrain::ps {

void Server::end_grace(int block, int64_t version, Sender& sender) {
  elapse(block, version);
  perform(sender);
}

bool Server::end_graces(Deadline now, Sender& sender) {
  bool found = false;
  for (const Graces::Grace* next = next_grace(); next && next->end <= now; next = next_grace()) {
    elapse(next->block, next->version);
    found = true;
  }
  perform(sender);
  return found;
}

Deadline Server::next_grace_end() {
  const Graces::Grace* const next = next_grace();
  return next ? next->end : Deadline::max();
}

const Graces::Grace* Server::next_grace() {
  return graces_.next([&](const Graces::Grace& grace) { return core_.version(grace.block) >= grace.version; });
}

void Server::elapse(int block, int64_t version) {
  const size_t before = actions_.size();
  core_.elapse(block, version, actions_);
  if (options_.records && actions_.size() > before) record_.push_back({Handled::What::grace, -1, version, block});
}

// The sum of the weights with which the contributions are multiplied. Without a grace the workers have divided.
double Server::divisor_of(const Action& action) const {
  if (!has_grace()) return 1.0;
  double sum = 0.0;
  for (const Contribution& contribution : action.contributions) sum += static_cast<double>(held_.at(contribution.id).weight);
  return sum;
}

}  // namespace dltrain::ps
