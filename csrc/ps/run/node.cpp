#include "ps/run/node.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <stdexcept>
#include <utility>

#include "core/check.h"

namespace dltrain::ps {

using SendResult = comm::Mailbox::SendResult;
using std::chrono::milliseconds;

namespace {

constexpr int none = -1;                     // it is no worker, or no server
constexpr milliseconds retry(1), look(200);  // between two attempts, and between two questions whether to go on

// In lockstep the order of pulls makes no difference, and a worker may pull what it then pushes.
std::vector<Handled> ordered(std::vector<Handled> record, const Server* server) {
  const auto is_pull = [](const Handled& each) { return each.what == Handled::What::pull || each.what == Handled::What::applied_pull; };
  if (server && server->is_lockstep()) std::erase_if(record, is_pull);
  return record;
}

}  // namespace

Node::Node(std::unique_ptr<comm::Mailbox> mailbox, Ranks ranks, std::unique_ptr<Server> server, std::unique_ptr<Client> client,
           std::vector<Handled> replayed)
    : mailbox_(std::move(mailbox)),
      ranks_(std::move(ranks)),
      worker_of_(static_cast<size_t>(mailbox_->world_size()), none),
      server_of_(static_cast<size_t>(mailbox_->world_size()), none),
      server_(std::move(server)),
      client_(std::move(client)),
      replayed_(ordered(std::move(replayed), server_.get())),
      is_gone_(ranks_.workers.size()),
      outgoing_(static_cast<size_t>(mailbox_->world_size())) {
  const auto number = [](const std::vector<int>& ranks, std::vector<int>& numbers) {
    for (size_t i = 0; i < ranks.size(); ++i) numbers[static_cast<size_t>(ranks[i])] = static_cast<int>(i);
  };
  if (server_) number(ranks_.workers, worker_of_);
  if (client_) number(ranks_.servers, server_of_);
}

Node::~Node() { close(milliseconds(0)); }

void Node::start(GivesUp gives_up) {
  const std::lock_guard closing(closing_);
  gives_up_ = std::move(gives_up);
  {
    const std::lock_guard lock(sending_);
    has_thread_ = true;
  }
  thread_ = std::thread([this] { run(); });
}

// The lock on handling_, of a thread that must not wait for the peers meanwhile.
class Node::Handling {
 public:
  explicit Handling(Node& node) : lock_(node.handling_), thread_(node.handling_thread_) { thread_ = std::this_thread::get_id(); }
  ~Handling() { thread_ = std::thread::id(); }
  Handling(const Handling&) = delete;
  Handling& operator=(const Handling&) = delete;

 private:
  const std::lock_guard<std::mutex> lock_;
  std::atomic<std::thread::id>& thread_;
};

void Node::run() {
  while (!mailbox_->is_closed()) {
    end_graces();
    Deadline deadline = flush() ? Deadline::max() : Clock::now() + retry;
    if (runs_graces()) {
      const Handling handling(*this);
      deadline = std::min(deadline, next_grace_end());
    }
    auto event = mailbox_->receive(deadline);
    if (event) handle(std::move(*event));
  }
}

bool Node::poll() {
  bool found = end_graces();
  flush();
  for (; auto event = mailbox_->receive(Clock::now()); found = true) handle(std::move(*event));
  return found;
}

void Node::handle(Event event) {
  if (event.from == mailbox_->rank()) return;  // send_to_self() wakes this thread
  const Handling handling(*this);
  if (event.kind != Event::Kind::message) {
    return lose(event.from, event.kind == Event::Kind::closed ? "it has closed its store" : event.reason);
  }
  Unpacked message;
  try {
    message = unpack({event.data.get(), static_cast<size_t>(event.bytes)});
  } catch (const std::exception& error) {
    return reject(event.from, worker_of_[static_cast<size_t>(event.from)], server_of_[static_cast<size_t>(event.from)], error.what());
  }
  take(event.from, std::move(message), std::move(event.data));
}

void Node::lose(int rank, const std::string& why) {
  if (const int server = server_of_[static_cast<size_t>(rank)]; server >= 0) client_->lose(server, why);
  if (const int worker = worker_of_[static_cast<size_t>(rank)]; worker >= 0) leave(worker, why);
}

void Node::take(int rank, Unpacked message, std::shared_ptr<const void> memory) {
  const Message& given = message.message;
  const bool for_server = is_for_server(given.kind);
  const int worker = worker_of_[static_cast<size_t>(rank)], server = server_of_[static_cast<size_t>(rank)];
  if ((for_server ? worker : server) < 0) {
    return reject(rank, worker, server, for_server ? "message: expected none for a server" : "message: expected none for a worker");
  }
  try {
    if (!for_server) return client_->handle(server, message);
    if (given.kind == Kind::done) return leave(worker, "it has closed its store");
    const bool has_order = given.kind == Kind::push || (given.kind == Kind::pull && !server_->is_lockstep());
    arrived_.push_back({described(given, worker), !has_order, worker, std::move(message), std::move(memory), {}});
  } catch (const std::exception& error) {
    return reject(rank, for_server ? worker : none, for_server ? none : server, error.what());
  }
  serve_in_order();
}

// What a rank has sent as this worker or server, or as any that is not none, is of no use.
void Node::reject(int rank, int worker, int server, const std::string& why) {
  const std::string rejected = text("what rank ", rank, " sent could not be handled: ", why);
  if (worker >= 0) send(rank, {.kind = Kind::failed, .id = Message::no_id, .text = rejected}, {});
  if (server >= 0) client_->lose(server, rejected);
}

// Handles what has come, as far as the record allows it.
void Node::serve_in_order() {
  const auto may_be_next = [&](const Arrived& each) {
    return each.has_no_order || next_replayed_ >= replayed_.size() || each.described == replayed_[next_replayed_];
  };
  for (;;) {
    for (; next_replayed_ < replayed_.size() && replayed_[next_replayed_].what == Handled::What::grace; ++next_replayed_) {
      const Handled& grace = replayed_[next_replayed_];
      serve(none, [&] { server_->end_grace(grace.first_block, grace.clock, *this); });
    }
    const auto next = std::find_if(arrived_.begin(), arrived_.end(), may_be_next);
    if (next == arrived_.end()) return;
    Arrived taken = std::move(*next);
    arrived_.erase(next);
    if (!taken.has_no_order && next_replayed_ < replayed_.size()) ++next_replayed_;
    serve(taken.worker, [&] {
      if (taken.described.what == Handled::What::leave) {
        server_->leave(taken.worker, taken.why, *this);
      } else {
        server_->handle(taken.worker, taken.message, taken.memory, *this);
      }
    });
  }
}

// worker: whose message the event is, or none.
void Node::serve(int worker, const std::function<void()>& event) {
  const auto reject_all = [&](const std::exception& error) {
    for (const int rank : ranks_.workers) reject(rank, worker_of_[static_cast<size_t>(rank)], none, error.what());
  };
  try {
    event();
  } catch (const std::invalid_argument& error) {
    if (worker == none) return reject_all(error);
    reject(ranks_.workers[static_cast<size_t>(worker)], worker, none, error.what());
  } catch (const std::exception& error) {  // of the server itself
    reject_all(error);
  }
}

// When the next one ends; while no message is handled.
Deadline Node::next_grace_end() { return runs_graces() ? server_->next_grace_end() : Deadline::max(); }

// Returns whether there were any that are over.
bool Node::end_graces() {
  if (!runs_graces()) return false;
  const Handling handling(*this);
  bool found = false;
  serve(none, [&] { found = server_->end_graces(Clock::now(), *this); });
  return found;
}

void Node::leave(int worker, const std::string& why) {
  if (is_gone_[static_cast<size_t>(worker)]) return;
  is_gone_[static_cast<size_t>(worker)] = true;
  gone_.notify_all();
  Arrived& its = arrived_.emplace_back();
  its.described = {Handled::What::leave, worker, 0, -1};
  its.worker = worker;
  its.why = why;
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

std::vector<int> Node::gone() {
  std::vector<int> gone;
  if (client_) gone = client_->lost();
  const std::lock_guard lock(handling_);
  for (size_t worker = 0; worker < is_gone_.size(); ++worker) {
    if (is_gone_[worker]) gone.push_back(ranks_.workers[worker]);
  }
  return gone;
}

std::shared_ptr<Ticket> Node::push(int64_t clock, std::span<const Client::Item> gradients, float factor, const std::vector<double>& rates,
                                   bool skips, float weight) {
  return client_->push(clock, gradients, factor, rates, skips, weight, *this);
}

std::shared_ptr<Ticket> Node::pull(int64_t clock, std::optional<int64_t> staleness, std::span<const Client::Item> into,
                                   std::shared_ptr<const void> kept, bool applied) {
  return client_->pull(clock, staleness, into, std::move(kept), applied, *this);
}

std::shared_ptr<Ticket> Node::save(bool with_data) { return client_->save(with_data, *this); }

void Node::restore(int server, bool updated, Data numbers) {
  send(ranks_.servers.at(static_cast<size_t>(server)), {.kind = Kind::restore, .with_data = updated}, std::move(numbers));
}

std::string Node::reasons(const std::shared_ptr<Ticket>& ticket, milliseconds patience) {
  return client_->reasons(ticket, Clock::now() + patience, *this);
}

void Node::with_server(const std::function<void(Server*)>& visit) {
  const std::lock_guard lock(handling_);
  visit(server_.get());
}

size_t Node::replayed() {
  const std::lock_guard lock(handling_);
  return next_replayed_;
}

int64_t Node::bytes() {
  const std::lock_guard lock(handling_);
  return (server_ ? server_->bytes() : 0) + (client_ ? client_->bytes() : 0);
}

SendResult Node::try_send(int rank, const Outgoing& message) {
  const std::array<comm::Mailbox::Bytes, 1> pieces{{{message.data.bytes, message.data.count}}};
  return mailbox_->send(rank, {message.fields.data(), std::ssize(message.fields)}, pieces, message.data.keep);
}

// Where a peer is behind, a message waits in a queue if its thread handles messages, or if only poll() does. Other threads wait here, so
// that pushes take no more memory than the mailbox has. Where a session has ended, its event fails what waits for the peer.
bool Node::send(int rank, const Message& message, Data data, Deadline deadline) {
  if (rank == mailbox_->rank()) {
    send_to_self(message, data);
    return true;
  }
  Outgoing outgoing{pack(message), std::move(data)};
  auto& queue = outgoing_[static_cast<size_t>(rank)];
  const auto began = Clock::now();
  auto looks = began + look;
  for (milliseconds pause(0);; pause = retry) {
    {
      const std::lock_guard lock(sending_);
      if (queue.empty() && try_send(rank, outgoing) != SendResult::full) return true;
      if (is_handling() || !has_thread_) {
        queue.push_back(std::move(outgoing));
        return true;
      }
    }
    if (mailbox_->is_closed()) return true;
    const auto now = Clock::now();
    if (now >= deadline) return false;
    if (deadline == Deadline::max() && gives_up_ && now >= looks) {
      const double waited = std::round(10 * std::chrono::duration<double>(now - began).count()) / 10;
      if (gives_up_(waited)) throw std::runtime_error(text("the server of rank ", rank, " has taken no message for ", waited, " s"));
      looks = Clock::now() + look;
    }
    std::this_thread::sleep_for(pause);
  }
}

// This thread handles it, rather than one that has to be woken.
void Node::send_to_self(const Message& message, const Data& data) {
  if (mailbox_->is_closed()) return;
  const auto take_it = [&] { take(mailbox_->rank(), {message, {data.bytes, static_cast<size_t>(data.count)}}, data.keep); };
  if (is_handling()) return take_it();
  bool wakes = false;
  {
    const Handling handling(*this);
    const Deadline before = next_grace_end();
    take_it();
    wakes = next_grace_end() < before;  // so that the node's thread waits no longer than until then
  }
  wakes |= !flush();  // so that it tries again
  if (wakes) mailbox_->send(mailbox_->rank(), {});
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
