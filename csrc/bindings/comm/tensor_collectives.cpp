#include "bindings/comm/tensor_collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "bindings/comm/gloo/control_channel.h"
#include "core/clock.h"

namespace dltrain::bindings {

namespace {

// The stride of the ranks, as torch defines it: -1 if they are not evenly spaced.
int stride_of(const std::vector<int>& ranks) {
  if (ranks.size() < 2) return 0;
  const int stride = ranks[1] - ranks[0];
  for (size_t i = 2; i < ranks.size(); ++i) {
    if (ranks[i] - ranks[i - 1] != stride) return -1;
  }
  return stride;
}

// The bytes that the busiest link carries, relative to those of the tensor, as nccl-tests define it.
double bus_factor(comm::Collective collective, int64_t ranks) {
  if (!comm::has_owners(collective) && collective != comm::Collective::all_reduce) return 1;
  const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  return collective == comm::Collective::all_reduce ? 2 * others : others;
}

std::shared_ptr<comm::Executor> executor_of(const std::shared_ptr<Level>& level) {
  return level ? std::shared_ptr<comm::Executor>(level, &level->executor()) : nullptr;
}

std::unique_ptr<comm::ControlChannel> channel_over(c10::intrusive_ptr<c10d::Backend> control) {
  return control ? std::make_unique<GlooControlChannel>(std::move(control)) : nullptr;
}

}  // namespace

TensorCollectives::TensorCollectives(std::shared_ptr<Level> across, std::shared_ptr<Level> inside, const comm::Hosts& hosts,
                                     c10::intrusive_ptr<c10d::Backend> control, Ranks members, std::chrono::milliseconds timeout,
                                     const comm::AdaptiveTimeout& answer_timeout, bool measures)
    : members_(std::move(members)),
      across_(std::move(across)),
      inside_(std::move(inside)),
      timeout_(timeout),
      measures_(measures),
      group_(executor_of(across_), executor_of(inside_), hosts, channel_over(std::move(control)), members_.ranks, answer_timeout) {}

// Runs in the same kind of profiler range as torch's own collectives, so that viewers recognize it as a collective.
void TensorCollectives::run(const ExecutionContext& context, const at::Tensor& tensor, const CollectiveOptions& options) {
  if (!at::hasCallbacks()) return attempt(context, tensor, options);
  const bool gathers = options.call.collective == comm::Collective::all_gather && options.shard;
  const at::Tensor &in = gathers ? *options.shard : tensor, &out = options.result(tensor);
  const bool all_reduces = options.call.collective == comm::Collective::all_reduce;
  const auto& [name, description, ranks, rank] = members_;
  const std::vector<at::Tensor> inputs = {in}, outputs = {out};
  RECORD_PARAM_COMMS_DATA(std::make_tuple(group_.calls(), false), std::make_tuple(name, description), inputs, outputs, rank,
                          all_reduces ? "allreduce" : comm::name(options.call.collective), in.numel(), out.numel(), tensor.scalar_type(),
                          std::vector<int64_t>(), std::vector<int64_t>(), ranks[0], stride_of(ranks), static_cast<int>(ranks.size()));
  attempt(context, tensor, options);
}

void TensorCollectives::attempt(const ExecutionContext& context, const at::Tensor& tensor, const CollectiveOptions& options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto start = Clock::now();
  const at::Tensor dense = tensor.contiguous();
  try {
    group_.attempt([&] { run_dense(context, dense, options); });
  } catch (const comm::CollectiveError& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  if (!dense.is_same(tensor) && options.result(tensor).is_same(tensor)) tensor.copy_(dense);
  if (options.bucket) options.bucket->add_up(context, tensor);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  done_.tensor_bytes += bytes;
  done_.bus_bytes += std::llround(static_cast<double>(bytes) * bus_factor(options.call.collective, std::ssize(members_.ranks)));
  if (!context.on_cuda()) done_.nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

void TensorCollectives::run_dense(const ExecutionContext& context, const at::Tensor& tensor, const CollectiveOptions& options) {
  if (options.is_native(tensor.scalar_type())) return all_reduce_natively(context, tensor, options.call.average);
  comm::CallOptions call = options.call;
  call.timeout = timeout_;
  call.measures = measures_ && !options.bucket && !context.on_cuda();  // the bits of a bucket must not depend on measured times
  call.feedback = options.feedback.elements();
  if (options.bucket) {
    call.layout = options.bucket->layout();
    call.observer = options.bucket.get();
  }
  std::vector<TypedPointer> minus;
  for (const at::Tensor& each : options.minus) minus.push_back({const_cast<void*>(each.const_data_ptr()), dtype_of(each)});
  call.minus = minus;
  if (options.message) call.message = static_cast<char*>(options.message->mutable_data_ptr());
  if (options.shard) return run_shards(context, tensor, options, call);
  if (options.is_verbatim()) return carry(context, tensor, {{0, tensor.numel()}}, call);
  if (inside_) return all_reduce_in_two_levels(context, tensor, call);
  run_plan(context, tensor, call);
}

void TensorCollectives::run_plan(const ExecutionContext& context, const at::Tensor& tensor, const comm::CallOptions& call) {
  group_.run(context, {tensor.mutable_data_ptr(), dtype_of(tensor)}, tensor.numel(), call);
}

// Runs a reduce-scatter or an all-gather.
void TensorCollectives::run_shards(const ExecutionContext& context, const at::Tensor& tensor, const CollectiveOptions& options,
                                   comm::CallOptions& call) {
  const at::Tensor& shard = *options.shard;
  call.shards = options.shards(tensor.numel(), static_cast<int>(members_.ranks.size()));
  if (call.collective == comm::Collective::reduce_scatter) {
    const at::Tensor dense = shard.is_contiguous() ? shard : at::empty_like(shard, at::MemoryFormat::Contiguous);
    call.shard = {dense.mutable_data_ptr(), dtype_of(dense)};
    run_plan(context, tensor, call);
    if (!dense.is_same(shard)) shard.copy_(dense);
    return;
  }
  const auto [first, count] = call.shards[members_.rank];
  const at::Tensor own = tensor.flatten().narrow(0, first, count);
  if (own.const_data_ptr() != shard.const_data_ptr()) own.copy_(shard.flatten());
  if (options.is_verbatim()) return carry(context, tensor, call.shards, call);
  run_plan(context, tensor, call);
}

// Sends elements of any type as words of four bytes, each shard on its own; padded copies if a shard is not a multiple of four bytes.
void TensorCollectives::carry(const ExecutionContext& context, const at::Tensor& tensor, std::vector<Span> shards, comm::CallOptions call) {
  constexpr int64_t word = sizeof(float);
  const int64_t size = tensor.element_size();
  std::vector<Span> words;
  int64_t numel = 0;
  bool even = true;
  for (const Span& shard : shards) {
    words.push_back({numel, (shard.count * size + word - 1) / word});
    numel += words.back().count;
    even = even && shard.count * size % word == 0;
  }
  if (comm::has_owners(call.collective)) call.shards = words;
  call.type = c10::toString(tensor.scalar_type());  // words hide a different type, or a size that differs by less than a word
  call.agreement = comm::digest(shards);
  if (even) return group_.run(context, {tensor.mutable_data_ptr()}, numel, call);
  const at::Tensor bytes = at::from_blob(tensor.mutable_data_ptr(), {tensor.numel() * size}, tensor.options().dtype(at::kByte));
  const at::Tensor padded = at::zeros({numel * word}, bytes.options());
  const auto each_shard = [&](auto&& copy) {
    for (size_t i = 0; i < shards.size(); ++i) {
      const int64_t count = shards[i].count * size;
      copy(bytes.narrow(0, shards[i].first * size, count), padded.narrow(0, words[i].first * word, count));
    }
  };
  each_shard([](const at::Tensor& given, const at::Tensor& carried) { carried.copy_(given); });
  group_.run(context, {padded.mutable_data_ptr()}, numel, call);
  each_shard([](const at::Tensor& given, const at::Tensor& carried) { given.copy_(carried); });
}

// In two levels, the ranks of each host add up the tensor, each rank that has a shard adds up the whole tensor between the hosts, and ranks
// without a shard receive the result from rank 0 of their host.
void TensorCollectives::all_reduce_natively(const ExecutionContext& context, const at::Tensor& tensor, bool average) {
  if (!inside_) return across_->all_reduce_natively(context, tensor, average, timeout_);
  if (average) tensor.div_(group_.hosts().ranks);
  inside_->all_reduce_natively(context, tensor, false, timeout_);
  across_->all_reduce_natively(context, tensor, false, timeout_);
  if (inside_->executor().world_size() == group_.hosts().shards) return;
  if (inside_->executor().rank() > 0) tensor.zero_();
  inside_->all_reduce_natively(context, tensor, false, timeout_);
}

// Adds up in fp32, also tensors of half types.
void TensorCollectives::all_reduce_in_two_levels(const ExecutionContext& context, const at::Tensor& tensor, const comm::CallOptions& call) {
  const at::Tensor sums = tensor.to(at::kFloat);  // the tensor itself if it is fp32
  run_plan(context, sums, call);
  if (!sums.is_same(tensor)) tensor.copy_(sums);
}

}  // namespace dltrain::bindings
