#include "bindings/execution_context.h"
#include "bindings/module.h"
#include "core/execution_context.h"
#include "kernels/cpu/instruction_set.h"

namespace dltrain::bindings {

void bind_build(py::module_& module) {
  cpu::instruction_set();  // so that a name that cannot be used is an error now, and not in the first step
  module.attr("built_with_cuda") = built_with_cuda;
  module.attr("supported_devices") = supported_devices();
  module.def("is_supported", &is_supported);
  module.def("instruction_set", [] { return cpu::instruction_set().name; });
  module.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const auto& set : cpu::instruction_sets()) names.push_back(set.name);
    return names;
  });
}

}  // namespace dltrain::bindings
