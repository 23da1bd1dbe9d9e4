#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <array>
#include <initializer_list>
#include <vector>

namespace dltrain::bindings {

// Where the objects of each parameter of a group lay at the last step. Reading a parameter anew follows a chain of pointers, a cache miss
// each; fetching the lines of those that come next lets the misses overlap. A line that has moved costs nothing but its fetch.
class Trail {
 public:
  void restart(size_t parameters) {
    places_.resize(parameters, {});
    at_ = 0;
  }

  // Comes to the next parameter.
  void next() {
    constexpr size_t ahead = 8;
    if (at_ + ahead < places_.size()) {
      for (const char* place : places_[at_ + ahead]) __builtin_prefetch(place);
    }
    note_ = places_[at_++].data();
  }

  // The parameter's Python object and its entry in the optimizer's state.
  void note(PyObject* param, PyObject* values) {
    *note_++ = address(param);
    *note_++ = address(values);
    *note_++ = values ? address(reinterpret_cast<PyDictObject*>(values)->ma_keys) : nullptr;
  }

  void note(std::initializer_list<const at::Tensor*> tensors) { note(tensors.begin(), tensors.size()); }

  void note(const at::Tensor* const* tensors, size_t count) {
    for (const at::Tensor* tensor : c10::ArrayRef(tensors, count)) {
      const c10::TensorImpl* const impl = tensor->unsafeGetTensorImpl();
      *note_++ = address(tensor);
      *note_++ = address(impl->unsafe_storage().unsafeGetStorageImpl());
      for (size_t line = 0; line < impl_lines; ++line) *note_++ = address(impl) + 64 * line;
    }
  }

 private:
  static const char* address(const void* object) { return static_cast<const char*>(object); }

  static constexpr size_t impl_lines = (sizeof(c10::TensorImpl) + 63) / 64;
  static constexpr size_t lines = 3 + 5 * (2 + impl_lines);
  std::vector<std::array<const char*, lines>> places_;
  const char** note_ = nullptr;
  size_t at_ = 0;
};

}  // namespace dltrain::bindings
