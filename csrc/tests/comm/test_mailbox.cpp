#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/transport/in_process_mailbox.h"
#include "comm/transport/message_pool.h"
#include "core/cache_line.h"

namespace dltrain::comm {
namespace {

using Bytes = Mailbox::Bytes;
using Kind = Mailbox::Event::Kind;
using Result = Mailbox::SendResult;

Bytes bytes_of(const std::string& text) { return {text.data(), static_cast<int64_t>(text.size())}; }

std::string text_of(const Mailbox::Event& event) {
  return {reinterpret_cast<const char*>(event.data.get()), static_cast<size_t>(event.bytes)};
}

// Returns the text of the next event, which has to be a message.
std::string next_text(Mailbox& mailbox) {
  const auto event = mailbox.receive();
  EXPECT_TRUE(event && event->kind == Kind::message);
  return event ? text_of(*event) : std::string();
}

TEST(Mailbox, GathersHeaderAndPieces) {
  const auto ranks = in_process_mailboxes(2);
  const std::string header = "head", first = "one", second = "two";
  const std::vector<Bytes> pieces{bytes_of(first), {}, bytes_of(second)};
  EXPECT_EQ(ranks[0]->send(1, bytes_of(header), pieces), Result::taken);
  const auto event = ranks[1]->receive();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->from, 0);
  EXPECT_EQ(text_of(*event), "headonetwo");
}

TEST(Mailbox, CarriesMessagesOfAnyLengthInOrder) {
  const auto ranks = in_process_mailboxes(2);
  for (const size_t length : {0, 1, 63, 64, 65, 4096, 65537, 3 << 20, 0}) {
    const std::string message(length, static_cast<char>('a' + length % 26));
    EXPECT_EQ(ranks[0]->send(1, bytes_of(message)), Result::taken);
    const std::string copy = message;  // a copy, because the header is copied by send
    const auto event = ranks[1]->receive();
    ASSERT_TRUE(event);
    EXPECT_EQ(text_of(*event), copy);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(event->data.get()) % cache_line, 0U);
  }
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(ranks[0]->send(1, bytes_of(std::to_string(i))), Result::taken);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(next_text(*ranks[1]), std::to_string(i));
}

TEST(Mailbox, SendsToItself) {
  const auto ranks = in_process_mailboxes(1);
  EXPECT_EQ(ranks[0]->send(0, bytes_of("self")), Result::taken);
  EXPECT_EQ(next_text(*ranks[0]), "self");
}

// Returns the text of the next message, and skips sessions that have ended.
std::string answer(Mailbox& mailbox) {
  auto event = mailbox.receive();
  while (event && event->kind == Kind::closed) event = mailbox.receive();
  return event ? text_of(*event) : std::string();
}

TEST(Mailbox, ReceivesFromManySendersEachInOrder) {
  constexpr int senders = 6, messages = 300;
  auto ranks = in_process_mailboxes(senders + 1);
  std::vector<std::thread> threads;
  for (int rank = 1; rank <= senders; ++rank) {
    threads.emplace_back([&mailbox = *ranks[rank], rank] {
      for (int i = 0; i < messages; ++i) {
        const std::string number = std::to_string(i), rest(static_cast<size_t>(i * rank), 'x');
        const std::vector<Bytes> pieces{bytes_of(rest)};
        EXPECT_EQ(mailbox.send(0, bytes_of(number + ' '), pieces), Result::taken);
        EXPECT_EQ(answer(mailbox), number);
      }
      mailbox.close();
    });
  }
  std::vector<int> next(senders + 1);
  for (int open = senders; open > 0;) {
    const auto event = ranks[0]->receive();
    ASSERT_TRUE(event);
    if (event->kind != Kind::message) {
      EXPECT_EQ(event->kind, Kind::closed);
      EXPECT_EQ(next[event->from], messages);
      --open;
      continue;
    }
    const int number = next[event->from]++;
    EXPECT_EQ(text_of(*event), std::to_string(number) + ' ' + std::string(static_cast<size_t>(number * event->from), 'x'));
    EXPECT_EQ(ranks[0]->send(event->from, bytes_of(std::to_string(number))), Result::taken);
  }
  for (auto& thread : threads) thread.join();
}

TEST(Mailbox, ReceivesNothingAfterTheDeadline) {
  const auto ranks = in_process_mailboxes(2);
  EXPECT_FALSE(ranks[0]->receive(Clock::now() + std::chrono::milliseconds(20)));
  EXPECT_FALSE(ranks[0]->receive(Clock::now() - std::chrono::milliseconds(20)));
  EXPECT_FALSE(ranks[0]->is_closed());
}

TEST(Mailbox, ClosingEndsReceiveAndSend) {
  const auto ranks = in_process_mailboxes(2);
  std::thread receiver([&] { EXPECT_FALSE(ranks[0]->receive()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // by now it very likely waits
  EXPECT_EQ(ranks[1]->send(1, bytes_of("never received")), Result::taken);
  ranks[0]->close();
  receiver.join();
  ranks[0]->close();
  EXPECT_TRUE(ranks[0]->is_closed());
  EXPECT_FALSE(ranks[0]->receive());
  EXPECT_EQ(ranks[0]->send(1, bytes_of("late")), Result::closed);
  EXPECT_EQ(ranks[0]->send(0, bytes_of("late")), Result::closed);
}

TEST(Mailbox, ReportsTheEndOfASessionOnceAndAfterItsMessages) {
  auto ranks = in_process_mailboxes(3);
  ranks[1]->send(0, bytes_of("last"));
  ranks[1]->close();
  ranks[2]->send(0, bytes_of("lost"));
  ranks[2].reset();
  EXPECT_EQ(next_text(*ranks[0]), "last");
  auto event = ranks[0]->receive();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->kind, Kind::closed);
  EXPECT_EQ(event->from, 1);
  EXPECT_EQ(next_text(*ranks[0]), "lost");
  event = ranks[0]->receive();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->kind, Kind::broken);
  EXPECT_EQ(event->from, 2);
  EXPECT_FALSE(event->reason.empty());
  EXPECT_FALSE(ranks[0]->receive(Clock::now()));
  EXPECT_EQ(ranks[0]->send(1, bytes_of("late")), Result::closed);
  EXPECT_EQ(ranks[0]->send(2, bytes_of("late")), Result::closed);
  EXPECT_EQ(ranks[0]->send(0, bytes_of("alive")), Result::taken);
}

TEST(Mailbox, RefusesMessagesBeyondTheLimitOfAPeer) {
  const auto ranks = in_process_mailboxes(3, 1 << 20);
  const std::string large(3 << 20, 'l');  // a single message may exceed the limit
  EXPECT_EQ(ranks[0]->send(1, bytes_of(large)), Result::taken);
  EXPECT_EQ(ranks[0]->send(1, bytes_of("more")), Result::full);
  EXPECT_EQ(ranks[2]->send(1, bytes_of("more")), Result::taken);  // the limit is per peer
  EXPECT_EQ(ranks[0]->send(2, bytes_of("more")), Result::taken);
  EXPECT_EQ(next_text(*ranks[1]), large);
  EXPECT_EQ(ranks[0]->send(1, bytes_of("more")), Result::taken);
  int taken = 0;
  while (ranks[0]->send(2, {}) == Result::taken) ++taken;  // messages without bytes count, too
  EXPECT_GT(taken, 1000);
}

TEST(Mailbox, RefusesRanksThatDoNotExist) {
  const auto ranks = in_process_mailboxes(2);
  EXPECT_THROW(ranks[0]->send(2, {}), std::invalid_argument);
  EXPECT_THROW(ranks[0]->send(-1, {}), std::invalid_argument);
  EXPECT_THROW(in_process_mailboxes(2, 0), std::invalid_argument);
}

TEST(Mailbox, ReleasesMemoryAfterSending) {
  const auto ranks = in_process_mailboxes(2);
  auto memory = ranks[0]->allocate(100);
  std::memset(memory.get(), 'm', 100);
  const std::vector<Bytes> pieces{{memory.get(), 100}};
  const std::weak_ptr<std::byte> watched = memory;
  EXPECT_EQ(ranks[0]->send(1, {}, pieces, std::move(memory)), Result::taken);
  EXPECT_EQ(next_text(*ranks[1]), std::string(100, 'm'));
  EXPECT_TRUE(watched.expired());
}

TEST(Mailbox, ClosesWhileAllRanksSend) {
  auto ranks = in_process_mailboxes(4);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      for (int i = 0; i < 2000; ++i) ranks[rank]->send((rank + 1 + i % 3) % 4, bytes_of("message"));
      ranks[rank]->close();
    });
    threads.emplace_back([&, rank] {
      while (ranks[rank]->receive()) continue;
      EXPECT_TRUE(ranks[rank]->is_closed());
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(MailboxPool, ReusesMemory) {
  MessagePool pool(1 << 20);
  auto memory = pool.take(100'000);
  const auto* const first = memory.get();
  memory.reset();
  memory = pool.take(99'000);  // of similar size
  EXPECT_EQ(memory.get(), first);
  EXPECT_NE(pool.take(100'000).get(), first);
}

TEST(MailboxPool, KeepsNoMoreThanItsLimit) {
  MessagePool pool(1 << 20);
  std::vector<std::shared_ptr<std::byte>> blocks;
  for (int i = 0; i < 100; ++i) blocks.push_back(pool.take(100'000));
  blocks.clear();  // the sanitizers would detect a block that leaks or is freed twice
  pool.take(10 << 20).reset();
  EXPECT_NE(pool.take(0), nullptr);
  EXPECT_THROW(pool.take(-1), std::invalid_argument);
}

TEST(MailboxPool, MayBeDestroyedBeforeItsMemory) {
  auto pool = std::make_unique<MessagePool>(1 << 20);
  const auto memory = pool->take(1000);
  pool.reset();
  std::memset(memory.get(), 1, 1000);
}

}  // namespace
}  // namespace dltrain::comm
