#include "ps/run/node.h"

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

#include "core/check.h"

namespace dltrain::ps {

using SendResult = comm::Mailbox::SendResult;
using std::chrono::milliseconds;

Node::Node(std::unique_ptr<comm::Mailbox> mailbox, Ranks ranks, std::unique_ptr<Server> server, std::unique_ptr<Client> client,
           std::vector<Handled> replayed)
    : mailbox_(std::move(mailbox)),
      ranks_(std::move(ranks)),
      worker_of_(static_cast<size_t>(mailbox_->world_size()), -1),
      server_of_(static_cast<size_t>(mailbox_->world_size()), -1),
      server_(std::move(server)),
      client_(std::move(client)),
      replayed_(std::move(replayed)),
      is_gone_(ranks_.workers.size()),
      outgoing_(static_cast<size_t>(mailbox_->world_size())) {
  for (size_t i = 0; i < ranks_.workers.size(); ++i) worker_of_[static_cast<size_t>(ranks_.workers[i])] = static_cast<int>(i);
  for (size_t i = 0; i < ranks_.servers.size(); ++i) server_of_[static_cast<size_t>(ranks_.servers[i])] = static_cast<int>(i);
}

Node::~Node() { close(milliseconds(0)); }

void Node::start() {
  thread_ = std::thread([this] { run(); });
}

void Node::run() {
  carrier_ = std::this_thread::get_id();
  while (!mailbox_->is_closed()) {
    const bool is_flushed = flush();
    auto event = mailbox_->receive(is_flushed ? Deadline::max() : Clock::now() + milliseconds(1));
    if (event) handle(std::move(*event));
  }
}

bool Node::poll() {
  const auto before = carrier_.exchange(std::this_thread::get_id());
  bool found = false;
  flush();
  for (; auto event = mailbox_->receive(Clock::now()); found = true) handle(std::move(*event));
  carrier_ = before;
  return found;
}

void Node::handle(Event event) {
  const int rank = event.from;
  const int worker = worker_of_[static_cast<size_t>(rank)], server = server_of_[static_cast<size_t>(rank)];
  if (event.kind != Event::Kind::message) {
    return lose(rank, event.kind == Event::Kind::closed ? "it has closed its store" : event.reason);
  }
  const std::lock_guard lock(handling_);
  bool for_server = false;
  try {
    Unpacked message = unpack({event.data.get(), static_cast<size_t>(event.bytes)});
    const Message& given = message.message;
    const bool is_done = given.kind == Kind::done;
    const bool has_order = given.kind == Kind::push || given.kind == Kind::pull;
    for_server = is_done || has_order || given.kind == Kind::question || given.kind == Kind::save || given.kind == Kind::restore;
    if (!for_server) {
      check(client_ && server >= 0, "message: expected none for a worker from rank ", rank);
      return client_->handle(server, message);
    }
    check(server_ && worker >= 0, "message: expected none for a server from rank ", rank);
    if (is_done) return leave(worker, "it has closed its store");
    const Handled described{given.kind == Kind::push ? Handled::What::push : Handled::What::pull, worker, given.clock,
                            given.blocks.empty() ? -1 : given.blocks.front()};
    arrived_.push_back({described, !has_order, worker, std::move(message), std::move(event.data), {}});
    serve_in_order();
  } catch (const std::exception& error) {
    const std::string why = text("what rank ", rank, " sent could not be handled: ", error.what());
    if (for_server && worker >= 0) send(rank, {.kind = Kind::failed, .id = -1, .text = why}, {});
    if (client_) client_->fail_all(why);
  }
}

// Handles what has come, as far as the record allows it.
void Node::serve_in_order() {
  const auto may_be_next = [&](const Arrived& each) {
    return each.has_no_order || next_replayed_ >= replayed_.size() || each.described == replayed_[next_replayed_];
  };
  for (;;) {
    const auto next = std::find_if(arrived_.begin(), arrived_.end(), may_be_next);
    if (next == arrived_.end()) return;
    Arrived taken = std::move(*next);
    arrived_.erase(next);
    if (!taken.has_no_order && next_replayed_ < replayed_.size()) ++next_replayed_;
    if (taken.described.what == Handled::What::leave) {
      server_->leave(taken.worker, taken.why, *this);
    } else {
      server_->handle(taken.worker, std::move(taken.message), taken.memory, *this);
    }
  }
}

void Node::lose(int rank, const std::string& why) {
  const std::lock_guard lock(handling_);
  const int worker = worker_of_[static_cast<size_t>(rank)], server = server_of_[static_cast<size_t>(rank)];
  if (client_ && server >= 0) client_->lose(server, why);
  if (server_ && worker >= 0) leave(worker, why);
}

void Node::leave(int worker, const std::string& why) {
  if (is_gone_[static_cast<size_t>(worker)]) return;
  is_gone_[static_cast<size_t>(worker)] = true;
  gone_.notify_all();
  arrived_.push_back({{Handled::What::leave, worker, 0, -1}, false, worker, {}, {}, why});
  serve_in_order();
}

bool Node::finish(Deadline deadline) {
  if (client_) {
    for (const int rank : ranks_.servers) send(rank, {.kind = Kind::done}, {});
  }
  std::unique_lock lock(handling_);
  const auto all_are_gone = [&] {
    return !server_ || mailbox_->is_closed() || std::find(is_gone_.begin(), is_gone_.end(), false) == is_gone_.end();
  };
  if (deadline == Deadline::max()) {
    gone_.wait(lock, all_are_gone);
    return true;
  }
  return gone_.wait_until(lock, deadline, all_are_gone);
}

std::shared_ptr<Ticket> Node::push(int64_t clock, std::span<const Client::Item> gradients, float factor, const std::vector<double>& rates,
                                   bool skips) {
  return client_->push(clock, gradients, factor, rates, skips, *this);
}

std::shared_ptr<Ticket> Node::pull(int64_t clock, std::optional<int64_t> staleness, std::span<const Client::Item> into,
                                   std::shared_ptr<const void> kept) {
  return client_->pull(clock, staleness, into, std::move(kept), *this);
}

std::shared_ptr<Ticket> Node::save(bool with_data) { return client_->save(with_data, *this); }

void Node::restore(int server, bool updated, Data numbers) {
  send(ranks_.servers.at(static_cast<size_t>(server)), {.kind = Kind::restore, .with_data = updated}, std::move(numbers));
}

std::string Node::reasons(const std::shared_ptr<Ticket>& ticket, milliseconds patience) {
  return client_->reasons(ticket, Clock::now() + patience, ranks_.workers, *this);
}

void Node::with_server(const std::function<void(Server*)>& visit) {
  const std::lock_guard lock(handling_);
  visit(server_.get());
}

SendResult Node::try_send(int rank, const Outgoing& message) {
  const std::array<comm::Mailbox::Bytes, 1> pieces{{{message.data.bytes, message.data.count}}};
  return mailbox_->send(rank, {message.fields.data(), std::ssize(message.fields)}, pieces, message.data.keep);
}

// A message of the carrier waits in a queue, where the peer is behind. Others wait here, so that pushes take no more memory than the
// mailbox has. Where a session has ended, the carrier is told, and fails what waits for the peer.
void Node::send(int rank, const Message& message, Data data) {
  Outgoing outgoing{pack(message), std::move(data)};
  auto& queue = outgoing_[static_cast<size_t>(rank)];
  if (is_carrier()) {
    if (rank == mailbox_->rank() && client_) {
      return client_->handle(server_of_[static_cast<size_t>(rank)],
                             {message, {outgoing.data.bytes, static_cast<size_t>(outgoing.data.count)}});
    }
    const std::lock_guard lock(sending_);
    if (!queue.empty() || try_send(rank, outgoing) == SendResult::full) queue.push_back(std::move(outgoing));
    return;
  }
  for (milliseconds pause(0);; pause = milliseconds(1)) {
    {
      const std::lock_guard lock(sending_);
      if (queue.empty() && try_send(rank, outgoing) != SendResult::full) return;
    }
    std::this_thread::sleep_for(pause);
    if (mailbox_->is_closed()) return;
  }
}

// Returns whether nothing is left to be sent.
bool Node::flush() {
  const std::lock_guard lock(sending_);
  bool is_empty = true;
  for (size_t rank = 0; rank < outgoing_.size(); ++rank) {
    auto& queue = outgoing_[rank];
    while (!queue.empty() && try_send(static_cast<int>(rank), queue.front()) != SendResult::full) queue.pop_front();
    is_empty &= queue.empty();
  }
  return is_empty;
}

void Node::close(milliseconds grace) {
  mailbox_->close(grace);
  gone_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (client_) client_->fail_all("the store is closed");
}

}  // namespace dltrain::ps
