#include "bindings/module.h"

#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

// Lazy tensors, whose values differ from their memory, are passed to the ops unchanged. Torch's fallback would pass copies and write back
// what the op returns. The ops return nothing, so it would read beyond its stack.
static void pass_unchanged(torch::Library& library) {
  std::vector<std::string> ops = dltrain::bindings::optimizer_ops();
  ops.insert(ops.end(), {"decode_", "encode_sum_", "all_reduce_"});
  for (const std::string& op : ops) library.impl(op.c_str(), torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(dltrain_ext, Negative, library) { pass_unchanged(library); }
TORCH_LIBRARY_IMPL(dltrain_ext, Conjugate, library) { pass_unchanged(library); }
TORCH_LIBRARY_IMPL(dltrain_ext, ZeroTensor, library) { pass_unchanged(library); }

PYBIND11_MODULE(_C, module) {
  // Errors of torch keep their type and text; pybind11 translates the errors of the modules without torch.
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(error);
    }
  });
  dltrain::bindings::bind_build(module);
  dltrain::bindings::bind_groups(module);
  dltrain::bindings::bind_optimizers(module);
  dltrain::bindings::bind_states(module);
  dltrain::bindings::bind_codecs(module);
  dltrain::bindings::bind_plans(module);
  dltrain::bindings::bind_simulate(module);
  dltrain::bindings::bind_buckets(module);
  dltrain::bindings::bind_levels(module);
  dltrain::bindings::bind_communicator(module);
  dltrain::bindings::bind_outer_step(module);
  dltrain::bindings::bind_mailbox(module);
  dltrain::bindings::bind_store(module);
}
