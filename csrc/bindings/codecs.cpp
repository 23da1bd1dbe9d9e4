#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/execution_context.h"
#include "bindings/module.h"
#include "core/check.h"
#include "kernels/codec.h"

namespace dltrain::bindings {

namespace {

uint8_t* message_of(const Argument& argument, const at::Device& device, const Codec& codec, int64_t numel) {
  check_dense(argument, device);
  TORCH_CHECK_TYPE(argument.tensor.scalar_type() == at::kByte, argument.name, ": expected dtype uint8, got ",
                   argument.tensor.scalar_type());
  TORCH_CHECK_VALUE(argument.tensor.numel() == codec.bytes(numel), argument.name, ": expected ", codec.bytes(numel), " bytes, which ",
                    numel, " elements are in ", codec.name, ", got ", argument.tensor.numel());
  return static_cast<uint8_t*>(argument.data());
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % sizeof(float) == 0; }

// Messages hold numbers of up to four bytes, which must be aligned. An unaligned message is copied, and `kept` owns the copy.
const uint8_t* readable(const uint8_t* message, const at::Tensor& tensor, std::vector<at::Tensor>& kept) {
  if (is_aligned(message)) return message;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return kept.emplace_back(tensor.clone()).const_data_ptr<uint8_t>();
}

uint8_t* writable(uint8_t* message) {
  TORCH_CHECK_VALUE(is_aligned(message), "wire: expected memory aligned to 4 bytes, got address ", static_cast<const void*>(message));
  return message;
}

uint32_t word(int64_t number, const char* name) {
  constexpr int64_t largest = std::numeric_limits<uint32_t>::max();
  TORCH_CHECK_VALUE(number >= 0 && number <= largest, name, ": expected 0 to ", largest, ", got ", number);
  return static_cast<uint32_t>(number);
}

void encode_sum_op(const at::Tensor& tensor, at::TensorList received, const std::string& codec_name, int64_t position, double scale,
                   const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& loss_scale,
                   const std::optional<at::Tensor>& wire, const std::optional<at::Tensor>& decoded, bool stochastic, int64_t seed,
                   int64_t step, int64_t rank, int64_t first) {
  const Codec& codec = find_codec(codec_name);
  TORCH_CHECK_TYPE(tensor.defined(), "tensor: expected a tensor, got none");
  const at::Device device = tensor.device();
  std::vector<at::Tensor> kept;
  std::vector<const uint8_t*> messages;
  std::vector<Argument> arguments;
  const auto argument = [&](const at::Tensor& given, std::string name, bool written = false) -> const Argument& {
    return arguments.emplace_back(Argument{given, std::move(name), written});
  };
  arguments.reserve(received.size() + 5);
  Sum sum;
  sum.numel = tensor.numel();
  sum.own = elements_of(argument(tensor, "tensor"), device, sum.numel);
  TORCH_CHECK_VALUE(!std::isfinite(scale) || std::abs(scale) <= std::numeric_limits<float>::max(),
                    "scale: expected a number that float32 holds, got ", scale);
  sum.scale = static_cast<float>(scale);
  for (size_t k = 0; k < received.size(); ++k) {
    const uint8_t* const message = message_of(argument(received[k], "received[" + std::to_string(k) + "]"), device, codec, sum.numel);
    messages.push_back(readable(message, received[k], kept));
  }
  sum.received = messages.data();
  sum.count = static_cast<int>(messages.size());
  TORCH_CHECK_VALUE(position >= 0 && position <= sum.count, "position: expected 0 to ", sum.count, ", got ", position);
  sum.own_position = static_cast<int>(position);
  TORCH_CHECK_VALUE(wire || decoded, "wire, decoded: expected at least one of them");
  if (residual) {
    TORCH_CHECK_VALUE(wire, "residual: expected none where no wire is encoded");
    check_feedback(codec, stochastic);
    sum.feedback.residual = elements_of(argument(*residual, "residual", true), device, sum.numel, false);
  }
  if (loss_scale) sum.feedback.loss_scale = number_of<float>(argument(*loss_scale, "loss_scale"), device);
  if (wire) sum.message = writable(message_of(argument(*wire, "wire", true), device, codec, sum.numel));
  if (decoded) sum.decoded = elements_of(argument(*decoded, "decoded", true), device, sum.numel);
  TORCH_CHECK_VALUE(seed >= 0, "seed: expected at least 0, got ", seed);
  TORCH_CHECK_VALUE(first >= 0 && first % 4 == 0, "first: expected a multiple of 4, got ", first);
  sum.rounding = {stochastic, {static_cast<uint64_t>(seed), word(step, "step"), word(rank, "rank")}, first};
  check_apart(arguments);

  const auto guard = on_device(device);
  codec.encode_sum(caller_context(device), sum);
  changed(arguments);
}

void decode_op(const at::Tensor& wire, const std::string& codec_name, const at::Tensor& out, const std::optional<at::Tensor>& sum_squares,
               const std::optional<at::Tensor>& found_inf) {
  const Codec& codec = find_codec(codec_name);
  TORCH_CHECK_TYPE(wire.defined() && out.defined(), "wire, out: expected tensors, got none");
  const at::Device device = out.device();
  std::vector<at::Tensor> kept;
  std::vector<Argument> arguments = {{wire, "wire"}, {out, "out", true}};
  const TypedPointer values = elements_of(arguments[1], device, out.numel());
  const uint8_t* const message = readable(message_of(arguments[0], device, codec, out.numel()), wire, kept);
  TORCH_CHECK_VALUE(sum_squares.has_value() == found_inf.has_value(), "sum_squares, found_inf: expected both or neither");
  Statistics statistics;
  if (sum_squares) {
    arguments.push_back({*sum_squares, "sum_squares", true});
    arguments.push_back({*found_inf, "found_inf", true});
    statistics = {number_of<double>(arguments[2], device), number_of<float>(arguments[3], device)};
  }
  check_apart(arguments);
  const auto guard = on_device(device);
  codec.decode(caller_context(device), out.numel(), message, values, statistics);
  changed(arguments);
}

TORCH_LIBRARY_FRAGMENT(dltrain_ext, library) {
  library.def(
      "encode_sum_(Tensor tensor, Tensor[] received, str codec, *, int position=0, float scale=1.0, Tensor(a!)? residual=None, Tensor? "
      "loss_scale=None, Tensor(b!)? wire=None, Tensor(c!)? decoded=None, bool stochastic=False, int seed=0, int step=0, int rank=0, int "
      "first=0) -> ()");
  library.def("decode_(Tensor wire, str codec, Tensor(a!) out, *, Tensor(b!)? sum_squares=None, Tensor(c!)? found_inf=None) -> ()");
}

TORCH_LIBRARY_IMPL(dltrain_ext, CPU, library) {
  library.impl("encode_sum_", encode_sum_op);
  library.impl("decode_", decode_op);
}
TORCH_LIBRARY_IMPL(dltrain_ext, CUDA, library) {
  if constexpr (built_with_cuda) {
    library.impl("encode_sum_", encode_sum_op);
    library.impl("decode_", decode_op);
  }
}

}  // namespace

void bind_codecs(py::module_& module) {
  py::class_<Codec>(module, "Codec")
      .def_readonly("name", &Codec::name)
      .def_readonly("block", &Codec::block)
      .def_readonly("alignment", &Codec::alignment)
      .def_readonly("scaled", &Codec::scaled)
      .def_readonly("bits", &Codec::bits)
      .def("error",
           [](const Codec& codec, bool stochastic) {
             const math::Bound& bound = stochastic ? codec.stochastic_error : codec.nearest_error;
             return std::pair(bound.max, bound.rms);
           })
      .def("bytes", [](const Codec& codec, int64_t numel) {
        constexpr int64_t most = int64_t{1} << 60;
        check(numel >= 0 && numel <= most, "numel: expected 0 to ", most, ", got ", numel);
        return codec.bytes(numel);
      });
  module.def("codecs", &codecs);
  module.def("find_codec", &find_codec);
  module.def("check_feedback", [](const std::string& codec, bool stochastic, const std::string& expected) {
    check_feedback(find_codec(codec), stochastic, expected);
  });
}

}  // namespace dltrain::bindings
