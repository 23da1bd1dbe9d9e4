#include "bindings/module.h"

#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

// Tensors that stand for other values than their memory holds reach the ops as they are. Torch would bring copies, and write back what the
// op returns, which is nothing: it would read beyond its stack.
#define DLT_AS_THEY_ARE(KEY)                                                       \
  TORCH_LIBRARY_IMPL(dltrain_ext, KEY, library) {                                  \
    for (const char* op : {"adamw_", "decode_", "encode_sum_", "lars_", "sgd_"}) { \
      library.impl(op, torch::CppFunction::makeFallthrough());                     \
    }                                                                              \
  }
DLT_AS_THEY_ARE(Negative)
DLT_AS_THEY_ARE(Conjugate)
DLT_AS_THEY_ARE(ZeroTensor)

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
  dltrain::bindings::bind_adamw(module);
  dltrain::bindings::bind_lars(module);
  dltrain::bindings::bind_sgd(module);
  dltrain::bindings::bind_codecs(module);
  dltrain::bindings::bind_plans(module);
  dltrain::bindings::bind_simulate(module);
  dltrain::bindings::bind_buckets(module);
  dltrain::bindings::bind_levels(module);
  dltrain::bindings::bind_communicator(module);
}
