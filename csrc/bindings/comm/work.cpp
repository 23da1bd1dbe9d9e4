#include "bindings/comm/work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <algorithm>
#include <tuple>
#include <utility>

#include "bindings/comm/channel.h"

namespace dltrain::bindings {

namespace {

// As torch has it: -1 where they are not evenly spaced.
int stride_of(const std::vector<int>& ranks) {
  if (ranks.size() < 2) return 0;
  const int stride = ranks[1] - ranks[0];
  for (size_t i = 2; i < ranks.size(); ++i) {
    if (ranks[i] - ranks[i - 1] != stride) return -1;
  }
  return stride;
}

std::shared_ptr<comm::Executor> executor_of(const std::shared_ptr<Level>& level) {
  return level ? std::shared_ptr<comm::Executor>(level, &level->executor()) : nullptr;
}

std::unique_ptr<comm::Channel> channel_over(c10::intrusive_ptr<c10d::Backend> control) {
  return control ? std::make_unique<GlooChannel>(std::move(control)) : nullptr;
}

}  // namespace

Work::Work(std::shared_ptr<Level> across, std::shared_ptr<Level> inside, const comm::Hosts& hosts,
           c10::intrusive_ptr<c10d::Backend> control, Ranks members, std::chrono::milliseconds timeout, const comm::Patience& patience,
           bool measures)
    : members_(std::move(members)),
      across_(std::move(across)),
      inside_(std::move(inside)),
      timeout_(timeout),
      measures_(measures),
      group_(executor_of(across_), executor_of(inside_), hosts, channel_over(std::move(control)), members_.ranks, patience) {}

// In a range of the profiler that torch's own collectives have, too, so that its viewers know what it is.
void Work::run(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options) {
  if (!at::hasCallbacks()) return attempt(place, tensor, options);
  const bool gathers = options.call.collective == comm::Collective::all_gather;
  const at::Tensor &in = gathers ? *options.share : tensor, &out = options.result(tensor);
  const bool all_reduces = options.call.collective == comm::Collective::all_reduce;
  const auto& [name, description, ranks, rank] = members_;
  const std::vector<at::Tensor> inputs = {in}, outputs = {out};
  RECORD_PARAM_COMMS_DATA(std::make_tuple(group_.calls(), false), std::make_tuple(name, description), inputs, outputs, rank,
                          all_reduces ? "allreduce" : comm::name(options.call.collective), in.numel(), out.numel(), tensor.scalar_type(),
                          std::vector<int64_t>(), std::vector<int64_t>(), ranks[0], stride_of(ranks), static_cast<int>(ranks.size()));
  attempt(place, tensor, options);
}

void Work::attempt(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor dense = tensor.contiguous();
  try {
    group_.attempt([&] { run_dense(place, dense, options); });
  } catch (const comm::CollectiveError& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  if (!dense.is_same(tensor) && options.result(tensor).is_same(tensor)) tensor.copy_(dense);
  if (options.bucket) options.bucket->add_up(place, tensor);
}

void Work::run_dense(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options) {
  if (options.is_native(tensor.scalar_type())) return all_reduce_natively(place, tensor, options.call.average);
  comm::Options call = options.call;
  call.timeout = timeout_;
  call.measures = measures_ && !options.bucket && !place.on_cuda();  // a bucket's bits may not depend on noise
  call.feedback = options.feedback.elements();
  if (options.bucket) {
    call.layout = options.bucket->layout();
    call.observer = options.bucket.get();
  }
  if (options.share) return run_shares(place, tensor, options, call);
  if (options.is_verbatim()) return carry(place, tensor, {{0, tensor.numel()}}, call);
  if (inside_) return all_reduce_in_two_levels(place, tensor, call);
  run_plan(place, tensor, call);
}

void Work::run_plan(const Place& place, const at::Tensor& tensor, const comm::Options& call) {
  group_.run(place, {tensor.mutable_data_ptr(), dtype_of(tensor)}, tensor.numel(), call);
}

// A reduce-scatter or an all-gather.
void Work::run_shares(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options, comm::Options& call) {
  const at::Tensor& share = *options.share;
  call.shares = options.shares(tensor.numel(), static_cast<int>(members_.ranks.size()));
  if (call.collective == comm::Collective::reduce_scatter) {
    const at::Tensor dense = share.is_contiguous() ? share : at::empty_like(share, at::MemoryFormat::Contiguous);
    call.share = {dense.mutable_data_ptr(), dtype_of(dense)};
    run_plan(place, tensor, call);
    if (!dense.is_same(share)) share.copy_(dense);
    return;
  }
  const auto [first, count] = call.shares[members_.rank];
  const at::Tensor own = tensor.flatten().narrow(0, first, count);
  if (own.const_data_ptr() != share.const_data_ptr()) own.copy_(share.flatten());
  if (options.is_verbatim()) return carry(place, tensor, call.shares, call);
  run_plan(place, tensor, call);
}

// Moves elements of any type as words of four bytes, each share by itself; in memory of its own where they do not come out even.
void Work::carry(const Place& place, const at::Tensor& tensor, std::vector<Span> shares, comm::Options call) {
  constexpr int64_t word = sizeof(float);
  const int64_t size = tensor.element_size();
  std::vector<Span> words;
  int64_t numel = 0;
  bool even = true;
  for (const Span& share : shares) {
    words.push_back({numel, (share.count * size + word - 1) / word});
    numel += words.back().count;
    even = even && share.count * size % word == 0;
  }
  if (comm::has_owners(call.collective)) call.shares = words;
  call.type = c10::toString(tensor.scalar_type());  // words would hide that ranks differ in it, or by less than a word
  call.agreement = comm::digest(shares);
  if (even) return group_.run(place, {tensor.mutable_data_ptr()}, numel, call);
  const at::Tensor bytes = at::from_blob(tensor.mutable_data_ptr(), {tensor.numel() * size}, tensor.options().dtype(at::kByte));
  const at::Tensor padded = at::zeros({numel * word}, bytes.options());
  const auto each_share = [&](auto&& copy) {
    for (size_t i = 0; i < shares.size(); ++i) {
      const int64_t count = shares[i].count * size;
      copy(bytes.narrow(0, shares[i].first * size, count), padded.narrow(0, words[i].first * word, count));
    }
  };
  each_share([](const at::Tensor& given, const at::Tensor& carried) { carried.copy_(given); });
  group_.run(place, {padded.mutable_data_ptr()}, numel, call);
  each_share([](const at::Tensor& given, const at::Tensor& carried) { given.copy_(carried); });
}

// In two levels each rank that has a share takes all of it across the hosts, and tells the ranks of its host that have none.
void Work::all_reduce_natively(const Place& place, const at::Tensor& tensor, bool average) {
  if (!inside_) return across_->all_reduce_natively(place, tensor, average, timeout_);
  if (average) tensor.div_(group_.hosts().ranks);
  inside_->all_reduce_natively(place, tensor, false, timeout_);
  across_->all_reduce_natively(place, tensor, false, timeout_);
  if (inside_->executor().world_size() == group_.hosts().shares) return;
  if (inside_->executor().rank() > 0) tensor.zero_();
  inside_->all_reduce_natively(place, tensor, false, timeout_);
}

// Over fp32, in which halves are added up.
void Work::all_reduce_in_two_levels(const Place& place, const at::Tensor& tensor, const comm::Options& call) {
  const at::Tensor sums = tensor.to(at::kFloat);  // the tensor itself, if it is that
  run_plan(place, sums, call);
  if (!sums.is_same(tensor)) tensor.copy_(sums);
}

}  // namespace dltrain::bindings
