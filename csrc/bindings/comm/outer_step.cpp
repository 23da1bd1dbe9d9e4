#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/comm/bucket.h"
#include "bindings/execution_context.h"
#include "bindings/module.h"
#include "comm/run/executor.h"

namespace dltrain::bindings {

namespace {

// The layout of the message that an all-reduce of the bucket leaves.
comm::Encoded message_of(const BucketState& bucket, int64_t numel, const std::string& algorithm, const std::string& codec, int world_size) {
  TORCH_CHECK_VALUE(bucket.layout(), "bucket: expected one whose parameters are divided separately");
  comm::CallOptions call;
  call.algorithm = algorithm;
  call.codec = codec;
  call.layout = bucket.layout();
  return comm::encoded(call, numel, world_size);
}

struct OuterTensors {
  at::Tensor backup;
  std::optional<at::Tensor> momentum;
  std::vector<at::Tensor> parameters;
  std::vector<std::optional<at::Tensor>> copies;
};

// Returns whether all elements of the mean were finite.
bool outer_step(const BucketState& bucket, const at::Tensor& message, const std::string& algorithm, const std::string& codec_name,
                int world_size, const OuterTensors& tensors, const math::OuterStep& rule) {
  const at::Device device = tensors.backup.device();
  const int64_t numel = tensors.backup.numel();
  const comm::Encoded encoded = message_of(bucket, numel, algorithm, codec_name, world_size);
  const comm::Layout& layout = *bucket.layout();
  bucket.check(tensors.backup);
  TORCH_CHECK_VALUE(device.is_cpu(), "backup: expected a tensor on the CPU, got one on ", device);
  TORCH_CHECK_VALUE(message.numel() == encoded.bytes && message.scalar_type() == at::kByte, "message: expected ", encoded.bytes,
                    " numbers of uint8, got ", message.toString(), " of shape ", message.sizes());
  TORCH_CHECK_VALUE(tensors.parameters.size() == layout.size() && tensors.copies.size() == layout.size(),
                    "parameters, copies: expected one for each of ", layout.size(), ", got ", tensors.parameters.size(), " and ",
                    tensors.copies.size());
  std::vector<Argument> arguments = {{message, "message"}, {tensors.backup, "backup", true}};
  check_dense(arguments[0], device);
  arguments.reserve(2 * layout.size() + 3);
  int nonfinite = 0;
  OuterUpdate whole;
  whole.rule = rule;
  whole.nonfinite = &nonfinite;
  whole.backup = static_cast<float*>(elements_of(arguments[1], device, numel).data);
  if (tensors.momentum) {
    whole.momentum = static_cast<float*>(elements_of(arguments.emplace_back(*tensors.momentum, "momentum", true), device, numel).data);
  }
  std::vector<TypedPointer> parameters, copies;
  for (size_t i = 0; i < layout.size(); ++i) {
    const int64_t count = layout[i].span.count;
    parameters.push_back(elements_of(arguments.emplace_back(tensors.parameters[i], "parameters", true), device, count));
    const auto& copy = tensors.copies[i];
    copies.push_back(copy ? elements_of(arguments.emplace_back(*copy, "copies", true), device, count) : TypedPointer());
  }
  check_apart(arguments);

  const auto* const bytes = message.const_data_ptr<uint8_t>();
  std::vector<OuterUpdate> updates;
  for (const Codec& codec : codecs()) {
    updates.clear();
    for (const auto& [part, slot] : encoded.parts) {
      if (part.codec != &codec) continue;
      const int64_t first = part.span.first;
      const size_t region = comm::region_at(layout, first);
      const int64_t within = first - layout[region].span.first;
      OuterUpdate update = whole;
      update.numel = part.span.count;
      update.message = bytes + slot;
      update.backup += first;
      if (update.momentum) update.momentum += first;
      update.parameter = parameters[region].from(within);
      update.copy = copies[region].from(within);
      updates.push_back(update);
    }
    if (!updates.empty()) codec.outer_steps(caller_context(device), updates);
  }
  changed(arguments);
  return nonfinite == 0;
}

}  // namespace

void bind_outer_step(py::module_& module) {
  module.def(
      "message_bytes",
      [](const BucketState& bucket, int64_t numel, const std::string& algorithm, const std::string& codec, int world_size) {
        return message_of(bucket, numel, algorithm, codec, world_size).bytes;
      },
      py::arg("bucket"), py::arg("numel"), py::kw_only(), py::arg("algorithm"), py::arg("codec"), py::arg("world_size"));
  module.def(
      "outer_step",
      [](const BucketState& bucket, const at::Tensor& message, at::Tensor backup, std::optional<at::Tensor> momentum_buffer,
         std::vector<at::Tensor> parameters, std::vector<std::optional<at::Tensor>> copies, const std::string& algorithm,
         const std::string& codec, int world_size, float lr, float momentum, bool nesterov, float mix) {
        const OuterTensors tensors{std::move(backup), std::move(momentum_buffer), std::move(parameters), std::move(copies)};
        const py::gil_scoped_release no_gil;
        return outer_step(bucket, message, algorithm, codec, world_size, tensors, {lr, momentum, nesterov, mix});
      },
      py::arg("bucket"), py::arg("message"), py::kw_only(), py::arg("backup"), py::arg("momentum_buffer"), py::arg("parameters"),
      py::arg("copies"), py::arg("algorithm"), py::arg("codec"), py::arg("world_size"), py::arg("lr"), py::arg("momentum"),
      py::arg("nesterov"), py::arg("mix"));
}

}  // namespace dltrain::bindings
