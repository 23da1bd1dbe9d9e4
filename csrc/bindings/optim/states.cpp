#include "bindings/optim/states.h"

#include <ATen/ops/empty.h>

#include <vector>

#include "bindings/execution_context.h"
#include "bindings/module.h"
#include "bindings/optim/checks.h"
#include "kernels/for_each.h"

namespace dltrain::bindings {

namespace {

void copy(const at::Tensor& to, const Format& format, const at::Tensor& from, const Format& from_format, int64_t numel) {
  TensorList<2> list(Signature<2>{{format, from_format}});
  list.add({to.mutable_data_ptr(), const_cast<void*>(from.const_data_ptr())}, numel);
  const auto guard = on_device(to.device());
  const py::gil_scoped_release no_gil;
  for_each(caller_context(to.device()), list, Copy{});
}

// Returns the codes of the elements in the order of their indices.
at::Tensor encode_state(const at::Tensor& given, bool nonnegative) {
  check_tensor(given, "state", 0, given, /*may_be_half=*/false);
  const at::Tensor state = given.contiguous();
  const at::Tensor codes = at::empty({state_bytes(state.numel())}, state.options().dtype(at::kByte));
  copy(codes, codes_of(nonnegative), state, Dtype::fp32, state.numel());
  return codes;
}

at::Tensor decode_state(const at::Tensor& codes, const std::vector<int64_t>& shape, bool nonnegative) {
  const at::Tensor state = at::empty(shape, codes.options().dtype(at::kFloat));
  check_codes(codes, "codes", 0, state);
  copy(state, Dtype::fp32, codes, codes_of(nonnegative), state.numel());
  return state;
}

}  // namespace

void bind_states(py::module_& module) {
  module.def("state_bytes", state_bytes, py::arg("numel"));
  module.def("encode_state", encode_state, py::arg("state"), py::kw_only(), py::arg("nonnegative"));
  module.def("decode_state", decode_state, py::arg("codes"), py::arg("shape"), py::kw_only(), py::arg("nonnegative"));
}

}  // namespace dltrain::bindings
