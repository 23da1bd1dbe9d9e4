#include "ps/run/client.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/check.h"
#include "kernels/elementwise.h"
#include "kernels/for_each.h"

namespace dltrain::ps {

namespace {

constexpr int64_t bundle = 512 << 10;  // bytes that travel together: one bundle is sent while another one is encoded

}  // namespace

bool Ticket::wait(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto is_over = [&] { return failed_ || open_ == 0; };
  if (deadline == Deadline::max()) {
    changed_.wait(lock, is_over);
  } else if (!changed_.wait_until(lock, deadline, is_over)) {
    return false;
  }
  if (failed_) throw std::runtime_error(why_);
  return true;
}

bool Ticket::is_done() const {
  const std::lock_guard lock(mutex_);
  return failed_ || open_ == 0;
}

void Ticket::fail(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (failed_ || open_ == 0) return;
  failed_ = true;
  why_ = why;
  changed_.notify_all();
}

Ticket::Versions Ticket::versions() const {
  const std::lock_guard lock(mutex_);
  return versions_;
}

void Ticket::add_part() {
  const std::lock_guard lock(mutex_);
  ++open_;
}

void Ticket::finish_part(const Message* values) {
  std::shared_ptr<const void> released;  // outside of the mutex, because it may wait for a thread that asks is_done()
  const std::lock_guard lock(mutex_);
  if (values) {
    for (const int64_t version : values->numbers) {
      versions_.lowest = has_versions_ ? std::min(versions_.lowest, version) : version;
      versions_.highest = std::max(versions_.highest, version);
      has_versions_ = true;
    }
    versions_.skipped |= values->skips;
  }
  if (--open_ > 0) return;
  released.swap(kept_);
  changed_.notify_all();
}

void Ticket::add_state(State state) {
  const std::lock_guard lock(mutex_);
  states_.push_back(std::move(state));
}

Client::Client(const ExecutionContext& context, Options options, std::vector<Block> blocks)
    : context_(context),
      options_(std::move(options)),
      blocks_(std::move(blocks)),
      by_server_(options_.ranks.size()),
      lost_(options_.ranks.size()) {
  for (size_t i = 0; i < blocks_.size(); ++i) {
    std::vector<int>& own = by_server_[static_cast<size_t>(blocks_[i].server)];
    check(blocks_[i].at_server == std::ssize(own), "blocks: expected those of a server in their order, got ", blocks_[i].at_server);
    own.push_back(static_cast<int>(i));
  }
}

// By server.
std::vector<std::vector<Client::Bundle>> Client::bundles(std::span<const Item> items, bool together) const {
  std::vector<std::vector<Bundle>> bundles(options_.ranks.size());
  std::vector<int64_t> bytes(options_.ranks.size());
  for (const Item& item : items) {
    const Block& block = blocks_[static_cast<size_t>(item.block)];
    const auto server = static_cast<size_t>(block.server);
    const int64_t more = aligned(block.numel * static_cast<int64_t>(sizeof(float)));
    if (bundles[server].empty() || (!together && bytes[server] + more > bundle)) {
      bundles[server].emplace_back();
      bytes[server] = 0;
    }
    bundles[server].back().push_back(item);
    bytes[server] += more;
  }
  return bundles;
}

std::string Client::name_of(int server) const { return text("the server of rank ", options_.ranks[static_cast<size_t>(server)]); }

int64_t Client::open_part(const Lock&, const std::shared_ptr<Ticket>& ticket, Part part) {
  const std::string& lost = lost_[static_cast<size_t>(part.server)];
  if (!lost.empty()) throw std::runtime_error(lost);
  ticket->add_part();
  part.ticket = ticket;
  parts_[next_id_] = std::move(part);
  return next_id_++;
}

std::shared_ptr<Ticket> Client::push(int64_t clock, std::span<const Item> gradients, float factor, const std::vector<double>& rates,
                                     bool skips, float weight, Sender& sender) {
  const std::shared_ptr<Ticket> ticket(new Ticket);
  ticket->add_part();  // until all are sent
  const std::vector<std::vector<Bundle>> by_server = bundles(gradients, false);
  std::vector<int64_t> ids;
  {
    const Lock lock(mutex_);
    for (int server = 0; server < std::ssize(by_server); ++server) {
      ids.push_back(by_server[static_cast<size_t>(server)].empty() ? Message::no_id : open_part(lock, ticket, {.server = server}));
    }
  }
  // In turns, so that all servers soon have something to do. A server answers the last of its messages.
  size_t left = by_server.size();
  for (size_t i = 0; left > 0; ++i) {
    left = 0;
    for (size_t server = 0; server < by_server.size(); ++server) {
      if (i >= by_server[server].size()) continue;
      ++left;
      Message message{.kind = Kind::push, .id = Message::no_id, .clock = clock, .weight = weight, .skips = skips, .rates = rates};
      if (i + 1 == by_server[server].size()) message.id = ids[server];
      const Data data = encode(by_server[server][i], factor, message, sender);
      sender.send(options_.ranks[server], message, data);
    }
  }
  ticket->finish_part(nullptr);
  return ticket;
}

Data Client::encode(const Bundle& items, float factor, Message& message, Sender& sender) const {
  int64_t bytes = 0;
  for (const Item& item : items) {
    const Block& block = blocks_[static_cast<size_t>(item.block)];
    message.blocks.push_back(block.at_server);
    bytes += aligned(options_.push_codec->bytes(block.numel));
  }
  if (message.skips) return {};
  const std::shared_ptr<std::byte> memory = sender.allocate(bytes);
  auto* to = reinterpret_cast<uint8_t*>(memory.get());
  std::vector<Sum> sums;
  for (const Item& item : items) {
    const Block& block = blocks_[static_cast<size_t>(item.block)];
    Sum encoding;
    encoding.numel = block.numel;
    encoding.own = item.elements;
    encoding.scale = factor;
    encoding.feedback.residual = {block.residual, Dtype::fp32};
    encoding.message = to;
    sums.push_back(encoding);
    to += aligned(options_.push_codec->bytes(block.numel));
  }
  options_.push_codec->encode_sums(context_, sums);
  return {memory.get(), bytes, memory};
}

std::shared_ptr<Ticket> Client::pull(int64_t clock, std::optional<int64_t> staleness, std::span<const Item> into,
                                     std::shared_ptr<const void> kept, bool applied, Sender& sender) {
  const std::shared_ptr<Ticket> ticket(new Ticket(std::move(kept)));
  ticket->add_part();
  std::vector<std::vector<Bundle>> by_server = bundles(into, options_.together);
  for (int server = 0; server < std::ssize(by_server); ++server) {
    Message message{.kind = Kind::pull, .id = Message::no_id, .clock = clock, .staleness = staleness, .applied = applied};
    {
      const Lock lock(mutex_);
      for (Bundle& items : by_server[static_cast<size_t>(server)]) {
        message.numbers.push_back(std::ssize(items));
        for (const Item& item : items) message.blocks.push_back(blocks_[static_cast<size_t>(item.block)].at_server);
        const int64_t id = open_part(lock, ticket, {.server = server, .items = std::move(items), .answer = Kind::values});
        if (message.id == Message::no_id) message.id = id;
      }
    }
    if (message.id != Message::no_id) sender.send(options_.ranks[static_cast<size_t>(server)], message);
  }
  ticket->finish_part(nullptr);
  return ticket;
}

std::shared_ptr<Ticket> Client::save(bool with_data, Sender& sender) {
  const std::shared_ptr<Ticket> ticket(new Ticket);
  ticket->add_part();
  for (int server = 0; server < std::ssize(options_.ranks); ++server) {
    const int64_t id = open_part(Lock(mutex_), ticket, {.server = server, .answer = Kind::state});
    sender.send(options_.ranks[static_cast<size_t>(server)], {.kind = Kind::save, .id = id, .with_data = with_data});
  }
  ticket->finish_part(nullptr);
  return ticket;
}

int64_t Client::bytes() const {
  int64_t bytes = differences_.bytes();
  for (const Block& block : blocks_) {
    const int64_t kept = (block.residual ? 1 : 0) + (block.base ? 1 : 0);
    bytes += kept * block.numel * static_cast<int64_t>(sizeof(float));
  }
  return bytes;
}

void Client::handle(int server, const Unpacked& message) {
  const Message& given = message.message;
  Part part;
  {
    const Lock lock(mutex_);
    const auto found = parts_.find(given.id);
    const bool is_known = found != parts_.end() && found->second.server == server;
    if (given.kind == Kind::reasons) {
      if (!is_known) return;
      found->second.lacking = given.numbers;
      answered_.notify_all();
      return;
    }
    // The server lacks what this worker has sent, so later pulls could wait for ever.
    if (given.kind == Kind::failed && (!is_known || found->second.answer != Kind::values)) {
      return give_up(lock, server, text(name_of(server), " refuses what this worker sends: ", given.text));
    }
    check(is_known && (given.kind == Kind::failed || given.kind == found->second.answer),
          "message: expected the answer to a push or a pull, got kind ", static_cast<int>(given.kind), " with id ", given.id);
    part = std::move(found->second);
    parts_.erase(found);
    answered_.notify_all();
  }
  if (given.kind == Kind::failed) return part.ticket->fail(given.text);
  try {
    if (given.kind == Kind::values) write(part, message);
  } catch (const std::exception& error) {
    part.ticket->fail(error.what());
    throw;
  }
  if (given.kind == Kind::state) part.ticket->add_state({server, given.numbers, {message.data.begin(), message.data.end()}});
  part.ticket->finish_part(given.kind == Kind::values ? &given : nullptr);
}

void Client::write(const Part& part, const Unpacked& message) {
  const Codec& raw = find_codec("raw");
  const bool differs = message.message.differs;
  const Codec& codec = differs ? *options_.pull_codec : raw;
  const auto* from = reinterpret_cast<const uint8_t*>(message.data.data());
  int64_t bytes = 0, numel = 0;
  for (const Item& item : part.items) {
    bytes += aligned(codec.bytes(blocks_[static_cast<size_t>(item.block)].numel));
    numel += blocks_[static_cast<size_t>(item.block)].numel;
  }
  check(bytes == std::ssize(message.data), "values: expected ", bytes, " bytes, got ", message.data.size());
  std::vector<Decoding> decoded, written;
  TensorList<Accumulate::streams> held;
  auto* difference = differs ? static_cast<float*>(differences_.reserve(context_, numel * static_cast<int64_t>(sizeof(float)))) : nullptr;
  for (const Item& item : part.items) {
    const Block& block = blocks_[static_cast<size_t>(item.block)];
    check(block.base || !differs, "values: expected all of them, got a difference");
    if (differs) {
      decoded.push_back({block.numel, from, {difference, Dtype::fp32}});
      held.add({block.base, difference}, block.numel);
      difference += block.numel;
    } else if (block.base) {
      decoded.push_back({block.numel, from, {block.base, Dtype::fp32}});
    }
    // The elements of a raw message are those of memory.
    written.push_back({block.numel, block.base ? reinterpret_cast<const uint8_t*>(block.base) : from, item.elements});
    from += aligned(codec.bytes(block.numel));
  }
  if (!decoded.empty()) codec.decode_all(context_, decoded);
  if (held.size() > 0) for_each(context_, held, Accumulate{});
  raw.decode_all(context_, written);
}

void Client::lose(int server, const std::string& why) {
  give_up(Lock(mutex_), server,
          text(name_of(server), " is lost, and with it ", by_server_[static_cast<size_t>(server)].size(), " of ", blocks_.size(),
               " blocks of the store: ", why));
}

void Client::give_up(const Lock&, int server, const std::string& why) {
  std::string& lost = lost_[static_cast<size_t>(server)];
  if (!lost.empty()) return;
  lost = why;
  for (const auto& [id, part] : parts_) {
    if (part.server == server) part.ticket->fail(why);
  }
  answered_.notify_all();
}

std::vector<int> Client::lost() {
  std::vector<int> lost;
  const Lock lock(mutex_);
  for (size_t server = 0; server < lost_.size(); ++server) {
    if (!lost_[server].empty()) lost.push_back(options_.ranks[server]);
  }
  return lost;
}

void Client::fail_all(const std::string& why) {
  const Lock lock(mutex_);
  for (std::string& lost : lost_) {
    if (lost.empty()) lost = why;
  }
  for (const auto& [id, part] : parts_) part.ticket->fail(why);
  answered_.notify_all();
}

std::string Client::reasons(const std::shared_ptr<Ticket>& ticket, Deadline deadline, Sender& sender) {
  std::vector<std::pair<int64_t, int>> asked;  // a part for each server, and the server
  {
    const Lock lock(mutex_);
    std::vector<char> seen(options_.ranks.size());
    for (const auto& [id, part] : parts_) {
      if (part.ticket != ticket || std::exchange(seen[static_cast<size_t>(part.server)], 1)) continue;
      asked.emplace_back(id, part.server);
    }
  }
  for (const auto& [id, server] : asked) {
    sender.send(options_.ranks[static_cast<size_t>(server)], {.kind = Kind::question, .id = id}, {}, deadline);
  }
  Lock lock(mutex_);
  answered_.wait_until(lock, deadline, [&] {
    return std::all_of(asked.begin(), asked.end(), [&](const auto& each) {
      const auto found = parts_.find(each.first);
      return found == parts_.end() || found->second.lacking || !lost_[static_cast<size_t>(each.second)].empty();
    });
  });
  std::string said;
  for (const auto& [id, server] : asked) {
    const auto found = parts_.find(id);
    if (found == parts_.end()) continue;
    std::optional<std::vector<int64_t>>& lacking = found->second.lacking;
    said += (said.empty() ? "" : "; ") + name_of(server);
    if (!lacking) {
      said += " does not answer";
    } else if (lacking->empty()) {
      said += " is about to answer";
    } else {
      said += " waits for pushes of rank";
      const char* before = " ";
      for (const int64_t rank : *lacking) said += text(std::exchange(before, ", "), rank);
    }
    lacking.reset();
  }
  return said;
}

}  // namespace dltrain::ps
