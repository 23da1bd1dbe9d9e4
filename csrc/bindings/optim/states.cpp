// States of optimizers as codes: a message of Softsign8 or, for states that are never negative, of Root8.

#include <ATen/ops/empty.h>

#include <vector>

#include "bindings/arguments.h"
#include "bindings/execution_context.h"
#include "bindings/module.h"
#include "bindings/optim/checks.h"
#include "kernels/for_each.h"

namespace dltrain::bindings {

namespace {

void copy(const at::Device& device, void* to, const Format& format, const void* from, const Format& from_format, int64_t numel) {
  TensorList<2> list(Signature<2>{{format, from_format}});
  list.add({to, const_cast<void*>(from)}, numel);
  const auto guard = on_device(device);
  const py::gil_scoped_release no_gil;
  for_each(caller_context(device), list, Copy{});
}

Format codes(bool nonnegative) { return nonnegative ? format_of<math::Root8>() : format_of<math::Softsign8>(); }

// state: fp32, contiguous. Writes its codes, in the order of its elements.
void encode_state(const at::Tensor& state, const at::Tensor& out, bool nonnegative) {
  check_tensor(state, "state", 0, state, /*may_be_half=*/false);
  TORCH_CHECK_VALUE(state.is_contiguous(), "state: expected a contiguous tensor");
  check_codes(out, "out", 0, state);
  copy(state.device(), out.mutable_data_ptr(), codes(nonnegative), state.const_data_ptr(), Dtype::fp32, state.numel());
}

at::Tensor decode_state(const at::Tensor& given, const std::vector<int64_t>& shape, bool nonnegative) {
  const at::Tensor out = at::empty(shape, given.options().dtype(at::kFloat));
  check_codes(given, "codes", 0, out);
  copy(given.device(), out.mutable_data_ptr(), Dtype::fp32, given.const_data_ptr(), codes(nonnegative), out.numel());
  return out;
}

}  // namespace

void bind_states(py::module_& module) {
  module.def("state_bytes", detail::state_bytes, py::arg("numel"));
  module.def("encode_state", encode_state, py::arg("state"), py::kw_only(), py::arg("out"), py::arg("nonnegative"));
  module.def("decode_state", decode_state, py::arg("codes"), py::arg("shape"), py::kw_only(), py::arg("nonnegative"));
}

}  // namespace dltrain::bindings
