#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <vector>

#include "bindings/module.h"

namespace dltrain::bindings {

// What Python holds of one parameter; borrowed. Null is what it does not hold.
struct Member {
  static constexpr size_t max_keys = 4;

  PyObject* param;
  std::array<PyObject*, max_keys> values;
  PyObject* master;
};

// The parameters of a group with their entries in the optimizer's state, looked up anew at every step. Every call needs the GIL.
class Members {
 public:
  // What an entry is made of, beside the master.
  explicit Members(const std::vector<const char*>& keys);

  // With the values of the first `keys` keys.
  void look_up(const py::dict& state, const py::list& params, size_t keys);
  size_t size() const { return members_.size(); }
  const Member& operator[](size_t index) const { return members_[index]; }

  // Until release() nothing of it goes away: another thread may drop it while a kernel runs without the GIL.
  void hold() { hold(members_.size()); }
  void release();

 private:
  PyObject* entry_of(PyObject* state, size_t index);
  PyObject* find(PyObject* entry, const py::object& key);
  void hold(size_t end);

  std::vector<py::object> keys_;
  py::object master_key_;
  std::vector<Member> members_;
  std::vector<py::object> held_;
  size_t held_members_ = 0;
  // Where the entries lay at the last step: fetched ahead, their cache misses overlap.
  struct Place {
    PyObject* entry;
    const void* keys;
  };
  std::vector<Place> places_;
};

// THPVariable_Check asks a subclass, such as Parameter, in Python's slow way.
inline bool is_tensor(PyObject* object) { return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass)); }

}  // namespace dltrain::bindings
