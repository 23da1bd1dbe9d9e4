#include "bindings/comm/options.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arguments.h"
#include "core/check.h"
#include "kernels/codec.h"

namespace dltrain::bindings {

namespace {

bool is_one_of(at::ScalarType type, std::initializer_list<at::ScalarType> types) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

// Plans add up in fp32. Types that fp32 cannot represent are left to the backend's own all-reduce.
bool fits_plans(at::ScalarType type) { return is_one_of(type, {at::kFloat, at::kHalf, at::kBFloat16}); }
bool fits_backend(at::ScalarType type) {
  return fits_plans(type) || is_one_of(type, {at::kDouble, at::kByte, at::kChar, at::kInt, at::kLong});
}

void check_location(const at::Tensor& tensor, const std::string& name, const c10::Device& device) {
  check_plain(tensor, name);
  TORCH_CHECK_VALUE(tensor.device() == device, name, ": expected a tensor on ", device.is_cpu() ? "the CPU" : device.str(), ", got one on ",
                    tensor.device());
  check_backed(tensor, name);
}

// Checks the tensor of a collective without shards.
void check_values(const at::Tensor& tensor, const c10::Device& device, const CollectiveOptions& options) {
  check_location(tensor, "tensor", device);
  check_written(tensor, "tensor");
  const at::ScalarType type = tensor.scalar_type();
  if (options.is_verbatim()) return;
  if (options.is_native(type)) {
    TORCH_CHECK_TYPE(fits_backend(type), "tensor: expected dtype float32, float16, bfloat16, float64, uint8, int8, int32 or int64, got ",
                     type);
    TORCH_CHECK_TYPE(!options.call.average || at::isFloatingType(type), "tensor: expected a floating dtype for op 'avg', got ", type);
  } else {
    TORCH_CHECK_TYPE(options.call.collective == comm::Collective::all_reduce || fits_plans(type),
                     "tensor: expected dtype float32, float16 or bfloat16 for ", comm::name(options.call.collective), " in the codec ",
                     options.call.codec, ", got ", type);
    TORCH_CHECK_TYPE(fits_plans(type), "tensor: expected dtype float32, float16 or bfloat16 for the algorithm ", options.call.algorithm,
                     " and the codec ", options.call.codec, " (others are for the algorithms auto and native with the codec raw), got ",
                     type);
  }
}

void check_bucket(const at::Tensor& tensor, const CollectiveOptions& options, int world_size) {
  TORCH_CHECK_TYPE(fits_plans(tensor.scalar_type()), "bucket: expected dtype float32, float16 or bfloat16, got ", tensor.scalar_type());
  options.bucket->check(tensor);
  options.bucket->check_owners(comm::has_owners(options.call.collective) ? world_size : 0);
}

void check_feedback_of(const at::Tensor& tensor, const CollectiveOptions& options) {
  options.feedback.check(options.call.collective == comm::Collective::all_gather && options.shard ? *options.shard : tensor);
  if (options.feedback.residual) {
    TORCH_CHECK_VALUE(!options.is_native(tensor.scalar_type()), "residual: expected none for the algorithm native");
    check_feedback(find_codec(options.call.codec), options.call.stochastic);
  }
}

}  // namespace

bool CollectiveOptions::is_native(at::ScalarType type) const {
  if (call.collective != comm::Collective::all_reduce) return false;
  return call.algorithm == "native" || (call.algorithm == "auto" && call.codec == "raw" && !fits_plans(type));
}

std::vector<Span> CollectiveOptions::shards(int64_t numel, int world_size) const {
  if (sizes.empty()) return comm::equal_shards(numel, world_size);
  std::vector<Span> all;
  for (const int64_t size : sizes) all.push_back({all.empty() ? 0 : all.back().first + all.back().count, size});
  return all;
}

void CollectiveOptions::check(const at::Tensor& tensor, const c10::Device& device, int rank, int world_size) const {
  comm::check_names(call.collective, call.algorithm, call.codec);
  TORCH_CHECK_VALUE(call.root >= 0 && call.root < world_size, "root: expected 0 to ", world_size - 1, ", got ", call.root);
  if (comm::has_owners(call.collective) && (shard || !bucket)) {
    check_shards(tensor, device, rank, world_size);
  } else {
    check_values(tensor, device, *this);
  }
  if (bucket) check_bucket(tensor, *this, world_size);
  check_difference(tensor, device, world_size);
  check_feedback_of(tensor, *this);
}

void CollectiveOptions::check_difference(const at::Tensor& tensor, const c10::Device& device, int world_size) const {
  if (minus.empty() && !message) return;
  TORCH_CHECK_VALUE(call.collective == comm::Collective::all_reduce && !is_native(tensor.scalar_type()) && bucket && bucket->layout(),
                    "minus, message: expected an all-reduce by a plan, of a bucket whose parameters are divided separately");
  const comm::Layout& layout = *bucket->layout();
  TORCH_CHECK_VALUE(minus.empty() || minus.size() == layout.size(), "minus: expected ", layout.size(), " tensors, got ", minus.size());
  TORCH_CHECK_TYPE(minus.empty() || tensor.scalar_type() == at::kFloat,
                   "tensor: expected dtype float32 where something is subtracted, got ", tensor.scalar_type());
  for (size_t i = 0; i < minus.size(); ++i) elements_of({minus[i], text("minus[", i, "]")}, device, layout[i].span.count);
  if (!message) return;
  comm::CallOptions options = call;
  options.layout = &layout;
  const int64_t bytes = comm::encoded(options, tensor.numel(), world_size).bytes;
  check_dense({*message, "message", true}, device);
  TORCH_CHECK_VALUE(message->scalar_type() == at::kByte && message->numel() == bytes && bytes > 0, "message: expected ", bytes,
                    " numbers of uint8, more than 0, got ", message->toString(), " of shape ", message->sizes());
}

void CollectiveOptions::check_shards(const at::Tensor& tensor, const c10::Device& device, int rank, int world_size) const {
  const bool scatters = call.collective == comm::Collective::reduce_scatter;
  const Argument whole{tensor, scatters ? "input" : "output", true}, part{shard.value(), scatters ? "output" : "input", true};
  const auto& [read, written] = scatters ? std::tie(whole, part) : std::tie(part, whole);
  check_location(written.tensor, written.name, device);
  check_location(read.tensor, read.name, device);
  const at::ScalarType type = read.tensor.scalar_type();
  TORCH_CHECK_TYPE(is_verbatim() || fits_plans(type), read.name, ": expected dtype float32, float16 or bfloat16, got ", type);
  TORCH_CHECK_TYPE(written.tensor.scalar_type() == type, written.name, ": expected the dtype of ", read.name, ", ", type, ", got ",
                   written.tensor.scalar_type());
  if (sizes.empty()) {
    TORCH_CHECK_VALUE(tensor.numel() == part.tensor.numel() * world_size, whole.name, ": expected ", world_size,
                      " times as many elements as ", part.name, ", ", part.tensor.numel() * world_size, ", got ", tensor.numel());
  } else {
    TORCH_CHECK_VALUE(std::ssize(sizes) == world_size, whole.name, ": expected a tensor for each of ", world_size, " ranks, got ",
                      sizes.size());
    TORCH_CHECK_VALUE(part.tensor.numel() == sizes[rank], part.name, ": expected as many elements as rank ", rank, "'s of ", whole.name,
                      ", ", sizes[rank], ", got ", part.tensor.numel());
  }
  check_written(written.tensor, written.name);
  const auto* const own =
      static_cast<const char*>(tensor.const_data_ptr()) + shards(tensor.numel(), world_size)[rank].first * tensor.element_size();
  const bool is_in_place = !scatters && tensor.is_contiguous() && part.tensor.is_contiguous() && part.tensor.const_data_ptr() == own;
  std::vector<Argument> apart = {whole};
  if (!is_in_place) apart.push_back(part);
  if (feedback.residual) {
    check_location(*feedback.residual, "residual", device);
    apart.push_back({*feedback.residual, "residual", true});
  }
  check_apart(apart);
}

void CollectiveOptions::changed(const at::Tensor& tensor) const {
  const char* const name = !comm::has_owners(call.collective) ? "tensor" : "output";
  bindings::changed({{message ? *message : result(tensor), name, true}});
  for (const auto* written : {&feedback.residual, &feedback.spare}) {
    if (*written) bindings::changed({{**written, "residual", true}});
  }
}

}  // namespace dltrain::bindings
