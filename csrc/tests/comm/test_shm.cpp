#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <thread>

#include "comm/transport/shm/processes.h"
#include "comm/transport/shm/transport.h"
#include "core/check.h"
#include "tests/comm/ranks.h"

namespace dltrain::comm {
namespace {

using Ends = std::vector<std::unique_ptr<Transport>>;

constexpr auto soon = std::chrono::milliseconds(100);

Ends ends_of(int world_size, const std::function<bool(int)>& is_alive = [](int) { return true; }) {
  const auto first = std::make_shared<shm::Group>(world_size);
  Ends ends;
  for (int rank = 0; rank < world_size; ++rank) {
    const auto group = rank == 0 ? first : std::make_shared<shm::Group>(first->address(), world_size);
    ends.push_back(std::make_unique<shm::Transport>(group, rank, is_alive));
  }
  return ends;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const TransportError& error) {
    return error.what();
  }
  return "no error";
}

std::vector<int32_t> numbers(int64_t count, int32_t first) {
  std::vector<int32_t> out(count);
  std::iota(out.begin(), out.end(), first);
  return out;
}

TEST(Shm, ExecutesEveryPlan) {
  for (const std::string& algorithm : algorithms()) {
    for (const int world_size : {1, 2, 3, 4, 7}) {
      for (const int64_t numel : {0, 1, 1000, 200'003}) {
        on_ranks(ends_of(world_size), [&](Executor& executor, Runner&) {
          std::vector<float> values(numel);
          for (int64_t i = 0; i < numel; ++i) values[i] = static_cast<float>((i * 7 + executor.rank() * 13) % 31);
          CallOptions call;
          call.algorithm = algorithm;
          call.segments = 3;
          for (int turn = 0; turn < 2; ++turn) executor.run({}, {values.data()}, numel, call);
          for (int64_t i = 0; i < numel; ++i) {
            float sum = 0;
            for (int rank = 0; rank < world_size; ++rank) sum += static_cast<float>(world_size * ((i * 7 + rank * 13) % 31));
            ASSERT_EQ(values[i], sum) << algorithm << " p=" << world_size << " n=" << numel << " i=" << i;
          }
        });
      }
    }
  }
}

TEST(Shm, KeepsTheOrderOfMessagesOfAnyLength) {
  auto ends = ends_of(2);
  constexpr int messages = 200;
  const auto length_of = [](int from, int i) { return static_cast<int64_t>(i * 7919LL * (from + 1) % (i % 10 == 0 ? 300'000 : 500)); };
  const auto talk = [&](int rank) {
    std::vector<std::vector<int32_t>> sent, received;
    std::vector<std::unique_ptr<Request>> requests;
    for (int i = 0; i < messages; ++i) {
      sent.push_back(numbers(length_of(rank, i), i * (rank + 1)));
      received.emplace_back(length_of(1 - rank, i));
      requests.push_back(ends[rank]->send({}, 1 - rank, sent[i].data(), std::ssize(sent[i]) * 4));
      requests.push_back(ends[rank]->recv({}, 1 - rank, received[i].data(), std::ssize(received[i]) * 4));
    }
    for (auto& request : requests) request->wait(Deadline::max());
    for (int i = 0; i < messages; ++i) ASSERT_EQ(received[i], numbers(length_of(1 - rank, i), i * (2 - rank))) << i;
  };
  std::thread other(talk, 1);
  talk(0);
  other.join();
}

TEST(Shm, WaitsNoLongerThanTheDeadline) {
  auto ends = ends_of(2);
  int32_t word = 0;
  const std::vector<int32_t> many(1 << 20);
  auto received = ends[0]->recv({}, 1, &word, 4);
  EXPECT_EQ(error_of([&] { received->wait(Clock::now() + soon); }), "nothing came");
  EXPECT_EQ(error_of([&] { ends[1]->send({}, 0, many.data(), 4 << 20)->wait(Clock::now() + soon); }), "nothing came");
}

TEST(Shm, EndsAWaitWhenAnotherThreadAborts) {
  auto ends = ends_of(2);
  int32_t word = 0;
  auto received = ends[0]->recv({}, 1, &word, 4);
  std::thread other([&] {
    std::this_thread::sleep_for(soon);
    received->abort();
  });
  EXPECT_EQ(error_of([&] { received->wait(Deadline::max()); }), "aborted");
  other.join();
}

TEST(Shm, TellsThatAPeerHasClosedItsEndBehindItsMessages) {
  auto ends = ends_of(2);
  const int32_t sent = 5;
  int32_t word = 0;
  ends[1]->framing()->begin({.number = 3, .numel = 1});
  ends[0]->framing()->begin({.number = 3, .numel = 1});
  ends[1]->send({}, 0, &sent, 4)->wait(Deadline::max());
  ends[1]->close();
  ends[0]->recv({}, 1, &word, 4)->wait(Deadline::max());
  EXPECT_EQ(word, 5);
  EXPECT_THROW(ends[0]->recv({}, 1, &word, 4)->wait(Deadline::max()), PeerClosed);
  ends[0]->framing()->begin({.number = 4, .numel = 1});
  EXPECT_NE(ends[0]->framing()->last_words(1).find("it has closed its end; its latest is call 3"), std::string::npos);
}

TEST(Shm, TellsThatAPeerIsInAnotherCall) {
  auto ends = ends_of(2);
  const int32_t sent = 5;
  int32_t word = 0;
  ends[0]->framing()->begin({.number = 1, .numel = 10});
  ends[1]->framing()->begin({.number = 1, .numel = 20});
  auto message = ends[1]->send({}, 0, &sent, 4);
  EXPECT_NE(ends[0]->framing()->last_words(1).find("over 20 elements"), std::string::npos);
  EXPECT_THROW(ends[0]->recv({}, 1, &word, 4)->wait(Deadline::max()), Disagreement);
}

TEST(Shm, ReadsWhatADeadPeerHasSent) {
  std::atomic<bool> lives = true;
  auto ends = ends_of(2, [&](int) { return lives.load(); });
  const int32_t sent = 5;
  int32_t word = 0;
  ends[1]->send({}, 0, &sent, 4)->wait(Deadline::max());
  lives = false;
  ends[0]->recv({}, 1, &word, 4)->wait(Deadline::max());
  EXPECT_EQ(word, 5);
  EXPECT_EQ(error_of([&] { ends[0]->recv({}, 1, &word, 4)->wait(Deadline::max()); }), "its process has ended");
}

TEST(Shm, DetectsForeignBytes) {
  const auto group = std::make_shared<shm::Group>(2);
  shm::Writer writer = group->writer(1, 0);
  shm::Transport end(group, 0, [](int) { return true; });
  std::mt19937 random(0);
  std::vector<uint32_t> garbage(64);
  for (uint32_t& word : garbage) word = random();
  writer.write(garbage.data(), 256);
  int32_t word = 0;
  constexpr auto expected = "no message begins where one should: another process has written to the memory";
  EXPECT_EQ(error_of([&] { end.recv({}, 1, &word, 4)->wait(Deadline::max()); }), expected);
  EXPECT_EQ(error_of([&] { end.last_words(1); }), expected);
}

TEST(Shm, AStreamStaysWithinItsRingWhateverThePositionOfTheOtherEnd) {
  const int64_t size = shm::page_size();
  const shm::Memory memory(size);
  shm::Positions positions{};
  shm::Writer writer(positions, {memory, 0, size});
  shm::Reader reader(positions, {memory, 0, size});
  for (const int64_t position : {int64_t{-64}, int64_t{1} << 40, std::numeric_limits<int64_t>::max()}) {
    positions.written.bytes = position;
    EXPECT_LE(reader.filled(), size);
    EXPECT_GE(reader.filled(), 0);
    positions.read.bytes = position;
    EXPECT_LE(writer.room(), size);
    EXPECT_GE(writer.room(), 0);
  }
}

TEST(Shm, WhatGoesOnAtTheBeginningOfARingLiesInOnePiece) {
  const int64_t size = shm::page_size(), part = size / 4;
  const shm::Memory memory(size);
  shm::Positions positions{};
  shm::Writer writer(positions, {memory, 0, size});
  shm::Reader reader(positions, {memory, 0, size});
  std::vector<char> skipped(part);
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(writer.write(skipped.data(), part - 64), part - 64);
    ASSERT_EQ(reader.read(skipped.data(), part), part - 64);
  }
  const auto first = numbers(part / 4, 0), second = numbers(part / 4, 1000);
  ASSERT_EQ(writer.write(first.data(), part), part);
  ASSERT_EQ(writer.write(second.data(), part), part);
  ASSERT_EQ(reader.filled(), 2 * part);
  EXPECT_EQ(std::memcmp(reader.next(), first.data(), part), 0);
  EXPECT_EQ(std::memcmp(reader.next() + part, second.data(), part), 0);
}

TEST(Shm, AMessageThatStaysLeavesWhenAnotherOneIsWaitedFor) {
  auto ends = ends_of(2);
  const auto first = numbers(1000, 1), second = numbers(1000, 2), third = numbers(100'000, 3);
  const auto send = [&](const std::vector<int32_t>& words) { return ends[1]->send({}, 0, words.data(), std::ssize(words) * 4); };
  std::vector<int32_t> one(1000), two(1000), three(100'000);
  const auto sent = send(first), after = send(second), last = send(third);
  const auto stays = ends[0]->recv_in_place({}, 1, one.data(), 4000);
  stays->wait(Deadline::max());
  ASSERT_NE(stays->place(), nullptr);
  EXPECT_EQ(std::memcmp(stays->place(), first.data(), 4000), 0);
  const auto behind = ends[0]->recv_in_place({}, 1, two.data(), 4000);
  behind->wait(Deadline::max());
  EXPECT_EQ(stays->place(), nullptr);
  EXPECT_EQ(one, first);
  std::thread other([&] { last->wait(Deadline::max()); });  // is longer than the ring
  const auto longer = ends[0]->recv_in_place({}, 1, three.data(), 400'000);
  longer->wait(Deadline::max());
  other.join();
  EXPECT_EQ(behind->place(), nullptr);
  EXPECT_EQ(two, second);
  EXPECT_EQ(longer->place(), nullptr);
  EXPECT_EQ(three, third);
}

TEST(Shm, OpensOnlyTheMemoryOfItsGroup) {
  const shm::Group group(3);
  EXPECT_NO_THROW(shm::Group(group.address(), 3));
  EXPECT_NE(error_of([&] { shm::Group(group.address(), 2); }).find("expected memory of"), std::string::npos);
  EXPECT_NE(error_of([&] { shm::Group(group.address() + "1", 3); }).find("expected the memory of rank 0"), std::string::npos);
  EXPECT_NE(error_of([&] { shm::Group("/proc/0/fd/1 5", 3); }).find("could not be opened"), std::string::npos);
}

TEST(Shm, SeesThatAProcessWasKilled) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  const shm::Processes processes({getpid(), child});
  EXPECT_TRUE(processes.is_alive(0));
  EXPECT_TRUE(processes.is_alive(1));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(processes.is_alive(0));
  EXPECT_FALSE(processes.is_alive(1));
  EXPECT_THROW(shm::Processes({child}), TransportError);
}

TEST(Shm, WakesAProcessThatSleeps) {
  shm::Bell bell;
  std::atomic<int> turn = 0;
  const auto play = [&](int own) {
    for (int i = own; i < 2000; i += 2) {
      while (turn.load() != i) {
        const shm::Bell::Sleep sleep = bell.lie_down();
        if (turn.load() != i) sleep.at_most(std::chrono::seconds(20));
      }
      turn.store(i + 1);
      bell.ring();
    }
  };
  const auto start = Clock::now();
  std::thread other(play, 1);
  play(0);
  other.join();
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));  // no wake-up was missed
}

}  // namespace
}  // namespace dltrain::comm
