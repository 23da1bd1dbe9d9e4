#include "bindings/module.h"

#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

// Tensors that stand for other values than their memory holds reach the ops as they are. Torch would bring copies, and write back what the
// op returns, which is nothing: it would read beyond its stack.
static void take_as_they_are(torch::Library& library) {
  std::vector<std::string> ops = dltrain::bindings::optimizer_ops();
  ops.insert(ops.end(), {"decode_", "encode_sum_"});
  for (const std::string& op : ops) library.impl(op.c_str(), torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(dltrain_ext, Negative, library) { take_as_they_are(library); }
TORCH_LIBRARY_IMPL(dltrain_ext, Conjugate, library) { take_as_they_are(library); }
TORCH_LIBRARY_IMPL(dltrain_ext, ZeroTensor, library) { take_as_they_are(library); }

PYBIND11_MODULE(_C, module) {
  // Errors keep the type and the text that torch gives them; those of the torch-free rooms are pybind11's to translate.
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
  dltrain::bindings::bind_codecs(module);
  dltrain::bindings::bind_plans(module);
  dltrain::bindings::bind_simulate(module);
  dltrain::bindings::bind_buckets(module);
  dltrain::bindings::bind_levels(module);
  dltrain::bindings::bind_communicator(module);
}
