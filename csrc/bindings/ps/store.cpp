// The node of a store as Python has it. It keeps the tensors alive whose memory the node uses.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pybind11/functional.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/comm/python_mailbox.h"
#include "bindings/execution_context.h"
#include "bindings/interrupt.h"
#include "bindings/module.h"
#include "ps/run/node.h"

namespace dltrain::bindings {

namespace {

using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

Deadline deadline_of(std::optional<double> seconds) {
  return seconds ? dltrain::Clock::now() + std::chrono::ceil<dltrain::Clock::duration>(std::chrono::duration<double>(*seconds))
                 : Deadline::max();
}

float* floats_of(const at::Tensor& tensor, const std::string& name, int64_t numel) {
  return static_cast<float*>(elements_of({tensor, name, true}, at::kCPU, numel).data);
}

std::vector<float*> all_floats_of(const Tensors& tensors, const std::string& name, int64_t numel) {
  std::vector<float*> all;
  for (const at::Tensor& tensor : tensors) all.push_back(floats_of(tensor, name, numel));
  return all;
}

struct ServerBlock {
  at::Tensor value;
  int group;
  Tensors states, counters;
  bool flag_at_first, flag, is_first;
};

struct ServerSettings {
  std::vector<ServerBlock> blocks;
  std::vector<ps::Rule> rules;  // by group
  int quorum;
  int64_t window;
  float delay_compensation;
  bool lockstep, records;
  double grace;  // in seconds; 0: none
};

struct ClientBlock {
  int key;        // of the caller's tensors
  int64_t first;  // element of the key's tensor
  int server;
  int64_t numel;
  std::optional<at::Tensor> residual, base;
};

std::unique_ptr<ps::Server> make_server(const ServerSettings& given, const std::vector<int>& workers, const Codec& push,
                                        const Codec& pull) {
  std::vector<ps::Server::Block> blocks;
  std::vector<std::vector<ps::Updater::Slot>> slots(given.rules.size());
  for (const ServerBlock& block : given.blocks) {
    const int64_t numel = block.value.numel();
    auto& own = slots.at(static_cast<size_t>(block.group));
    blocks.push_back({floats_of(block.value, "value", numel), numel, block.group, static_cast<int>(own.size())});
    own.push_back({blocks.back().value, numel, all_floats_of(block.states, "states", numel), all_floats_of(block.counters, "counters", 1),
                   block.flag_at_first, block.flag, block.is_first});
  }
  std::vector<std::unique_ptr<ps::Updater>> updaters;
  for (size_t group = 0; group < given.rules.size(); ++group) {
    updaters.push_back(ps::make_updater(given.rules[group], std::move(slots[group])));
  }
  const auto grace = std::chrono::ceil<dltrain::Clock::duration>(std::chrono::duration<double>(given.grace));
  ps::Server::Options options{workers,        given.quorum,  given.window, &push, &pull, given.delay_compensation,
                              given.lockstep, given.records, grace};
  return std::make_unique<ps::Server>(caller_context(at::kCPU), std::move(options), std::move(blocks), std::move(updaters));
}

std::unique_ptr<ps::Client> make_client(const std::vector<ClientBlock>& given, const std::vector<int>& servers, const Codec& push,
                                        const Codec& pull, bool together) {
  std::vector<ps::Client::Block> blocks;
  std::vector<int> count(servers.size());
  for (const ClientBlock& block : given) {
    const auto memory = [&](const std::optional<at::Tensor>& tensor, const char* name) {
      return tensor ? floats_of(*tensor, name, block.numel) : nullptr;
    };
    blocks.push_back({block.server, count.at(static_cast<size_t>(block.server))++, block.numel, memory(block.residual, "residual"),
                      memory(block.base, "base")});
  }
  return std::make_unique<ps::Client>(caller_context(at::kCPU), ps::Client::Options{servers, &push, &pull, together}, std::move(blocks));
}

class StoreTicket {
 public:
  StoreTicket(std::shared_ptr<ps::Ticket> ticket) : ticket(std::move(ticket)) {}

  bool wait(std::optional<double> timeout) const {
    bool done = false;
    {
      const Interruptible interruptible([this] { ticket->fail("the wait was interrupted"); });
      py::gil_scoped_release no_gil;
      try {
        done = ticket->wait(deadline_of(timeout));
      } catch (const std::runtime_error& error) {
        py::gil_scoped_acquire gil;
        Interruptible::check();
        C10_THROW_ERROR(DistBackendError, error.what());
      }
    }
    Interruptible::check();
    return done;
  }

  std::shared_ptr<ps::Ticket> ticket;
};

class StoreNode {
 public:
  StoreNode(PythonMailbox& mailbox, std::vector<int> workers, std::vector<int> servers, const std::string& push_codec,
            const std::string& pull_codec, std::optional<ServerSettings> server, std::optional<std::vector<ClientBlock>> client,
            bool together, std::vector<ps::Handled> replayed)
      : server_(std::move(server)), client_(std::move(client)) {
    const Codec &push = find_codec(push_codec), &pull = find_codec(pull_codec);
    std::unique_ptr<ps::Server> serving;
    std::unique_ptr<ps::Client> working;
    if (server_) serving = make_server(*server_, workers, push, pull);
    if (client_) {
      working = make_client(*client_, servers, push, pull, together);
      for (size_t i = 0; i < client_->size(); ++i) {
        const auto key = static_cast<size_t>((*client_)[i].key);
        if (by_key_.size() <= key) by_key_.resize(key + 1);
        by_key_[key].push_back(static_cast<int>(i));
      }
    }
    node_ = std::make_unique<ps::Node>(mailbox.take(), ps::Node::Ranks{std::move(workers), std::move(servers)}, std::move(serving),
                                       std::move(working), std::move(replayed));
  }
  ~StoreNode() {
    py::gil_scoped_release no_gil;
    getpid() == process_ ? node_.reset() : static_cast<void>(node_.release());
  }
  StoreNode(const StoreNode&) = delete;
  StoreNode& operator=(const StoreNode&) = delete;

  // A Python exception of `gives_up`, Ctrl-C among them, leaves a call half sent, and closes the store.
  void start(const std::optional<ps::Node::GivesUp>& gives_up) {
    if (!gives_up) return node_->start();
    node_->start([this, gives_up = *gives_up](double waited) {
      try {
        return gives_up(waited);
      } catch (const py::error_already_set&) {
        node_->close(milliseconds(0));
        throw;
      }
    });
  }
  bool poll() { return node_->poll(); }

  StoreTicket push(int64_t clock, const std::vector<int>& keys, const Tensors& gradients, float factor, const std::vector<double>& rates,
                   bool skips, float weight) {
    const auto items = items_of(keys, gradients, "values", false);
    py::gil_scoped_release no_gil;
    return {at_work([&] { return node_->push(clock, items, factor, rates, skips, weight); })};
  }

  StoreTicket pull(int64_t clock, std::optional<int64_t> staleness, const std::vector<int>& keys, Tensors into, bool applied) {
    const auto items = items_of(keys, into, "into", true);
    const auto kept = std::make_shared<Tensors>(std::move(into));
    py::gil_scoped_release no_gil;
    return {at_work([&] { return node_->pull(clock, staleness, items, kept, applied); })};
  }

  StoreTicket save(bool with_data) {
    py::gil_scoped_release no_gil;
    return {at_work([&] { return node_->save(with_data); })};
  }

  void restore(int server, bool updated, const at::Tensor& numbers) {
    const auto kept = std::make_shared<at::Tensor>(numbers);
    const auto* bytes = reinterpret_cast<const std::byte*>(elements_of({numbers, "numbers"}, at::kCPU, numbers.numel()).data);
    py::gil_scoped_release no_gil;
    node_->restore(server, updated, {bytes, static_cast<int64_t>(numbers.nbytes()), kept});
  }

  std::string reasons(const StoreTicket& ticket, double patience) {
    py::gil_scoped_release no_gil;
    return node_->reasons(ticket.ticket, milliseconds(static_cast<int64_t>(1000 * patience)));
  }

  std::vector<ps::Handled> record() {
    std::vector<ps::Handled> record;
    py::gil_scoped_release no_gil;
    node_->with_server([&](const ps::Server* server) {
      if (server) record = server->record();
    });
    return record;
  }

  size_t replayed() {
    py::gil_scoped_release no_gil;
    return node_->replayed();
  }

  std::vector<int64_t> applied() {
    std::vector<int64_t> applied;
    py::gil_scoped_release no_gil;
    node_->with_server([&](const ps::Server* server) {
      if (server) applied = server->applied();
    });
    return applied;
  }

  // The versions and the numbers of this rank's server.
  std::tuple<std::vector<int64_t>, at::Tensor> state() {
    std::vector<int64_t> versions;
    at::Tensor numbers;
    py::gil_scoped_release no_gil;
    node_->with_server([&](ps::Server* server) {
      if (!server) return;
      versions = server->versions();
      numbers = at::empty({server->state_numel()}, at::kFloat);
      server->copy_state(numbers.mutable_data_ptr<float>());
    });
    return {std::move(versions), std::move(numbers)};
  }

  std::vector<int> gone() {
    py::gil_scoped_release no_gil;
    return node_->gone();
  }

  int64_t bytes() {
    py::gil_scoped_release no_gil;
    return node_->bytes();
  }

  // Whether this rank's server has no worker left in time. Ctrl-C ends the wait.
  bool finish(std::optional<double> timeout) {
    bool done = false;
    {
      const Interruptible interruptible([this] { node_->close(milliseconds(0)); });
      py::gil_scoped_release no_gil;
      done = node_->finish(deadline_of(timeout));
    }
    Interruptible::check();
    return done;
  }

  void close(double grace) {
    py::gil_scoped_release no_gil;
    node_->close(milliseconds(static_cast<int64_t>(1000 * grace)));
  }

 private:
  std::vector<ps::Client::Item> items_of(const std::vector<int>& keys, const Tensors& tensors, const char* name, bool written) const {
    TORCH_CHECK_VALUE(client_, name, ": expected none, because this rank only serves");
    std::vector<ps::Client::Item> items;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (tensors[i].numel() == 0) continue;
      const std::vector<int>& blocks = by_key_.at(static_cast<size_t>(keys[i]));
      const ClientBlock& last = (*client_)[static_cast<size_t>(blocks.back())];
      const TypedPointer elements = elements_of({tensors[i], name, written}, at::kCPU, last.first + last.numel);
      for (const int block : blocks) items.push_back({block, elements.from((*client_)[static_cast<size_t>(block)].first)});
    }
    return items;
  }

  template <class Call>
  static std::shared_ptr<ps::Ticket> at_work(Call&& call) {
    try {
      return call();
    } catch (const std::invalid_argument&) {
      throw;
    } catch (const std::runtime_error& error) {
      C10_THROW_ERROR(DistBackendError, error.what());
    }
  }

  std::optional<ServerSettings> server_;  // whose tensors the node uses
  std::optional<std::vector<ClientBlock>> client_;
  std::vector<std::vector<int>> by_key_;  // the blocks of each key
  std::unique_ptr<ps::Node> node_;
  const pid_t process_ = getpid();
};

}  // namespace

void bind_store(py::module_& module) {
  py::class_<ServerBlock>(module, "ServerBlock")
      .def(py::init([](at::Tensor value, int group, Tensors states, Tensors counters, bool flag_at_first, bool flag, bool is_first) {
             return ServerBlock{std::move(value), group, std::move(states), std::move(counters), flag_at_first, flag, is_first};
           }),
           py::kw_only(), py::arg("value"), py::arg("group"), py::arg("states"), py::arg("counters"), py::arg("flag_at_first"),
           py::arg("flag"), py::arg("is_first"));
  py::class_<ps::Rule>(module, "ServerRule")
      .def(py::init([](std::string name, std::map<std::string, double> hyper, std::vector<std::string> states, bool maximize) {
             return ps::Rule{std::move(name), std::move(hyper), std::move(states), maximize};
           }),
           py::kw_only(), py::arg("name"), py::arg("hyper"), py::arg("states"), py::arg("maximize"));
  py::class_<ServerSettings>(module, "ServerSettings")
      .def(py::init([](std::vector<ServerBlock> blocks, std::vector<ps::Rule> rules, int quorum, int64_t window, float delay_compensation,
                       bool lockstep, bool records, double grace) {
             return ServerSettings{std::move(blocks), std::move(rules), quorum, window, delay_compensation, lockstep, records, grace};
           }),
           py::kw_only(), py::arg("blocks"), py::arg("rules"), py::arg("quorum"), py::arg("window"), py::arg("delay_compensation"),
           py::arg("lockstep"), py::arg("records"), py::arg("grace"));
  py::class_<ClientBlock>(module, "ClientBlock")
      .def(py::init(
               [](int key, int64_t first, int server, int64_t numel, std::optional<at::Tensor> residual, std::optional<at::Tensor> base) {
                 return ClientBlock{key, first, server, numel, std::move(residual), std::move(base)};
               }),
           py::kw_only(), py::arg("key"), py::arg("first"), py::arg("server"), py::arg("numel"), py::arg("residual") = py::none(),
           py::arg("base") = py::none());
  py::class_<ps::Handled>(module, "Handled")
      .def(py::init([](int what, int worker, int64_t clock, int first_block) {
             return ps::Handled{static_cast<ps::Handled::What>(what), worker, clock, first_block};
           }),
           py::arg("what"), py::arg("worker"), py::arg("clock"), py::arg("first_block"))
      .def_property_readonly("what", [](const ps::Handled& self) { return static_cast<int>(self.what); })
      .def_readonly("worker", &ps::Handled::worker)
      .def_readonly("clock", &ps::Handled::clock)
      .def_readonly("first_block", &ps::Handled::first_block);
  py::class_<StoreTicket>(module, "StoreTicket")
      .def("wait", &StoreTicket::wait, py::arg("timeout") = py::none())
      .def("is_done", [](const StoreTicket& self) { return self.ticket->is_done(); })
      .def("versions",
           [](const StoreTicket& self) {
             const ps::Ticket::Versions versions = self.ticket->versions();
             return std::make_tuple(versions.lowest, versions.highest, versions.skipped);
           })
      .def("states", [](const StoreTicket& self) {
        std::vector<std::tuple<int, std::vector<int64_t>, at::Tensor>> states;
        for (const ps::Ticket::State& state : self.ticket->states()) {
          const auto numel = static_cast<int64_t>(state.numbers.size() / sizeof(float));
          at::Tensor numbers = at::empty({numel}, at::kFloat);
          std::copy_n(reinterpret_cast<const float*>(state.numbers.data()), numel, numbers.mutable_data_ptr<float>());
          states.emplace_back(state.server, state.versions, std::move(numbers));
        }
        return states;
      });
  py::class_<StoreNode>(module, "StoreNode")
      .def(py::init<PythonMailbox&, std::vector<int>, std::vector<int>, const std::string&, const std::string&,
                    std::optional<ServerSettings>, std::optional<std::vector<ClientBlock>>, bool, std::vector<ps::Handled>>(),
           py::arg("mailbox"), py::kw_only(), py::arg("workers"), py::arg("servers"), py::arg("push_codec"), py::arg("pull_codec"),
           py::arg("server"), py::arg("client"), py::arg("together"), py::arg("replayed"))
      .def("start", &StoreNode::start, py::arg("gives_up") = py::none())
      .def("poll", &StoreNode::poll, py::call_guard<py::gil_scoped_release>())
      .def("push", &StoreNode::push, py::arg("clock"), py::arg("keys"), py::arg("values"), py::kw_only(), py::arg("factor"),
           py::arg("rates"), py::arg("skips") = false, py::arg("weight") = 1.0f)
      .def("pull", &StoreNode::pull, py::arg("clock"), py::arg("staleness"), py::arg("keys"), py::arg("into"), py::kw_only(),
           py::arg("applied") = false)
      .def("save", &StoreNode::save, py::arg("with_data"))
      .def("restore", &StoreNode::restore, py::arg("server"), py::arg("updated"), py::arg("numbers"))
      .def("reasons", &StoreNode::reasons, py::arg("ticket"), py::arg("patience"))
      .def("record", &StoreNode::record)
      .def("replayed", &StoreNode::replayed)
      .def("applied", &StoreNode::applied)
      .def("state", &StoreNode::state)
      .def("gone", &StoreNode::gone)
      .def("bytes", &StoreNode::bytes)
      .def("finish", &StoreNode::finish, py::arg("timeout") = py::none())
      .def("close", &StoreNode::close, py::arg("grace") = 1.0);
}

}  // namespace dltrain::bindings
