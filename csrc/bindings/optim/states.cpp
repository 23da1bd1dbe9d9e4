#include "bindings/optim/states.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "bindings/execution_context.h"
#include "bindings/module.h"
#include "bindings/optim/checks.h"
#include "kernels/for_each.h"

namespace dltrain::bindings {

namespace {

// extension: of the tensor whose elements are extended; it is written if `to` is that tensor.
template <class Operation>
void run(const Operation& operation, const at::Tensor& to, const Format& format, const at::Tensor& from, const Format& from_format,
         int64_t numel, const at::Tensor& extension = {}) {
  TensorList<2> list(Signature<2>{{format, from_format}});
  void* const beside = extension.defined() ? extension.mutable_data_ptr() : nullptr;
  list.add({to.mutable_data_ptr(), const_cast<void*>(from.const_data_ptr())}, numel, {}, beside);
  const auto guard = on_device(to.device());
  const py::gil_scoped_release no_gil;
  for_each(caller_context(to.device()), list, operation);
}

constexpr Format extended_format(Dtype::bf16, Narrowing::extended);

// Returns the codes of the elements in the order of their indices.
at::Tensor encode_state(const at::Tensor& given, bool nonnegative) {
  check_tensor(given, "state", 0, given, /*may_be_half=*/false);
  const at::Tensor state = given.contiguous();
  const at::Tensor codes = at::empty({state_bytes(state.numel())}, state.options().dtype(at::kByte));
  run(Copy{}, codes, codes_of(nonnegative), state, Dtype::fp32, state.numel());
  return codes;
}

at::Tensor decode_state(const at::Tensor& codes, const std::vector<int64_t>& shape, bool nonnegative) {
  const at::Tensor state = at::empty(shape, codes.options().dtype(at::kFloat));
  check_codes(codes, "codes", 0, state);
  run(Copy{}, state, Dtype::fp32, codes, codes_of(nonnegative), state.numel());
  return state;
}

// Returns eight bits of each element of a bf16 parameter, as bytes, which extend it to the master as well as they can.
at::Tensor encode_master(const at::Tensor& given, const at::Tensor& param) {
  check_tensor(given, "master", 0, param, /*may_be_half=*/false);
  const at::Tensor master = given.contiguous(), elements = param.detach().clone(at::MemoryFormat::Contiguous);
  const at::Tensor extension = at::zeros(param.sizes(), param.options().dtype(at::kByte));  // in the order of the indices
  check_extension(extension, "master", 0, param, /*usable=*/true);
  run(Extend{}, elements, extended_format, master, Dtype::fp32, master.numel(), extension);
  return at::empty_like(param, extension.options()).copy_(extension);
}

at::Tensor decode_master(const at::Tensor& given, const at::Tensor& param) {
  check_extension(given, "master", 0, param, /*usable=*/true);
  const at::Tensor extension = given.contiguous(), elements = param.detach().contiguous();
  const at::Tensor master = at::empty(param.sizes(), param.options().dtype(at::kFloat));
  run(Copy{}, master, Dtype::fp32, elements, extended_format, master.numel(), extension);
  return master;
}

}  // namespace

void bind_states(py::module_& module) {
  module.def("state_bytes", state_bytes, py::arg("numel"));
  module.def("encode_state", encode_state, py::arg("state"), py::kw_only(), py::arg("nonnegative"));
  module.def("decode_state", decode_state, py::arg("codes"), py::arg("shape"), py::kw_only(), py::arg("nonnegative"));
  module.def("encode_master", encode_master, py::arg("master"), py::arg("param"));
  module.def("decode_master", decode_master, py::arg("master"), py::arg("param"));
}

}  // namespace dltrain::bindings
