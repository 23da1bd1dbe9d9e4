#include "comm/run/two_levels.h"

#include <algorithm>
#include <future>
#include <utility>

namespace dltrain::comm {

// A few pieces hide one level behind the other; more only add messages.
int64_t pieces_of(int64_t numel) {
  constexpr int64_t size = 1 << 20, most = 8;  // elements
  return std::clamp<int64_t>(numel / size, 1, most);
}

void TwoLevels::all_reduce(const ExecutionContext& context, float* values, int64_t numel, const CallOptions& call) {
  const std::vector<Slice>& pieces = this->pieces(numel, call);
  const int rank = intra_host_.rank();
  std::vector<Wait> in_progress;
  std::vector<char*> messages(pieces.size(), nullptr);
  messages_.resize(std::max(messages_.size(), pieces.size()));
  try {
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Slice& piece = pieces[i];
      intra_host_.reduce_scatter(context, values + piece.span.first, piece.span.count, piece.local_shards, call.average, call.timeout);
      CallOptions part = call;
      part.weight = static_cast<float>(intra_host_.world_size()) / static_cast<float>(hosts_.ranks);  // the weight of this host's average
      part.first = piece.shards[rank].first;
      part.feedback = call.feedback.from(part.first);
      if (call.layout) {
        part.layout = &piece.layouts[rank];
        part.first = 0;
      }
      if (piece.message_bytes > 0) {
        messages[i] = static_cast<char*>(messages_[i].reserve(context, piece.message_bytes * hosts_.shards));
        if (rank < hosts_.shards) part.message = messages[i] + piece.message_bytes * rank;
      }
      in_progress.push_back(
          start_inter_host(context, values + piece.shards[rank].first, piece.shards[rank].count, part, pieces.size() == 1));
    }
    for (size_t i = 0; i < pieces.size(); ++i) {
      std::exchange(in_progress[i], {})();
      all_gather(context, values, pieces[i], messages[i], call.timeout);
      if (context.on_cuda()) messages_[i] = {};  // memory that is allocated during a capture belongs to the graph
    }
  } catch (const std::exception& error) {  // all errors, because work in progress writes to the values
    for (Executor* level : {&intra_host_, &inter_host_}) level->abort(error.what());
    for (const Wait& wait : in_progress) {
      try {
        if (wait) wait();
      } catch (const std::exception&) {
        continue;  // the first error gives the reason
      }
    }
    throw;
  }
}

const std::vector<TwoLevels::Slice>& TwoLevels::pieces(int64_t numel, const CallOptions& call) {
  constexpr size_t most = 256;
  static const Layout whole;
  const auto key = std::make_tuple(numel, call.algorithm, call.codec, call.segments, call.measures);
  const Layout& layout = call.layout ? *call.layout : whole;
  if (const auto found = pieces_.find(std::tie(key, layout)); found != pieces_.end()) return found->second;
  if (pieces_.size() == most) pieces_.clear();
  std::vector<Slice> out;
  const auto count = static_cast<int>(pieces_of(numel));
  for (int i = 0; i < count; ++i) out.push_back(piece(shard(numel, count, i), call));
  return pieces_[{key, layout}] = std::move(out);
}

TwoLevels::Slice TwoLevels::piece(const Span& span, const CallOptions& call) const {
  Slice piece;
  piece.span = span;
  piece.local_shards = shards_of(span.count, hosts_.shards, intra_host_.world_size());
  for (int rank = 0; rank < intra_host_.world_size(); ++rank) {
    piece.shards.push_back({span.first + piece.local_shards[rank].first, piece.local_shards[rank].count});
    if (call.layout) piece.layouts.push_back(within(*call.layout, piece.shards.back()));
  }
  if (call.measures && call.algorithm == "auto") return piece;  // times select the plan, which may differ between shards
  std::vector<Encoded> messages;
  for (int rank = 0; rank < hosts_.shards; ++rank) {
    CallOptions part = call;
    if (call.layout) part.layout = &piece.layouts[rank];
    messages.push_back(encoded(part, piece.shards[rank].count, hosts_.count));
    if (messages.back().parts.empty()) return piece;
  }
  const int64_t bytes = std::ranges::max_element(messages, {}, &Encoded::bytes)->bytes;
  if (span.count * static_cast<int64_t>(sizeof(float)) - bytes * hosts_.shards < saving_) return piece;
  piece.message_bytes = bytes;
  for (int rank = 0; rank < hosts_.shards; ++rank) {
    for (auto& [region, slot] : messages[rank].parts) {
      region.span.first += piece.shards[rank].first;
      piece.decodes.push_back({region, slot + bytes * rank});
    }
  }
  return piece;
}

void TwoLevels::all_gather(const ExecutionContext& context, float* values, const Slice& piece, char* messages,
                           std::chrono::milliseconds timeout) {
  if (!messages) return intra_host_.all_gather(context, values + piece.span.first, piece.span.count, piece.local_shards, timeout);
  const int64_t words = piece.message_bytes * hosts_.shards / static_cast<int64_t>(sizeof(float));
  intra_host_.all_gather(context, reinterpret_cast<float*>(messages), words, shards_of(words, hosts_.shards, intra_host_.world_size()),
                         timeout);
  decode(context, piece.decodes, messages, {values}, decodings_);
}

TwoLevels::Wait TwoLevels::start_inter_host(const ExecutionContext& context, float* values, int64_t numel, const CallOptions& call,
                                            bool alone) {
  if constexpr (built_with_cuda) {
    if (context.on_cuda()) {
      if (!stream_) stream_ = std::make_shared<cuda::Stream>(context.device);
      const ExecutionContext side = stream_->context(context.allocator);
      Event::record(context).wait(side);
      inter_host_.run(side, {values}, numel, call);
      return [done = Event::record(side), context] { done.wait(context); };
    }
  }
  const auto run = [=, this](const ExecutionContext& where) {
    try {
      inter_host_.run(where, {values}, numel, call);
    } catch (const CollectiveError& error) {
      intra_host_.abort(error.what());  // its peers may never make this call
      throw;
    }
  };
  if (alone) {
    run(context);
    return [] {};
  }
  auto task = std::make_shared<std::packaged_task<void()>>([run] { run({}); });  // in one thread: the others work within the host
  worker_.submit([task] { (*task)(); });
  return [task] { task->get_future().get(); };
}

}  // namespace dltrain::comm
