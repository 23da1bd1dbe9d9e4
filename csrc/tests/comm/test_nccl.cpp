#include <cstring>
#include <latch>
#include <thread>
#include <type_traits>

#include "core/dtype.h"
#include "tests/comm/nccl_ranks.h"

namespace dltrain::comm::nccl {
namespace {

using std::chrono::milliseconds;

class NcclLibrary : public testing::Test {
 protected:
  void SetUp() override { fake().reset(); }
};

std::string loading(const std::string& path) {
  return error_of<std::runtime_error>([&] { const Library library(path); });
}

TEST_F(NcclLibrary, NamesALibraryThatCannotBeLoaded) {
  expect_in("NCCL cannot be loaded: libno_such_thing.so.2: ", loading("libno_such_thing.so.2"));
}

TEST_F(NcclLibrary, NamesAFunctionThatIsMissing) {
  expect_in(text("NCCL (", DLT_NOT_NCCL, ") has no ncclGetErrorString: expected version 2.14 or later"), loading(DLT_NOT_NCCL));
}

TEST_F(NcclLibrary, RefusesOldVersions) {
  fake().set_version(21304);
  expect_in("expected version 2.14 or later, got 2.13.4", loading(DLT_FAKE_NCCL));
  fake().set_version(21400);
  EXPECT_EQ(loading(DLT_FAKE_NCCL), "no error");
}

TEST_F(NcclLibrary, SaysWhyThereIsNoVersion) {
  fake().fail("ncclGetVersion", -1, 1, 2);
  expect_in("ncclGetVersion: unhandled system error (as the test wishes)", loading(DLT_FAKE_NCCL));
}

TEST_F(NcclLibrary, HasAVersion) {
  fake().set_version(23105);
  const Library library(DLT_FAKE_NCCL);
  EXPECT_EQ(library.version(), 23105);
  EXPECT_EQ(library.version_text(), "2.31.5");
}

TEST_F(NcclLibrary, IsTheOneThatIsAlreadyLoaded) {
  EXPECT_EQ(Library("libfake_nccl.so")->get_version, fake_library()->get_version);  // it is in none of the folders that are searched
}

class NcclTransportOn : public OverNccl {
 protected:
  std::unique_ptr<Transport> alone(milliseconds timeout = generous) const {
    return std::make_unique<Transport>(fake_library(), make_unique_id(fake_library()), 0, 1, context().device, timeout);
  }
  std::string error_of_init(milliseconds timeout = generous) const {
    return error_of<TransportError>([&] { alone(timeout); });
  }
};
DLT_ON_EVERY_CONTEXT(NcclTransportOn);

void send_to_self(Transport& transport, const ExecutionContext& context) {
  const Array<float> from(context, {1.0f, 2.0f}), to(context, {0.0f, 0.0f});
  transport.exchange(context, {{true, 0, from.data(), 8}, {false, 0, to.data(), 8}})->wait(Deadline::max());
  EXPECT_EQ(to.values(), from.values());
}

// With a nonblocking communicator NCCL would launch each group in a new thread.
TEST_P(NcclTransportOn, UsesABlockingCommunicator) {
  alone();
  EXPECT_EQ(calls("rank 0: ncclCommInitRankConfig ranks 1 size 24 blocking 1"), 1);
  EXPECT_EQ(calls("rank 0: ncclCommAbort"), 1);
}

TEST_P(NcclTransportOn, IsFinalizedAndDestroyedOnce) {
  const auto transport = alone();
  const OwnContext own(context());
  send_to_self(*transport, own.context());
  transport->close();
  transport->abort();
  EXPECT_EQ(calls("rank 0: ncclCommFinalize"), 1);
  EXPECT_EQ(calls("rank 0: ncclCommDestroy"), 1);
  EXPECT_EQ(calls("rank 0: ncclCommAbort"), 0);
  EXPECT_EQ(error_of<TransportError>([&] { send_to_self(*transport, own.context()); }), "the connections were closed");
}

// A send is complete when its bytes are buffered, as over a network. An abort of the sender would then lose them.
TEST_P(NcclTransportOn, SentMessagesArriveAfterTheSenderHasClosed) {
  fake().buffer_sends();
  std::latch closing(1);
  on_transports(context(), 2, [&](const std::unique_ptr<Transport>& transport, const ExecutionContext& context) {
    const Array<int> numbers(context, transport->rank() == 0 ? std::vector{5, 7} : std::vector{0, 0});
    transport->exchange(context, {{transport->rank() == 0, 1 - transport->rank(), numbers.data(), 4}})->wait(Deadline::max());
    if (transport->rank() == 0) {
      transport->send(context, 1, numbers.data(), 8)->wait(Deadline::max());
      numbers.values();  // the send is complete
      closing.count_down();
      return transport->close();
    }
    closing.wait();
    while (calls("rank 0: ncclCommFinalize") + calls("rank 0: ncclCommAbort") == 0) std::this_thread::yield();
    transport->recv(context, 0, numbers.data(), 8)->wait(Deadline::max());
    EXPECT_EQ(numbers.values(), (std::vector{5, 7}));
    transport->close();
  });
  for (int rank : {0, 1}) EXPECT_EQ(calls(text("rank ", rank, ": ncclCommDestroy")), 1);
}

TEST_P(NcclTransportOn, IsNotDestroyedWhileASentMessageIsNotReceived) {
  fake().buffer_sends();
  std::latch connected(2);
  on_transports(context(), 2, [&](const std::unique_ptr<Transport>& transport, const ExecutionContext& context) {
    const Array<int> numbers(context, {5, 7});
    const bool sends = transport->rank() == 0;
    transport->exchange(context, {{sends, 1 - transport->rank(), numbers.data(), 4}})->wait(Deadline::max());
    numbers.values();
    connected.arrive_and_wait();
    if (sends) transport->send(context, 1, numbers.data(), 4)->wait(Deadline::max());
    const auto start = Clock::now();
    transport->close();
    EXPECT_LT(Clock::now() - start, generous);
  });
  EXPECT_EQ(calls("rank 1: ncclCommDestroy"), 1);
  EXPECT_EQ(fake().open(), 1);
  fake().reset();  // ends the waits
  while (fake().open() > 0) std::this_thread::yield();
}

// NCCL blocks the end of a communicator until its last captured graph is destroyed, which a script may delay until its own exit.
TEST_P(NcclTransportOn, ALivingGraphDoesNotBlockTheEnd) {
  for (const bool in_good_order : {true, false}) {
    const auto transport = alone(milliseconds(3000));
    fake().let_a_graph_live(true);
    const auto start = Clock::now();
    in_good_order ? transport->close() : transport->abort();
    EXPECT_EQ(transport->error(), "");
    EXPECT_LT(Clock::now() - start, generous);
    EXPECT_EQ(fake().open(), 1);
    fake().let_a_graph_live(false);
    while (fake().open() > 0) std::this_thread::yield();
  }
}

TEST_P(NcclTransportOn, IsAbortedWhenItIsInitialisedTooLate) {
  fake().hold_back(0);
  EXPECT_EQ(error_of_init(milliseconds(50)), "ncclCommInitRankConfig: not done in 0.05 s");
  EXPECT_EQ(calls("rank 0: ncclCommAbort"), 0);  // it would interrupt NCCL's initialization
  fake().let_go();
  while (fake().open() > 0) std::this_thread::yield();
  EXPECT_EQ(calls("rank 0: ncclCommAbort"), 1);
}

TEST_P(NcclTransportOn, SaysWhyItIsNotInitialised) {
  fake().fail("ncclCommInitRankConfig", 0, 1, 2);
  EXPECT_EQ(error_of_init(), "NCCL 2.28.9: ncclCommInitRankConfig: unhandled system error (as the test wishes)");
  fake().fail("ncclGetUniqueId", -1, 1, 2);
  EXPECT_EQ(error_of_init(), "NCCL 2.28.9: ncclGetUniqueId: unhandled system error (as the test wishes)");
  EXPECT_EQ(calls("rank 0: ncclCommAbort"), 0);  // there is no communicator to abort
}

TEST_P(NcclTransportOn, FailsIfThereIsAnErrorWhileItIsInitialised) {
  fake().hold_back(0);
  std::thread other([] {
    while (fake().set_error(0, remote_error) == 0) std::this_thread::yield();
  });
  expect_in("ncclCommInitRankConfig: remote process exited", error_of_init());
  other.join();
  EXPECT_EQ(calls("rank 0: ncclCommAbort"), 0);  // NCCL has already destroyed it
}

TEST_P(NcclTransportOn, NamesAFailedFunctionAndEndsItsGroup) {
  for (const std::string function : {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"}) {
    const auto transport = alone();
    const OwnContext own(context());
    send_to_self(*transport, own.context());
    fake().reset();
    fake().fail(function.c_str(), -1, 1, 1);
    const std::string error = error_of<TransportError>([&] { send_to_self(*transport, own.context()); });
    EXPECT_EQ(error, "NCCL 2.28.9: " + function + ": unhandled cuda error (as the test wishes)");
    EXPECT_EQ(calls("rank 0: ncclGroupEnd"), function == "ncclGroupStart" ? 0 : 1);
    send_to_self(*transport, own.context());
  }
}

// The wait for the first message between two ranks is ended only by the peer, or by ending the communicator.
void end_while_it_waits_for_a_peer(const ExecutionContext& context, void (Transport::*end)()) {
  std::latch over(1);
  on_transports(context, 2, [&](const std::unique_ptr<Transport>& transport, const ExecutionContext& context) {
    if (transport->rank() == 1) return over.wait();
    const Array<int> number(context, {5});
    std::thread other([&] {
      while (calls("rank 0: ncclGroupEnd") == 0) std::this_thread::yield();
      (*transport.*end)();
    });
    EXPECT_EQ(error_of<TransportError>([&] { transport->send(context, 1, number.data(), 4); }), "aborted");
    other.join();
    over.count_down();
  });
}

TEST_P(NcclTransportOn, WaitsForAPeerUntilItIsAborted) { end_while_it_waits_for_a_peer(context(), &Transport::abort); }

// A communicator cannot be finalized while a thread is in it.
TEST_P(NcclTransportOn, IsAbortedIfItIsClosedWhileItWaitsForAPeer) {
  end_while_it_waits_for_a_peer(context(), &Transport::close);
  EXPECT_EQ(calls("rank 0: ncclCommFinalize"), 0);
  EXPECT_EQ(calls("rank 0: ncclCommAbort"), 1);
}

TEST_P(NcclTransportOn, FailsAfterAnAbort) {
  const auto transport = alone();
  const OwnContext own(context());
  transport->abort();
  transport->abort();
  EXPECT_EQ(error_of<TransportError>([&] { send_to_self(*transport, own.context()); }), "the connections were closed");
  EXPECT_EQ(error_of<TransportError>([&] { transport->all_gather(own.context(), nullptr, {{}}); }), "the connections were closed");
  EXPECT_EQ(calls("rank 0: ncclCommAbort"), 1);
  EXPECT_EQ(transport->error(), "");
}

TEST_P(NcclTransportOn, ReportsAsynchronousErrors) {
  const auto transport = alone();
  EXPECT_EQ(transport->error(), "");
  EXPECT_EQ(fake().set_error(0, remote_error), 1);
  expect_in("NCCL 2.28.9: in the background: remote process exited", transport->error());
}

TEST(NcclTransport, FailsIfMessagesDifferInSize) {
  fake().reset();
  on_transports({}, 2, [](const std::unique_ptr<Transport>& transport, const ExecutionContext& context) {
    int numbers[2] = {};
    const int rank = transport->rank();
    const std::vector<P2POp> ops = {{rank == 0, 1 - rank, numbers, rank == 0 ? 8 : 4}};
    expect_in("ncclGroupEnd: internal error", error_of<TransportError>([&] { transport->exchange(context, ops); }));
  });
}

class NcclCollectivesOn : public OverNccl {
 protected:
  static constexpr int world_size = 3;
  static inline const std::vector<Span> equal = {{0, 4}, {4, 4}, {8, 4}}, unequal = {{0, 5}, {5, 7}, {12, 0}};

  // Runs body(transport, context, 12 numbers). `expected` gives the numbers afterwards; if `mine`, only those of the rank's shard count.
  template <class Body, class Expected>
  void expect(const std::vector<Span>& shards, bool mine, Body body, Expected expected) {
    on_transports(context(), world_size, [&](const std::unique_ptr<Transport>& transport, const ExecutionContext& context) {
      const int rank = transport->rank();
      std::vector<float> values(12);
      for (int i = 0; i < 12; ++i) values[i] = static_cast<float>(100 * rank + i);
      const Array<float> array(context, values);
      body(*transport, context, array.data());
      values = array.values();
      for (int root = 0; root < world_size; ++root) {
        if (mine && root != rank) continue;
        for (int64_t i = shards[root].first; i < shards[root].first + shards[root].count; ++i) {
          EXPECT_EQ(values[i], expected(root, i)) << "rank " << rank << " i=" << i;
        }
      }
    });
  }

  void expect_calls(const char* function, int times, int groups) {
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(calls(call(rank, function)), times) << function;
      EXPECT_EQ(calls(call(rank, "ncclGroupEnd")), groups);
    }
    fake().reset();
  }
};
DLT_ON_EVERY_CONTEXT(NcclCollectivesOn);

TEST_P(NcclCollectivesOn, ScatterSums) {
  const auto scatter = [&](const std::vector<Span>& shards, bool average) {
    expect(
        shards, true,
        [&](Transport& transport, const ExecutionContext& context, float* values) {
          transport.reduce_scatter(context, values, shards, average);
        },
        [=](int, int64_t i) { return average ? 100.0f + static_cast<float>(i) : 300.0f + static_cast<float>(3 * i); });
  };
  for (const bool average : {false, true}) {
    scatter(equal, average);
    expect_calls("ncclReduceScatter", 1, 1);
    scatter(unequal, average);
    expect_calls("ncclReduce", 2, 1);  // the last shard is empty
  }
}

TEST_P(NcclCollectivesOn, GatherShards) {
  const auto gather = [&](const std::vector<Span>& shards) {
    expect(
        shards, false,
        [&](Transport& transport, const ExecutionContext& context, float* values) { transport.all_gather(context, values, shards); },
        [](int root, int64_t i) { return static_cast<float>(100 * root + i); });
  };
  gather(equal);
  expect_calls("ncclAllGather", 1, 1);
  gather(unequal);
  expect_calls("ncclBroadcast", 2, 1);
}

template <class T>
std::vector<T> numbers(int first, int step) {
  std::vector<T> out;
  for (int i = 0; i < 20; ++i) {
    if constexpr (std::is_arithmetic_v<T>) {
      out.push_back(static_cast<T>(first + i * step));
    } else {
      out.push_back(narrow<T>(static_cast<float>(first + i * step)));
    }
  }
  return out;
}

template <class T>
void expect_all_reduce(const ExecutionContext& kind, ScalarType number) {
  for (const bool average : {false, true}) {
    on_transports(kind, 3, [&](const std::unique_ptr<Transport>& transport, const ExecutionContext& context) {
      const Array<T> array(context, numbers<T>(transport->rank(), 1));
      transport->all_reduce(context, array.data(), 20, number, average);
      const auto values = array.values(), expected = average ? numbers<T>(1, 1) : numbers<T>(3, 3);
      EXPECT_EQ(std::memcmp(values.data(), expected.data(), 20 * sizeof(T)), 0) << "number " << static_cast<int>(number);
    });
  }
}

TEST_P(NcclCollectivesOn, ReduceScalarsOfAnyType) {
  expect_all_reduce<int8_t>(context(), ScalarType::int8);
  expect_all_reduce<uint8_t>(context(), ScalarType::uint8);
  expect_all_reduce<int32_t>(context(), ScalarType::int32);
  expect_all_reduce<int64_t>(context(), ScalarType::int64);
  expect_all_reduce<Half>(context(), ScalarType::fp16);
  expect_all_reduce<BFloat16>(context(), ScalarType::bf16);
  expect_all_reduce<float>(context(), ScalarType::fp32);
  expect_all_reduce<double>(context(), ScalarType::fp64);
}

}  // namespace
}  // namespace dltrain::comm::nccl
