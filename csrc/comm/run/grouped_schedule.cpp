// In each tick the messages of the even segments are one group, those of the odd ones another. One half is encoded while the other is sent:
//
//   encoding   even, tick 0 | odd, tick 0  | even, tick 1 | odd, tick 1  | ...
//   messages                | even, tick 0 | odd, tick 0  | even, tick 1 | ...
//
// All ranks have the same groups in the same order, so no rank waits for a group that its peer posts only after waiting for another one.

#include <algorithm>
#include <mutex>
#include <utility>

#include "comm/run/message_schedule.h"

namespace dltrain::comm {

namespace {

constexpr int halves = 2;

struct Group {  // of messages in progress
  std::unique_ptr<Request> request;
  Waiting waiting;
};

class GroupedSchedule : public MessageSchedule {
 public:
  explicit GroupedSchedule(Transport& transport) : transport_(transport) {}

  std::vector<Stage> run(const Invocation& work, Deadline deadline) override {
    std::vector<Stage> stages;
    due_.assign(work.program.segments, {});
    keep(work.program.first);
    for (const auto& tick : work.program.ticks) {
      for (int half = 0; half < halves; ++half) {
        parts_.clear();
        for (const SegmentWork& part : tick) {
          if (part.segment % halves == half) parts_.push_back(&part);
        }
        Group& group = groups_[half];
        if (group.request) {
          complete(work, group, deadline);
          if (work.context.on_cuda()) stages.push_back({Event::record(work.context), group.waiting});
        }
        sends_.clear();
        receives_.clear();
        work.sum(parts_);
        for (const SegmentWork* part : parts_) {
          sends_.insert(sends_.end(), part->sends.begin(), part->sends.end());
          auto& due = due_[part->segment];
          receives_.insert(receives_.end(), due.begin(), due.end());
          due.clear();
        }
        if (!sends_.empty() || !receives_.empty()) post(work, group);
        work.decode(parts_);
        for (const SegmentWork* part : parts_) keep(part->ahead);
      }
    }
    return stages;
  }

  void abort() override {
    std::lock_guard lock(mutex_);
    aborted_ = true;
    for (Group& group : groups_) {
      if (group.request) group.request->abort();
    }
  }

  void forget() override {
    std::lock_guard lock(mutex_);
    for (Group& group : groups_) group.request.reset();
  }

 private:
  void keep(const std::vector<Transfer>& receives) {
    for (const Transfer& transfer : receives) due_[transfer.segment].push_back(transfer);
  }

  void post(const Invocation& work, Group& group) {
    const PhaseScope during(work.call.observer, Phase::send);
    const auto& waited_for = receives_.empty() ? sends_ : receives_;
    Waiting waiting{{}, waited_for.front().round};
    std::vector<P2POp> ops;
    for (const auto* transfers : {&sends_, &receives_}) {
      for (const Transfer& transfer : *transfers) {
        ops.push_back({transfers == &sends_, transfer.peer, work.at(transfer.location), transfer.bytes});
        auto& peers = waiting.peers;
        if (transfers == &waited_for && std::find(peers.begin(), peers.end(), transfer.peer) == peers.end()) peers.push_back(transfer.peer);
      }
    }
    wait_for(waiting);
    check_not_aborted();
    auto request = transport_.grouping()->exchange(work.context, ops);
    std::lock_guard lock(mutex_);
    group = {std::move(request), std::move(waiting)};
    if (aborted_) group.request->abort();
  }

  void complete(const Invocation& work, Group& group, Deadline deadline) {
    const PhaseScope during(work.call.observer, Phase::wait);
    wait_for(group.waiting);
    group.request->wait(deadline);
    std::lock_guard lock(mutex_);
    group.request.reset();
  }

  void check_not_aborted() {
    std::lock_guard lock(mutex_);
    if (aborted_) throw TransportError("aborted");
  }

  Transport& transport_;
  std::vector<std::vector<Transfer>> due_;  // by segment: the receives of its next round
  std::vector<const SegmentWork*> parts_;   // of half a tick
  std::vector<Transfer> sends_, receives_;  // of the next group

  std::mutex mutex_;  // guards what follows
  Group groups_[halves];
  bool aborted_ = false;
};

}  // namespace

std::unique_ptr<MessageSchedule> grouped_schedule(Transport& transport) { return std::make_unique<GroupedSchedule>(transport); }

}  // namespace dltrain::comm
