#include <algorithm>
#include <mutex>
#include <utility>

#include "comm/run/message_schedule.h"

namespace dltrain::comm {

namespace {

struct Posted {
  Transfer transfer;
  std::unique_ptr<Request> request;
};

struct Pending {                         // the messages of a segment in progress
  std::vector<Posted> done, now, ahead;  // of its last round, until they are added up; of its round; the receives of its next round
};

class EagerSchedule : public MessageSchedule {
 public:
  explicit EagerSchedule(Transport& transport) : transport_(transport) {}

  std::vector<Stage> run(const Invocation& work, Deadline deadline) override {
    const Program& program = work.program;
    {
      std::lock_guard lock(mutex_);
      segments_.resize(std::max(segments_.size(), static_cast<size_t>(program.segments)));
    }
    post(work, program.first, false);
    for (const auto& tick : program.ticks) {
      for (const SegmentWork& part : tick) {
        const SegmentWork* const alone[] = {&part};
        complete(work, segments_[part.segment], deadline);
        find(work, segments_[part.segment].done);
        work.sum(alone);
        segments_[part.segment].done.clear();
        post(work, part.sends, true);
        // Final bytes may be received into the slot one round ahead (rule R4): a rank encodes each chunk once, and adds nothing to it that
        // it does not send on, so final bytes arrive only after this rank's part has been sent.
        post(work, part.ahead, false);
        work.decode(alone);
      }
    }
    return {};
  }

  void abort() override {
    std::lock_guard lock(mutex_);
    aborted_ = true;
    for (Pending& segment : segments_) {
      for (auto* posted : {&segment.now, &segment.ahead}) {
        for (Posted& each : *posted) each.request->abort();
      }
    }
  }

  void forget() override {
    std::lock_guard lock(mutex_);
    segments_.clear();
  }

 private:
  void post(const Invocation& work, const std::vector<Transfer>& transfers, bool send) {
    const PhaseScope during(work.call.observer, Phase::send);
    for (const Transfer& transfer : transfers) post(work, transfer, send);
  }

  void post(const Invocation& work, const Transfer& transfer, bool send) {
    std::lock_guard lock(mutex_);
    if (aborted_) throw TransportError("aborted");
    wait_for(transfer.peer, transfer.round);
    Pending& segment = segments_[transfer.segment];
    char* const data = work.at(transfer.location);
    if (send) {
      segment.now.push_back({transfer, transport_.send(work.context, transfer.peer, data, transfer.bytes)});
    } else if (transfer.at_once) {
      segment.ahead.push_back({transfer, transport_.recv_in_place(work.context, transfer.peer, data, transfer.bytes)});
    } else {
      segment.ahead.push_back({transfer, transport_.recv(work.context, transfer.peer, data, transfer.bytes)});
    }
  }

  // Waits for the messages of the segment's round. Then the receives that were posted ahead belong to its current round.
  void complete(const Invocation& work, Pending& segment, Deadline deadline) {
    const PhaseScope during(work.call.observer, Phase::wait);
    for (Posted& posted : segment.now) {
      wait_for(posted.transfer.peer, posted.transfer.round);
      posted.request->wait(deadline);
    }
    std::lock_guard lock(mutex_);
    segment.done.swap(segment.now);
    segment.now.swap(segment.ahead);
  }

  // Notes where the messages are that are added up without having left the place where they have arrived.
  static void find(const Invocation& work, const std::vector<Posted>& received) {
    if (work.program.receive_slot == 0) return;
    std::vector<const char*>& places = work.scratch->places;
    places.assign(work.program.receive_buffer / work.program.receive_slot, nullptr);
    for (const auto& [transfer, request] : received) {
      if (transfer.at_once) places[transfer.location.offset / work.program.receive_slot] = static_cast<const char*>(request->place());
    }
  }

  Transport& transport_;
  std::mutex mutex_;  // guards what follows
  std::vector<Pending> segments_;
  bool aborted_ = false;
};

}  // namespace

std::unique_ptr<MessageSchedule> eager_schedule(Transport& transport) { return std::make_unique<EagerSchedule>(transport); }

}  // namespace dltrain::comm
