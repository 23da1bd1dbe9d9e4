#include "ps/run/server.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "kernels/elementwise.h"
#include "kernels/for_each.h"

namespace dltrain::ps {

namespace {

Core::Options core_options(const Server::Options& options, size_t blocks) {
  const bool has_grace = options.grace > Clock::duration();
  return {static_cast<int>(options.ranks.size()), static_cast<int>(blocks), options.quorum, options.window, has_grace};
}

}  // namespace

Handled described(const Message& message, int worker) {
  using enum Handled::What;
  const auto what = message.kind == Kind::push ? push : message.applied ? applied_pull : pull;
  return {what, worker, message.clock, message.blocks.empty() ? -1 : message.blocks.front()};
}

Server::Server(const ExecutionContext& context, Options options, std::vector<Block> blocks, std::vector<std::unique_ptr<Updater>> updaters)
    : context_(context),
      options_(std::move(options)),
      blocks_(std::move(blocks)),
      updaters_(std::move(updaters)),
      core_(core_options(options_, blocks_.size())),
      graces_(options_.grace),
      in_applied_(blocks_.size()),
      skipped_(blocks_.size(), -1),
      saving_(options_.ranks.size()),
      lost_(options_.ranks.size()) {
  check(!has_grace() || options_.delay_compensation == 0.0f, "grace: expected none with delay compensation");
  int64_t first = 0;
  for (const Block& block : blocks_) {
    firsts_.push_back(first);
    first += aligned(block.numel * static_cast<int64_t>(sizeof(float))) / static_cast<int64_t>(sizeof(float));
  }
  firsts_.push_back(first);
  if (has_shadows()) shadows_.resize(options_.lockstep ? 1 : options_.ranks.size());
  if (options_.lockstep) versions_held_.resize(options_.ranks.size(), std::vector<int64_t>(blocks_.size(), -1));
}

void Server::handle(int worker, const Unpacked& message, const std::shared_ptr<const void>& memory, Sender& sender) {
  const Message& given = message.message;
  for (const int block : given.blocks) {
    check(block >= 0 && block < std::ssize(blocks_), "blocks: expected numbers below ", blocks_.size(), ", got ", block);
  }
  if (given.kind == Kind::question) {
    Message reasons{.kind = Kind::reasons, .id = given.id};
    for (const auto& [id, pull] : waiting_) {
      if (pull.worker != worker || pull.id != given.id) continue;
      for (const int lacking : core_.lacking(id)) reasons.numbers.push_back(options_.ranks[static_cast<size_t>(lacking)]);
    }
    sender.send(options_.ranks[static_cast<size_t>(worker)], reasons);
    return;
  }
  if (given.kind == Kind::save) return save(worker, given, sender);
  if (given.kind == Kind::restore) return restore(message);
  const bool is_push = given.kind == Kind::push;
  check(is_push || given.kind == Kind::pull, "kind: expected a push or a pull, got ", static_cast<int>(given.kind));
  check(!given.blocks.empty(), "blocks: expected at least one, got none");
  check(given.clock >= 0, "clock: expected at least 0, got ", given.clock);
  is_push ? check_push(message) : check_pull(given);
  if (options_.records) record_.push_back(described(given, worker));
  is_push ? push(worker, message, memory, sender) : pull(worker, given, sender);
}

// Before anything of it is taken.
void Server::check_push(const Unpacked& message) const {
  const Message& given = message.message;
  check(given.rates.size() == updaters_.size(), "rates: expected ", updaters_.size(), ", got ", given.rates.size());
  check(std::isfinite(given.weight) && given.weight > 0.0f, "weight: expected a finite number > 0, got ", given.weight);
  int64_t bytes = 0;
  for (const int block : given.blocks) {
    bytes += given.skips ? 0 : aligned(options_.push_codec->bytes(blocks_[static_cast<size_t>(block)].numel));
  }
  check(bytes == std::ssize(message.data), "push: expected ", bytes, " bytes, got ", message.data.size());
}

void Server::check_pull(const Message& message) const {
  int64_t left = std::ssize(message.blocks);
  for (const int64_t count : message.numbers) {
    check(count > 0 && count <= left, "pull: expected parts of 1 to ", left, " blocks, got ", count);
    left -= count;
  }
  check(left == 0, "pull: expected parts with all blocks, got ", left, " too few");
}

void Server::push(int worker, const Unpacked& message, const std::shared_ptr<const void>& memory, Sender& sender) {
  const Message& given = message.message;
  const auto rates = std::make_shared<const std::vector<double>>(given.rates);
  int64_t at = 0;
  for (const int block : given.blocks) {
    const int64_t bytes = given.skips ? 0 : options_.push_codec->bytes(blocks_[static_cast<size_t>(block)].numel);
    held_[next_id_] = {memory, reinterpret_cast<const uint8_t*>(message.data.data()) + at, bytes, rates, given.skips, given.weight};
    core_.push(block, {worker, given.clock, next_id_++}, actions_);
    at += aligned(bytes);
  }
  Message answer{.kind = Kind::accepted, .id = given.id};
  const auto refused = std::find_if(actions_.begin(), actions_.end(), [](const Action& each) { return each.kind == Action::Kind::refuse; });
  if (refused != actions_.end()) {
    answer.kind = Kind::failed;
    answer.text = text("push of clock ", given.clock, ": expected one that is less than ", options_.window,
                       " clocks ahead of what is applied, ", core_.applied(refused->key, worker));
  }
  if (answer.kind == Kind::failed || given.id != Message::no_id) sender.send(options_.ranks[static_cast<size_t>(worker)], answer);
  perform(sender);
}

void Server::pull(int worker, const Message& message, Sender& sender) {
  auto block = message.blocks.begin();
  for (int64_t part = 0; part < std::ssize(message.numbers); ++part) {
    const auto end = block + message.numbers[static_cast<size_t>(part)];
    const int64_t id = next_id_++;
    waiting_[id] = {worker, message.id + part, {block, end}};
    core_.pull({id, worker, message.clock, message.staleness, waiting_[id].blocks, message.applied}, actions_);
    block = end;
  }
  perform(sender);
}

void Server::leave(int worker, const std::string& why, Sender& sender) {
  if (!lost_[static_cast<size_t>(worker)].empty()) return;
  lost_[static_cast<size_t>(worker)] = why;
  if (options_.records) record_.push_back({Handled::What::leave, worker, 0, -1});
  core_.leave(worker, actions_);
  perform(sender);
  send_states(sender);
}

// Calls visit(numbers, count) for the values of a block, its states and its counters.
template <class Visit>
void Server::for_each_number_of(int block, Visit&& visit) {
  const Block& own = blocks_[static_cast<size_t>(block)];
  Updater::Slot& slot = updaters_[static_cast<size_t>(own.group)]->slots()[static_cast<size_t>(own.slot)];
  visit(own.value, own.numel);
  for (float* const state : slot.states) visit(state, own.numel);
  for (float* const counter : slot.counters) visit(counter, 1);
}

std::vector<int64_t> Server::applied() const {
  std::vector<int64_t> applied(options_.ranks.size());
  for (int worker = 0; worker < std::ssize(applied); ++worker) {
    int64_t& least = applied[static_cast<size_t>(worker)];
    for (int block = 0; block < std::ssize(blocks_); ++block) {
      least = block == 0 ? core_.applied(block, worker) : std::min(least, core_.applied(block, worker));
    }
  }
  return applied;
}

int64_t Server::bytes() {
  int64_t bytes = sums_.bytes() + differences_.bytes() + state_numel() * static_cast<int64_t>(sizeof(float));
  for (const Shadow& shadow : shadows_) bytes += shadow.values.bytes();
  for (const auto& [id, held] : held_) bytes += held.bytes;
  for (const auto& [block, reply] : replies_) bytes += reply.data.count;
  return bytes;
}

std::vector<int64_t> Server::versions() const {
  std::vector<int64_t> versions;
  for (int block = 0; block < std::ssize(blocks_); ++block) versions.push_back(core_.version(block));
  return versions;
}

int64_t Server::state_numel() {
  int64_t total = 0;
  for (int block = 0; block < std::ssize(blocks_); ++block) {
    for_each_number_of(block, [&](const float*, int64_t numel) { total += numel; });
  }
  return total;
}

void Server::copy_state(float* to) {
  for (int block = 0; block < std::ssize(blocks_); ++block) {
    for_each_number_of(block, [&](const float* numbers, int64_t numel) { to = std::copy_n(numbers, numel, to); });
  }
}

void Server::save(int worker, const Message& message, Sender& sender) {
  saving_[static_cast<size_t>(worker)] = message;
  send_states(sender);
}

// The state is one version, because no worker pushes before it has it.
void Server::send_states(Sender& sender) {
  bool is_asked = false;
  for (size_t worker = 0; worker < saving_.size(); ++worker) {
    const std::optional<Message>& asked = saving_[worker];
    if (!asked && lost_[worker].empty()) return;
    is_asked |= asked && asked->with_data;
  }
  Message state{.kind = Kind::state, .numbers = versions()};
  for (int block = 0; block < std::ssize(blocks_); ++block) state.blocks.push_back(block);
  Data data;
  if (is_asked) {
    data.count = state_numel() * static_cast<int64_t>(sizeof(float));
    const std::shared_ptr<std::byte> memory = sender.allocate(data.count);
    copy_state(reinterpret_cast<float*>(memory.get()));
    data.bytes = memory.get();
    data.keep = memory;
  }
  for (size_t worker = 0; worker < saving_.size(); ++worker) {
    std::optional<Message>& asked = saving_[worker];
    if (!asked) continue;
    state.id = asked->id;
    sender.send(options_.ranks[worker], state, asked->with_data ? data : Data{});
    asked.reset();
  }
}

void Server::restore(const Unpacked& message) {
  for (const int64_t version : versions()) {
    check(version == 0, "restore: expected a store into which nothing was pushed, got version ", version);
  }
  const int64_t bytes = state_numel() * static_cast<int64_t>(sizeof(float));
  check(bytes == std::ssize(message.data), "restore: expected ", bytes, " bytes, got ", message.data.size());
  const std::byte* from = message.data.data();
  for (int block = 0; block < std::ssize(blocks_); ++block) {
    for_each_number_of(block, [&](float* numbers, int64_t numel) {
      std::memcpy(numbers, from, static_cast<size_t>(numel) * sizeof(float));
      from += numel * static_cast<int64_t>(sizeof(float));
    });
    const Block& own = blocks_[static_cast<size_t>(block)];
    updaters_[static_cast<size_t>(own.group)]->slots()[static_cast<size_t>(own.slot)].is_first = !message.message.with_data;
  }
  for (Shadow& shadow : shadows_) shadow.versions.clear();
  for (auto& held : versions_held_) held.assign(blocks_.size(), -1);
  replies_.clear();
}

std::string Server::lost(int worker) const {
  return text("the worker of rank ", options_.ranks[static_cast<size_t>(worker)], " has left: ", lost_[static_cast<size_t>(worker)]);
}

void Server::perform(Sender& sender) {
  std::vector<Action> actions;
  actions.swap(actions_);
  for (Action& action : actions) {
    const auto key = static_cast<size_t>(action.key);
    if (action.kind == Action::Kind::apply) {
      const bool differs =
          !applied_.empty() && (rates_of(action) != rates_of(applied_.front()) || divisor_of(action) != divisor_of(applied_.front()));
      if (in_applied_[key] || differs) apply();
      in_applied_[key] = true;
      applied_.push_back(std::move(action));
      continue;
    }
    if (action.kind == Action::Kind::wait) {
      graces_.begin(action.key, action.version);
      continue;
    }
    apply();
    if (action.kind == Action::Kind::answer || action.kind == Action::Kind::fail) {
      const auto found = waiting_.find(action.pull);
      const Waiting pull = std::move(found->second);
      waiting_.erase(found);
      if (action.kind == Action::Kind::answer) {
        answer(pull, sender);
      } else {
        sender.send(options_.ranks[static_cast<size_t>(pull.worker)], {.kind = Kind::failed, .id = pull.id, .text = lost(action.worker)});
      }
    } else {
      for (const Contribution& contribution : action.contributions) held_.erase(contribution.id);
    }
  }
  apply();
}

const std::vector<double>& Server::rates_of(const Action& action) const { return *held_.at(action.contributions.back().id).rates; }

// Makes the versions that the actions in applied_ ask for, each of another block, and all at the same rates and with the same divisor.
void Server::apply() {
  if (applied_.empty()) return;
  std::vector<Sum> sums;
  std::vector<std::vector<const uint8_t*>> lists;
  lists.reserve(applied_.size());
  std::vector<std::vector<Updater::Item>> items(updaters_.size());
  auto* const memory = static_cast<float*>(sums_.reserve(context_, firsts_.back() * static_cast<int64_t>(sizeof(float))));
  std::vector<std::pair<const Action*, float*>> delayed;
  for (const Action& action : applied_) {
    const auto key = static_cast<size_t>(action.key);
    in_applied_[key] = false;
    const bool skips = std::any_of(action.contributions.begin(), action.contributions.end(),
                                   [&](const Contribution& each) { return held_.at(each.id).skips; });
    if (skips) {
      skipped_[key] = action.version;
      continue;
    }
    float* const sum = memory + firsts_[key];
    const float* const grad = gradient_of(action, sum, sums, lists);
    if (options_.delay_compensation != 0.0f) delayed.emplace_back(&action, sum);
    items[static_cast<size_t>(blocks_[key].group)].push_back({blocks_[key].slot, grad});
  }
  if (!sums.empty()) options_.push_codec->encode_sums(context_, sums);
  if (!delayed.empty()) {
    TensorList<Compensate::streams> list;
    for (const auto& [action, sum] : delayed) {
      const auto key = static_cast<size_t>(action->key);
      Shadow& shadow = shadow_for(action->contributions.front().worker);
      if (shadow.versions[key] >= 0) list.add({sum, blocks_[key].value, shadow_of(shadow, action->key)}, blocks_[key].numel);
    }
    if (list.size() > 0) for_each(context_, list, Compensate{options_.delay_compensation});
  }
  const std::vector<double>& rates = rates_of(applied_.front());
  const double divisor = divisor_of(applied_.front());
  for (size_t group = 0; group < updaters_.size(); ++group) {
    if (!items[group].empty()) updaters_[group]->step(context_, items[group], rates[group], divisor);
  }
  for (const Action& action : applied_) {
    for (const Contribution& contribution : action.contributions) held_.erase(contribution.id);
  }
  applied_.clear();
}

// Where the gradient is, once the sums are made: in the message itself, if there is nothing to add or decode.
const float* Server::gradient_of(const Action& action, float* sum, std::vector<Sum>& sums,
                                 std::vector<std::vector<const uint8_t*>>& lists) {
  std::vector<const uint8_t*>& received = lists.emplace_back();
  for (const Contribution& contribution : action.contributions) received.push_back(held_.at(contribution.id).data);
  const bool in_place = received.size() == 1 && options_.push_codec->name == "raw" && options_.delay_compensation == 0.0f;
  if (in_place) return reinterpret_cast<const float*>(received.front());
  Sum adding;
  adding.numel = blocks_[static_cast<size_t>(action.key)].numel;
  adding.received = received.data();
  adding.count = static_cast<int>(received.size());
  adding.decoded = {sum, Dtype::fp32};
  sums.push_back(adding);
  return sum;
}

float* Server::shadow_of(Shadow& shadow, int block) const {
  return static_cast<float*>(shadow.values.data()) + firsts_[static_cast<size_t>(block)];
}

Server::Shadow& Server::shadow_for(int worker) {
  Shadow& shadow = shadows_[options_.lockstep ? 0 : static_cast<size_t>(worker)];
  if (shadow.versions.empty()) {
    shadow.versions.assign(blocks_.size(), -1);
    shadow.values = Memory(context_, firsts_.back() * static_cast<int64_t>(sizeof(float)));
  }
  return shadow;
}

void Server::answer(const Waiting& pull, Sender& sender) {
  Reply made;
  const Reply* sent = &made;
  if (!options_.lockstep) {
    made = reply(pull.worker, pull.blocks, sender);
  } else {
    std::vector<int64_t> versions;
    for (const int block : pull.blocks) versions.push_back(core_.version(block));
    std::vector<int64_t>& held = versions_held_[static_cast<size_t>(pull.worker)];
    const auto serves = [&](const Reply& reply) {
      if (reply.blocks != pull.blocks || reply.versions != versions) return false;
      for (size_t i = 0; i < reply.bases.size(); ++i) {
        if (held[static_cast<size_t>(pull.blocks[i])] != reply.bases[i]) return false;
      }
      return true;
    };
    Reply& kept = replies_[pull.blocks.front()];
    if (!serves(kept)) kept = reply(pull.worker, pull.blocks, sender);
    for (size_t i = 0; i < pull.blocks.size(); ++i) held[static_cast<size_t>(pull.blocks[i])] = versions[i];
    sent = &kept;
  }
  Message message = sent->message;
  message.id = pull.id;
  sender.send(options_.ranks[static_cast<size_t>(pull.worker)], message, sent->data);
}

// A difference to what the worker holds, where the server knows it and the codec is not exact; else the values that it is to hold.
Server::Reply Server::reply(int worker, const std::vector<int>& blocks, Sender& sender) {
  Reply made{.blocks = blocks, .message = {.kind = Kind::values}};
  Shadow* const shadow = has_shadows() ? &shadow_for(worker) : nullptr;
  const bool is_lossy = options_.pull_codec->is_lossy();
  bool differs = is_lossy;
  for (const int block : blocks) {
    const auto key = static_cast<size_t>(block);
    const int64_t version = core_.version(block);
    made.versions.push_back(version);
    made.message.blocks.push_back(block);
    made.message.numbers.push_back(version);
    made.message.skips |= version > 0 && skipped_[key] == version;
    if (!is_lossy) continue;
    const int64_t base = shadow->versions[key];
    differs &= base >= 0 && (!options_.lockstep || (base < version && versions_held_[static_cast<size_t>(worker)][key] == base));
    made.bases.push_back(base);
  }
  made.message.differs = differs;
  if (!differs) made.bases.clear();
  if (shadow && !differs) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto key = static_cast<size_t>(blocks[i]);
      // In lockstep the workers that hold this version already hold the shadow, not the value.
      if (options_.lockstep && shadow->versions[key] == made.versions[i]) continue;
      std::memcpy(shadow_of(*shadow, blocks[i]), blocks_[key].value, static_cast<size_t>(blocks_[key].numel) * sizeof(float));
    }
  }
  int64_t bytes = 0;
  const Codec& raw = find_codec("raw");
  for (const int block : blocks) bytes += aligned((differs ? *options_.pull_codec : raw).bytes(blocks_[static_cast<size_t>(block)].numel));
  const std::shared_ptr<std::byte> memory = sender.allocate(bytes);
  auto* const to = reinterpret_cast<uint8_t*>(memory.get());
  if (differs) {
    write_difference(blocks, *shadow, to);
  } else {
    std::vector<float*> from;
    for (const int block : blocks) from.push_back(shadow ? shadow_of(*shadow, block) : blocks_[static_cast<size_t>(block)].value);
    write_values(blocks, from.data(), to);
  }
  if (shadow) {
    for (size_t i = 0; i < blocks.size(); ++i) shadow->versions[static_cast<size_t>(blocks[i])] = made.versions[i];
  }
  made.data = {memory.get(), bytes, memory};
  return made;
}

// What the codec loses stays in the difference between value and shadow, and so it is in the next message.
void Server::write_difference(const std::vector<int>& blocks, Shadow& shadow, uint8_t* to) {
  auto* const memory = static_cast<float*>(differences_.reserve(context_, firsts_.back() * static_cast<int64_t>(sizeof(float))));
  TensorList<Subtract::streams> differences;
  TensorList<Accumulate::streams> held;
  std::vector<Sum> sums;
  for (const int block : blocks) {
    const auto key = static_cast<size_t>(block);
    float* const difference = memory + firsts_[key];
    const int64_t numel = blocks_[key].numel;
    differences.add({difference, blocks_[key].value, shadow_of(shadow, block)}, numel);
    held.add({shadow_of(shadow, block), difference}, numel);
    Sum encoding;
    encoding.numel = numel;
    encoding.own = {difference, Dtype::fp32};
    encoding.message = to;
    encoding.decoded = {difference, Dtype::fp32};
    sums.push_back(encoding);
    to += aligned(options_.pull_codec->bytes(numel));
  }
  for_each(context_, differences, Subtract{});
  options_.pull_codec->encode_sums(context_, sums);
  for_each(context_, held, Accumulate{});
}

void Server::write_values(const std::vector<int>& blocks, float* const* from, uint8_t* to) const {
  std::vector<Sum> sums;
  const Codec& raw = find_codec("raw");
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int64_t numel = blocks_[static_cast<size_t>(blocks[i])].numel;
    Sum copying;
    copying.numel = numel;
    copying.own = {from[i], Dtype::fp32};
    copying.message = to;
    sums.push_back(copying);
    to += aligned(raw.bytes(numel));
  }
  raw.encode_sums(context_, sums);
}

}  // namespace dltrain::ps
