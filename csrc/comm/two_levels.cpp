#include "comm/two_levels.h"

#include <algorithm>
#include <future>
#include <utility>
#include <vector>

namespace dltrain::comm {

// Enough to hide one level behind the other; more only add messages.
int64_t pieces_of(int64_t numel) {
  constexpr int64_t size = 1 << 20, most = 8;  // elements
  return std::clamp<int64_t>(numel / size, 1, most);
}

void TwoLevels::all_reduce(const Place& place, float* values, int64_t numel, const AllReduce& call) {
  const auto pieces = static_cast<int>(pieces_of(numel));
  std::vector<Wait> under_way;
  std::vector<Layout> layouts(pieces);
  try {
    for (int i = 0; i < pieces; ++i) {
      const Span piece = share(numel, pieces, i);
      const Span mine = share(piece.count, shares_, inside_.rank());
      inside_.reduce_scatter(place, values + piece.first, piece.count, shares_, call.average, call.timeout);
      AllReduce part = call;
      part.weight = static_cast<float>(inside_.world_size()) / static_cast<float>(world_size_);  // of this host's average
      part.first = piece.first + mine.first;
      part.feedback = call.feedback.from(part.first);
      if (call.layout) {
        layouts[i] = within(*call.layout, {part.first, mine.count});
        part.layout = &layouts[i];
        part.first = 0;
      }
      under_way.push_back(start_across(place, values + piece.first + mine.first, mine.count, part, pieces == 1));
    }
    for (int i = 0; i < pieces; ++i) {
      const Span piece = share(numel, pieces, i);
      std::exchange(under_way[i], {})();
      inside_.all_gather(place, values + piece.first, piece.count, shares_, call.timeout);
    }
  } catch (const AllReduceError& error) {
    for (Executor* level : {&inside_, &across_}) level->abort(error.what());
    for (const Wait& wait : under_way) {
      try {
        if (wait) wait();
      } catch (const AllReduceError&) {
        continue;  // the first says why
      }
    }
    throw;
  }
}

TwoLevels::Wait TwoLevels::start_across(const Place& place, float* values, int64_t numel, const AllReduce& call, bool alone) {
  if constexpr (built_with_cuda) {
    if (place.on_cuda()) {
      if (!stream_) stream_ = std::make_shared<cuda::Stream>(place.device);
      const Place side = stream_->place(place.allocator);
      Event::record(place).wait(side);
      across_.all_reduce(side, {values}, numel, call);
      return [done = Event::record(side), place] { done.wait(place); };
    }
  }
  const auto across = [=, this](const Place& where) {
    try {
      across_.all_reduce(where, {values}, numel, call);
    } catch (const AllReduceError& error) {
      inside_.abort(error.what());  // whose peers may never come
      throw;
    }
  };
  if (alone) {
    across(place);
    return [] {};
  }
  auto task = std::make_shared<std::packaged_task<void()>>([across] { across({}); });  // the other threads are busy inside
  worker_.submit([task] { (*task)(); });
  return [task] { task->get_future().get(); };
}

}  // namespace dltrain::comm
