#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <limits>
#include <string>
#include <vector>

#include "bindings/module.h"
#include "bindings/place.h"
#include "core/check.h"
#include "kernels/codec.h"

namespace dltrain::bindings {

namespace {

Dtype dtype_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ? Dtype::fp16 : tensor.scalar_type() == at::kBFloat16 ? Dtype::bf16 : Dtype::fp32;
}

void check_dense(const at::Tensor& tensor, const char* name, const at::Device& device) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch() && !tensor.is_neg() &&
                       !tensor._is_zerotensor(),
                   name, ": expected a plain dense tensor, got layout ", tensor.layout(), " (", tensor.toString(), ")");
  TORCH_CHECK_VALUE(is_supported(tensor.device()), name, ": expected a tensor on ", supported_devices(), ", got one on ", tensor.device());
  TORCH_CHECK_VALUE(tensor.device() == device, name, ": expected a tensor on ", device, ", got one on ", tensor.device());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, ": expected a contiguous tensor, got shape ", tensor.sizes(), " with strides ",
                    tensor.strides());
}

// Of `numel` elements; fp16 or not.
Elements elements_of(const at::Tensor& tensor, const char* name, const at::Device& device, int64_t numel, bool fp16 = true) {
  check_dense(tensor, name, device);
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kBFloat16 || (fp16 && type == at::kHalf), name, ": expected dtype float32",
                   fp16 ? ", float16" : "", " or bfloat16, got ", type);
  TORCH_CHECK_VALUE(tensor.numel() == numel, name, ": expected ", numel, " elements, got ", tensor.numel());
  return {const_cast<void*>(tensor.const_data_ptr()), dtype_of(tensor)};
}

uint8_t* message_of(const at::Tensor& tensor, const std::string& name, const at::Device& device, const Codec& codec, int64_t numel) {
  check_dense(tensor, name.c_str(), device);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kByte, name, ": expected dtype uint8, got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.numel() == codec.bytes(numel), name, ": expected ", codec.bytes(numel), " bytes, which ", numel,
                    " elements are in ", codec.name, ", got ", tensor.numel());
  return const_cast<uint8_t*>(tensor.const_data_ptr<uint8_t>());
}

template <class T>
T* number_of(const at::Tensor& tensor, const char* name, const at::Device& device) {
  check_dense(tensor, name, device);
  TORCH_CHECK_TYPE(tensor.scalar_type() == c10::CppTypeToScalarType<T>::value && tensor.numel() == 1, name, ": expected one ",
                   c10::CppTypeToScalarType<T>::value, " number, got ", tensor.toString(), " of shape ", tensor.sizes());
  return const_cast<T*>(tensor.const_data_ptr<T>());
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % sizeof(float) == 0; }

// Messages hold numbers of up to four bytes, each on its border.
const uint8_t* readable(const uint8_t* message, const at::Tensor& tensor, std::vector<at::Tensor>& kept) {
  if (is_aligned(message)) return message;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return kept.emplace_back(tensor.clone()).const_data_ptr<uint8_t>();
}

uint8_t* writable(uint8_t* message) {
  TORCH_CHECK_VALUE(is_aligned(message), "wire: expected memory on a 4-byte border, got address ", static_cast<const void*>(message));
  return message;
}

uint32_t word(int64_t number, const char* name) {
  constexpr int64_t largest = std::numeric_limits<uint32_t>::max();
  TORCH_CHECK_VALUE(number >= 0 && number <= largest, name, ": expected 0 to ", largest, ", got ", number);
  return static_cast<uint32_t>(number);
}

void changed(std::initializer_list<const at::Tensor*> tensors) {
  for (const at::Tensor* tensor : tensors) {
    if (tensor && !tensor->unsafeGetTensorImpl()->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
  }
}

const at::Tensor* given(const std::optional<at::Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

void encode_sum_op(const at::Tensor& tensor, at::TensorList received, const std::string& codec_name, int64_t position, double scale,
                   const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& loss_scale,
                   const std::optional<at::Tensor>& wire, const std::optional<at::Tensor>& decoded, bool stochastic, int64_t seed,
                   int64_t step, int64_t rank, int64_t first) {
  const Codec& codec = find_codec(codec_name);
  const at::Device device = tensor.device();
  std::vector<at::Tensor> kept;
  std::vector<const uint8_t*> messages;
  Sum sum;
  sum.numel = tensor.numel();
  sum.own = elements_of(tensor, "tensor", device, sum.numel);
  sum.scale = static_cast<float>(scale);
  for (size_t k = 0; k < received.size(); ++k) {
    const uint8_t* const message = message_of(received[k], "received[" + std::to_string(k) + "]", device, codec, sum.numel);
    messages.push_back(readable(message, received[k], kept));
  }
  sum.received = messages.data();
  sum.count = static_cast<int>(messages.size());
  TORCH_CHECK_VALUE(position >= 0 && position <= sum.count, "position: expected 0 to ", sum.count, ", got ", position);
  sum.own_place = static_cast<int>(position);
  TORCH_CHECK_VALUE(wire || decoded, "wire, decoded: expected at least one of them");
  if (residual) {
    TORCH_CHECK_VALUE(wire, "residual: expected none where no wire is encoded");
    TORCH_CHECK_VALUE(!stochastic || codec.stochastic_error.rms < 1.0,
                      "residual: expected none where the rounding is stochastic and the codec ", codec.name,
                      ", whose error can exceed what it encodes: feedback would make it grow");
    sum.residual = elements_of(*residual, "residual", device, sum.numel, false);
  }
  if (loss_scale) sum.loss_scale = number_of<float>(*loss_scale, "loss_scale", device);
  if (wire) sum.message = writable(message_of(*wire, "wire", device, codec, sum.numel));
  if (decoded) sum.decoded = elements_of(*decoded, "decoded", device, sum.numel);
  sum.stochastic = stochastic;
  TORCH_CHECK_VALUE(seed >= 0, "seed: expected at least 0, got ", seed);
  sum.random = {static_cast<uint64_t>(seed), word(step, "step"), word(rank, "rank")};
  TORCH_CHECK_VALUE(first >= 0 && first % 4 == 0, "first: expected a multiple of 4, got ", first);
  sum.first = first;

  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::make_optional(device));
  codec.encode_sum(caller_place(device), sum);
  changed({given(residual), given(wire), given(decoded)});
}

void decode_op(const at::Tensor& wire, const std::string& codec_name, const at::Tensor& out, const std::optional<at::Tensor>& sum_squares,
               const std::optional<at::Tensor>& found_inf) {
  const Codec& codec = find_codec(codec_name);
  const at::Device device = out.device();
  std::vector<at::Tensor> kept;
  const Elements values = elements_of(out, "out", device, out.numel());
  const uint8_t* const message = readable(message_of(wire, "wire", device, codec, out.numel()), wire, kept);
  TORCH_CHECK_VALUE(sum_squares.has_value() == found_inf.has_value(), "sum_squares, found_inf: expected both or neither");
  Statistics statistics;
  if (sum_squares) {
    statistics = {number_of<double>(*sum_squares, "sum_squares", device), number_of<float>(*found_inf, "found_inf", device)};
  }
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::make_optional(device));
  codec.decode(caller_place(device), out.numel(), message, values, statistics);
  changed({&out, given(sum_squares), given(found_inf)});
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
        check(numel >= 0, "numel: expected at least 0, got ", numel);
        return codec.bytes(numel);
      });
  module.def("codecs", &codecs);
  module.def("find_codec", &find_codec);
}

}  // namespace dltrain::bindings
