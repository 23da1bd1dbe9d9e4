#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <bit>
#include <vector>

#include "bindings/module.h"
#include "bindings/optim/private_cpython.h"

namespace dltrain::bindings {

// THPVariable_Check is slow for subclasses such as Parameter, because it uses Python's isinstance.
inline bool is_tensor(PyObject* object) { return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass)); }

// A key of an entry of the state, as an interned string: a dict that has the same object as its key finds it without comparing texts.
inline py::object interned(const char* text) { return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text)); }

// The entry of a parameter in an optimizer's state, or null. hold: keeps alive what has been found so far, because other threads may run
// during the lookup. The hash of a tensor is its address, but calling __hash__ runs Python code, which is a large part of the time that a
// small tensor takes. Only a subclass may have a hash of its own. An object that is not a tensor has no entry, and may not be hashable.
template <class Hold>
PyObject* entry_of(PyObject* state, PyObject* param, Hold&& hold) {
  PyObject* entry = private_cpython::item_by_address(state, param);
  if (!entry && is_tensor(param) && !(private_cpython::used && THPVariable_CheckTypeExact(Py_TYPE(param)))) {
    hold();
    entry = PyDict_GetItemWithError(state, param);
  }
  if (!entry && PyErr_Occurred()) throw py::error_already_set();
  return entry && PyDict_Check(entry) ? entry : nullptr;
}

// The item of a key that is equal to ours but another object, as in an unpickled state.
inline PyObject* find(PyObject* entry, const py::object& key) {
  PyObject* const value = PyDict_GetItemWithError(entry, key.ptr());
  if (!value && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// The Python objects of one parameter, as borrowed references. Objects that do not exist are null.
template <size_t keys>
struct Member {
  PyObject* param;
  std::array<PyObject*, keys> values;
  PyObject* master;
};

// The parameters of a group and their entries in the optimizer's state, which are looked up anew in every step. Every call needs the GIL.
template <size_t keys>
class Members {
 public:
  // names: the keys of an entry, without that of the master.
  explicit Members(const std::array<const char*, keys>& names) : master_key_(interned("master_param")) {
    for (size_t k = 0; k < keys; ++k) keys_[k] = interned(names[k]);
  }

  // Looks up all parameters. wanted: the bits of the keys whose values are needed.
  void look_up(const py::dict& state, const py::list& params, unsigned wanted) {
    constexpr size_t ahead = 8;
    const size_t size = params.size();
    release();
    members_.assign(size, {});
    addresses_.resize(size, {});
    // The list may become shorter during the loop, because a hash may run Python code.
    for (size_t index = 0; index < size && index < params.size(); ++index) {
      if (index + ahead < size) {
        const Address& address = addresses_[index + ahead];
        __builtin_prefetch(address.entry);
        private_cpython::fetch_table(address.table);
      }
      Member<keys>& member = members_[index];
      member.param = PyList_GET_ITEM(params.ptr(), index);
      PyObject* const entry = entry_of(state.ptr(), member.param, [&] {
        hold(index);
        keep(member.param);
      });
      if (!entry) continue;
      addresses_[index] = {entry, private_cpython::table_of(entry)};
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(entry, &at, &key, &value);) {
        for (size_t k = 0; k < keys; ++k) {
          if (key == keys_[k].ptr()) member.values[k] = value;
        }
        if (key == master_key_.ptr()) member.master = value;
      }
      for (size_t k = 0; k < keys; ++k) {
        if (!(wanted >> k & 1)) {
          member.values[k] = nullptr;
        } else if (!member.values[k]) {
          member.values[k] = find(entry, keys_[k]);
        }
      }
      if (!member.master && PyDict_GET_SIZE(entry) > std::popcount(wanted)) member.master = find(entry, master_key_);
    }
  }

  size_t size() const { return members_.size(); }
  const Member<keys>& operator[](size_t index) const { return members_[index]; }

  // Keeps all objects alive until release(): another thread may drop them while a kernel runs without the GIL.
  void hold() { hold(members_.size()); }
  void release() {
    held_.clear();
    held_members_ = 0;
  }

 private:
  void keep(PyObject* object) {
    if (object) held_.push_back(py::reinterpret_borrow<py::object>(object));
  }
  void hold(size_t end) {
    for (; held_members_ < end; ++held_members_) {
      const Member<keys>& member = members_[held_members_];
      keep(member.param);
      for (PyObject* const value : member.values) keep(value);
      keep(member.master);
    }
  }

  std::array<py::object, keys> keys_;
  py::object master_key_;
  std::vector<Member<keys>> members_;
  std::vector<py::object> held_;
  size_t held_members_ = 0;
  // The addresses of the entries in the last step, which are prefetched, so that their cache misses overlap.
  struct Address {
    PyObject* entry;
    const void* table;
  };
  std::vector<Address> addresses_;
};

}  // namespace dltrain::bindings
