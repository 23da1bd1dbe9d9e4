#include "bindings/module.h"

#include <torch/csrc/Exceptions.h>

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
