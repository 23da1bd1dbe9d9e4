#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/transport/mailbox.h"
#include "ps/run/client.h"
#include "ps/run/server.h"

namespace dltrain::ps {

// What one rank is in a store: a server, a worker, or both, over one mailbox. A thread carries messages between the mailbox and them. What
// a rank sends to itself does not use the mailbox: the thread that sends it handles it.
//
// With a record to replay, the server handles the messages of the workers in the order of the record, and then as they come. Graces end
// where the record says, and not by the clock.
class Node final : public Sender {
 public:
  struct Ranks {
    std::vector<int> workers, servers;
  };

  Node(std::unique_ptr<comm::Mailbox> mailbox, Ranks ranks, std::unique_ptr<Server> server, std::unique_ptr<Client> client,
       std::vector<Handled> replayed = {});
  ~Node() override;

  // Asked now and then while a rank takes no message, with the seconds since it took the last one of the caller; true: the call fails.
  using GivesUp = std::function<bool(double)>;

  // From now on a thread handles the messages. Without it, poll() does.
  void start(GivesUp gives_up = {});
  // Handles the messages that are there, and ends the graces that are over. Returns whether there were any.
  bool poll();

  std::shared_ptr<Ticket> push(int64_t clock, std::span<const Client::Item> gradients, float factor, const std::vector<double>& rates,
                               bool skips, float weight = 1.0f);
  std::shared_ptr<Ticket> pull(int64_t clock, std::optional<int64_t> staleness, std::span<const Client::Item> into,
                               std::shared_ptr<const void> kept, bool applied = false);
  // Waits until all workers have called this; the ticket then has the states of the servers, if they are wanted.
  std::shared_ptr<Ticket> save(bool with_data);
  // Gives a server the numbers of a state. updated: some step has been made with them.
  void restore(int server, bool updated, Data numbers);
  // What a ticket waits for, in words.
  std::string reasons(const std::shared_ptr<Ticket>& ticket, std::chrono::milliseconds patience);

  // Tells the servers that this worker is done, and returns when this rank's server has no worker left, or false at the deadline.
  bool finish(Deadline deadline);

  // The ranks of the workers that are done or lost, if this rank serves, and of the servers that are lost, if it is a worker.
  std::vector<int> gone();

  // Calls visit while no message is handled. Null where this rank is no server.
  void with_server(const std::function<void(Server*)>& visit);
  // How much of the record that it replays is done.
  size_t replayed();
  // The memory of this rank's server and worker, without that of the mailbox.
  int64_t bytes();

  // Ends the sessions in good order.
  void close(std::chrono::milliseconds grace);

  bool send(int rank, const Message& message, Data data, Deadline deadline = Deadline::max()) override;
  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return mailbox_->allocate(bytes); }

 private:
  struct Outgoing {
    std::vector<std::byte> fields;
    Data data;
  };
  // What is for the server: a message, or the end of a session.
  struct Arrived {
    Handled described;
    bool has_no_order = false;  // it is not in a record
    int worker = -1;
    Unpacked message;
    std::shared_ptr<const void> memory;
    std::string why;
  };
  using Event = comm::Mailbox::Event;
  class Handling;

  void run();
  void handle(Event event);
  void take(int rank, Unpacked message, std::shared_ptr<const void> memory);
  void lose(int rank, const std::string& why);
  void reject(int rank, int worker, int server, const std::string& why);
  void serve_in_order();
  void serve(int worker, const std::function<void()>& event);
  bool runs_graces() const { return server_ && server_->has_grace() && replayed_.empty(); }
  bool end_graces();
  Deadline next_grace_end();
  void leave(int worker, const std::string& why);
  comm::Mailbox::SendResult try_send(int rank, const Outgoing& message);
  bool flush();
  void send_to_self(const Message& message, const Data& data);
  bool is_handling() const { return std::this_thread::get_id() == handling_thread_.load(); }

  const std::unique_ptr<comm::Mailbox> mailbox_;
  const Ranks ranks_;
  std::vector<int> worker_of_, server_of_;  // by rank, where this one is a server or a worker; -1 if it is none
  const std::unique_ptr<Server> server_;
  const std::unique_ptr<Client> client_;
  const std::vector<Handled> replayed_;
  GivesUp gives_up_;
  size_t next_replayed_ = 0;
  std::deque<Arrived> arrived_;  // and not yet handled, because the record has others before them
  std::mutex handling_;          // held while a message is handled
  std::vector<bool> is_gone_;    // by worker: it is done or lost; guarded by handling_
  std::condition_variable gone_;
  std::atomic<std::thread::id> handling_thread_;
  std::mutex sending_;                          // guards what follows
  std::vector<std::deque<Outgoing>> outgoing_;  // by rank: what its mailbox has not yet taken
  bool has_thread_ = false;
  std::mutex closing_;  // guards what follows
  std::thread thread_;
};

}  // namespace dltrain::ps
