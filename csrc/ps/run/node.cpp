#include "ps/run/node.h"

#include <algorithm>
#include <array>
#include <exception>
#include <stdexcept>
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
  const std::lock_guard closing(closing_);
  {
    const std::lock_guard lock(sending_);
    has_thread_ = true;
  }
  thread_ = std::thread([this] { run(); });
}

void Node::run() {
  carrier_ = std::this_thread::get_id();
  while (!mailbox_->is_closed()) {
    const bool is_flushed = flush();
    auto event = mailbox_->receive(is_flushed ? Deadline::max() : Clock::now() + milliseconds(1));
    if (event) handle(std::move(*event));
  }
  carrier_ = std::thread::id();  // a later thread may have the same
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
  const std::lock_guard lock(handling_);
  if (event.kind != Event::Kind::message) {
    const std::string why = event.kind == Event::Kind::closed ? "it has closed its store" : event.reason;
    if (client_ && server >= 0) client_->lose(server, why);
    if (server_ && worker >= 0) leave(worker, why);
    return;
  }
  bool for_server = server_ && worker >= 0, for_worker = client_ && server >= 0;  // as far as one knows
  try {
    Unpacked message = unpack({event.data.get(), static_cast<size_t>(event.bytes)});
    const Message& given = message.message;
    const bool is_done = given.kind == Kind::done;
    const bool has_order = given.kind == Kind::push || given.kind == Kind::pull;
    const bool is_asked = is_done || has_order || given.kind == Kind::question || given.kind == Kind::save || given.kind == Kind::restore;
    check(is_asked ? for_server : for_worker, "message: expected none for a ", is_asked ? "server" : "worker", " from rank ", rank);
    (is_asked ? for_worker : for_server) = false;
    if (!is_asked) return client_->handle(server, message);
    if (is_done) return leave(worker, "it has closed its store");
    const Handled described{given.kind == Kind::push ? Handled::What::push : Handled::What::pull, worker, given.clock,
                            given.blocks.empty() ? -1 : given.blocks.front()};
    arrived_.push_back({described, !has_order, worker, std::move(message), std::move(event.data), {}});
  } catch (const std::exception& error) {
    if (for_server) refuse(worker, error.what());
    if (for_worker) client_->lose(server, text("what it sent could not be handled: ", error.what()));
    return;
  }
  serve_in_order();
}

// The worker learns that the server has not taken what it sent.
void Node::refuse(int worker, const std::string& why) {
  const int rank = ranks_.workers[static_cast<size_t>(worker)];
  send(rank, {.kind = Kind::failed, .id = -1, .text = text("what rank ", rank, " sent could not be handled: ", why)}, {});
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
    try {
      if (taken.described.what == Handled::What::leave) {
        server_->leave(taken.worker, taken.why, *this);
      } else {
        server_->handle(taken.worker, std::move(taken.message), taken.memory, *this);
      }
    } catch (const std::invalid_argument& error) {
      refuse(taken.worker, error.what());
    } catch (const std::exception& error) {  // of the server itself
      for (int worker = 0; worker < std::ssize(ranks_.workers); ++worker) refuse(worker, error.what());
    }
  }
}

void Node::leave(int worker, const std::string& why) {
  if (is_gone_[static_cast<size_t>(worker)]) return;
  is_gone_[static_cast<size_t>(worker)] = true;
  gone_.notify_all();
  arrived_.push_back({{Handled::What::leave, worker, 0, -1}, false, worker, {}, {}, why});
  serve_in_order();
}

bool Node::finish(Deadline deadline) {
  bool are_told = true;
  if (client_) {
    for (const int rank : ranks_.servers) are_told &= send(rank, {.kind = Kind::done}, {}, deadline);
  }
  std::unique_lock lock(handling_);
  const auto all_are_gone = [&] {
    return !server_ || mailbox_->is_closed() || std::find(is_gone_.begin(), is_gone_.end(), false) == is_gone_.end();
  };
  if (deadline == Deadline::max()) {
    gone_.wait(lock, all_are_gone);
  } else if (!gone_.wait_until(lock, deadline, all_are_gone)) {
    return false;
  }
  return are_told;
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

// Where the peer is behind, a message of the carrier waits in a queue, and so does one of a node that only poll() carries. Other threads wait
// here, so that pushes take no more memory than the mailbox has. Where a session has ended, the carrier is told, and fails what waits for
// the peer.
bool Node::send(int rank, const Message& message, Data data, Deadline deadline) {
  Outgoing outgoing{pack(message), std::move(data)};
  auto& queue = outgoing_[static_cast<size_t>(rank)];
  const bool carries = is_carrier();
  if (carries && rank == mailbox_->rank() && client_) {
    client_->handle(server_of_[static_cast<size_t>(rank)], {message, {outgoing.data.bytes, static_cast<size_t>(outgoing.data.count)}});
    return true;
  }
  for (milliseconds pause(0);; pause = milliseconds(1)) {
    {
      const std::lock_guard lock(sending_);
      if (queue.empty() && try_send(rank, outgoing) != SendResult::full) return true;
      if (carries || !has_thread_) {
        queue.push_back(std::move(outgoing));
        return true;
      }
    }
    if (mailbox_->is_closed()) return true;
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
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
  {
    const std::lock_guard lock(handling_);  // a call of finish() has seen that the mailbox is closed, or it waits and is woken
    gone_.notify_all();
  }
  {
    const std::lock_guard closing(closing_);
    if (thread_.joinable()) thread_.join();
  }
  if (client_) client_->fail_all("the store is closed");
}

}  // namespace dltrain::ps
