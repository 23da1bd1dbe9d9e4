#pragma once

// Stores whose ranks are nodes of this process.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/transport/in_process_mailbox.h"
#include "kernels/codec.h"
#include "ps/run/node.h"

namespace dltrain::ps {

using Floats = std::vector<float>;
using Blocks = std::vector<Floats>;

// A deadline that is only met where a call hangs.
inline Deadline late() { return Clock::now() + std::chrono::seconds(100); }

struct Configuration {
  std::vector<int> workers, servers;  // ranks
  Blocks values;                      // of the blocks, which the servers own in turn
  Rule rule = {.name = "sgd", .hyper = {}, .states = {}, .maximize = true};
  int counters = 0;  // of the rule
  Server::Options options = {};
  std::string push_codec = "raw", pull_codec = "raw";
  std::vector<int> bare = {};  // ranks that have a mailbox and no node
  bool has_threads = true;
  int64_t limit = comm::Mailbox::default_limit;
  std::map<int, std::vector<Handled>> replayed = {};  // by rank
  std::function<std::unique_ptr<Updater>(std::vector<Updater::Slot>)> make_updater = {};

  int ranks() const {
    return 1 + std::max(*std::max_element(workers.begin(), workers.end()), *std::max_element(servers.begin(), servers.end()));
  }
  int server_of(int block) const { return block % static_cast<int>(servers.size()); }
};

class Store {
 public:
  explicit Store(Configuration given) : setup(std::move(given)), held_(setup.ranks()) {
    mailboxes = comm::in_process_mailboxes(setup.ranks(), setup.limit);
    for (int rank = 0; rank < setup.ranks(); ++rank) {
      if (is_in(setup.bare, rank)) {
        nodes.emplace_back();
        continue;
      }
      const auto found = setup.replayed.find(rank);
      nodes.push_back(std::make_unique<Node>(std::move(mailboxes[rank]), Node::Ranks{setup.workers, setup.servers}, make_server(rank),
                                             make_client(rank), found == setup.replayed.end() ? std::vector<Handled>() : found->second));
    }
    for (const auto& node : nodes) {
      if (node && setup.has_threads) node->start();
    }
  }

  Node& node(int rank) const { return *nodes[rank]; }

  std::shared_ptr<Ticket> push(int rank, int64_t clock, const Blocks& gradients, float factor = 1.0f, double lr = 1.0, bool skips = false,
                               float weight = 1.0f) {
    std::vector<Client::Item> items;
    for (size_t i = 0; i < gradients.size(); ++i) {
      items.push_back({static_cast<int>(i), {const_cast<float*>(gradients[i].data()), Dtype::fp32}});
    }
    return node(rank).push(clock, items, factor, {lr}, skips, weight);
  }
  std::shared_ptr<Ticket> push_weighted(int rank, int64_t clock, const Blocks& gradients, float weight) {
    return push(rank, clock, gradients, weight, 1.0, false, weight);
  }

  struct Pulled {
    std::shared_ptr<Ticket> ticket;
    std::shared_ptr<Blocks> values;
  };
  Pulled begin_pull(int rank, int64_t clock, std::optional<int64_t> staleness = 0, bool applied = false) {
    const auto into = std::make_shared<Blocks>();
    for (const Floats& value : setup.values) into->emplace_back(value.size(), -1.0f);
    std::vector<Client::Item> items;
    for (size_t i = 0; i < into->size(); ++i) items.push_back({static_cast<int>(i), {(*into)[i].data(), Dtype::fp32}});
    return {node(rank).pull(clock, staleness, items, into, applied), into};
  }
  Pulled begin_applied_pull(int rank, int64_t clock) { return begin_pull(rank, clock, {}, true); }
  Blocks pull(int rank, int64_t clock, std::optional<int64_t> staleness = 0) {
    const Pulled pulled = begin_pull(rank, clock, staleness);
    wait(pulled.ticket);
    return *pulled.values;
  }

  // Until nothing is left to be handled.
  void poll() const {
    for (bool found = true; found;) {
      found = false;
      for (const auto& node : nodes) found |= node && node->poll();
    }
  }
  void wait(const std::shared_ptr<Ticket>& ticket) const {
    if (!setup.has_threads) poll();
    EXPECT_TRUE(ticket->wait(setup.has_threads ? late() : Clock::now())) << "it is not complete";
  }

  // What the servers have. No worker pushes meanwhile.
  Blocks values() const {
    Blocks all;
    for (int block = 0; block < std::ssize(setup.values); ++block) {
      node(setup.servers[setup.server_of(block)]).with_server([&](Server*) { all.push_back(values_[block]); });
    }
    return all;
  }
  std::vector<Handled> record(int rank) const {
    std::vector<Handled> record;
    node(rank).with_server([&](const Server* server) { record = server->record(); });
    return record;
  }

  const Configuration setup;
  std::vector<std::unique_ptr<comm::Mailbox>> mailboxes;  // of the bare ranks

 private:
  struct Held {
    Blocks residuals, bases;
  };

  static bool is_in(const std::vector<int>& ranks, int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); }

  std::unique_ptr<Server> make_server(int rank) {
    if (values_.empty()) {
      values_ = setup.values;
      for (const Floats& value : values_) {
        states_.emplace_back(setup.rule.states.size(), Floats(value.size()));
        counters_.emplace_back(setup.counters, Floats(1));
      }
    }
    if (!is_in(setup.servers, rank)) return {};
    std::vector<Server::Block> blocks;
    std::vector<Updater::Slot> slots;
    for (int block = 0; block < std::ssize(values_); ++block) {
      if (setup.servers[setup.server_of(block)] != rank) continue;
      const auto numel = std::ssize(values_[block]);
      blocks.push_back({values_[block].data(), numel, 0, static_cast<int>(slots.size())});
      Updater::Slot& slot = slots.emplace_back();
      slot.value = values_[block].data();
      slot.numel = numel;
      for (Floats& state : states_[block]) slot.states.push_back(state.data());
      for (Floats& counter : counters_[block]) slot.counters.push_back(counter.data());
    }
    Server::Options options = setup.options;
    options.ranks = setup.workers;
    options.push_codec = &find_codec(setup.push_codec);
    options.pull_codec = &find_codec(setup.pull_codec);
    std::vector<std::unique_ptr<Updater>> updaters;
    updaters.push_back(setup.make_updater ? setup.make_updater(std::move(slots)) : ps::make_updater(setup.rule, std::move(slots)));
    return std::make_unique<Server>(ExecutionContext(), std::move(options), std::move(blocks), std::move(updaters));
  }

  std::unique_ptr<Client> make_client(int rank) {
    if (!is_in(setup.workers, rank)) return {};
    const Client::Options options{setup.servers, &find_codec(setup.push_codec), &find_codec(setup.pull_codec)};
    Held& held = held_[rank];
    for (const Floats& value : setup.values) {
      held.residuals.emplace_back(options.push_codec->is_lossy() ? value.size() : 0);
      held.bases.emplace_back(options.pull_codec->is_lossy() ? value.size() : 0);
    }
    std::vector<Client::Block> blocks;
    std::vector<int> counts(setup.servers.size());
    for (int block = 0; block < std::ssize(setup.values); ++block) {
      const int server = setup.server_of(block);
      blocks.push_back({server, counts[server]++, std::ssize(setup.values[block]),
                        options.push_codec->is_lossy() ? held.residuals[block].data() : nullptr,
                        options.pull_codec->is_lossy() ? held.bases[block].data() : nullptr});
    }
    return std::make_unique<Client>(ExecutionContext(), options, std::move(blocks));
  }

  Blocks values_;
  std::vector<Blocks> states_, counters_;  // of each block
  std::vector<Held> held_;                 // by rank

 public:
  std::vector<std::unique_ptr<Node>> nodes;  // by rank; null if it is bare. They use what is above
};

// What the ticket says when it fails, or nothing.
inline std::string failure(const std::shared_ptr<Ticket>& ticket) {
  try {
    EXPECT_TRUE(ticket->wait(late()));
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return {};
}

// What a call throws, or nothing.
inline std::string thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace dltrain::ps
