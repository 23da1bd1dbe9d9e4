#include "bindings/optim/members.h"

namespace dltrain::bindings {

namespace {

// A dict finds the very object that is its key without comparing texts.
py::object interned(const char* text) { return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text)); }

}  // namespace

Members::Members(const std::vector<const char*>& keys) : master_key_(interned("master_param")) {
  TORCH_INTERNAL_ASSERT(keys.size() <= Member::max_keys);
  for (const char* key : keys) keys_.push_back(interned(key));
}

void Members::look_up(const py::dict& state, const py::list& params, size_t keys) {
  constexpr size_t ahead = 8;
  const size_t size = params.size();
  release();
  members_.assign(size, {});
  places_.resize(size, {});
  // The list may become shorter where a hash is Python code.
  for (size_t index = 0; index < size && index < params.size(); ++index) {
    if (index + ahead < size) {
      const Place& place = places_[index + ahead];
      __builtin_prefetch(place.entry);
      for (int line = 0; line < 3; ++line) __builtin_prefetch(static_cast<const char*>(place.keys) + 64 * line);
    }
    Member& member = members_[index];
    member.param = PyList_GET_ITEM(params.ptr(), index);
    PyObject* const entry = entry_of(state.ptr(), index);
    if (!entry) continue;
    places_[index] = {entry, reinterpret_cast<PyDictObject*>(entry)->ma_keys};
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(entry, &at, &key, &value);) {
      for (size_t k = 0; k < keys; ++k) {
        if (key == keys_[k].ptr()) member.values[k] = value;
      }
      if (key == master_key_.ptr()) member.master = value;
    }
    for (size_t k = 0; k < keys; ++k) {
      if (!member.values[k]) member.values[k] = find(entry, keys_[k]);
    }
    if (!member.master && static_cast<size_t>(PyDict_GET_SIZE(entry)) > keys) member.master = find(entry, master_key_);
  }
}

// A tensor's hash is its address, but asking for it calls Python code, which is a good part of what a small tensor costs. Only a subclass
// may have a hash of its own; as other threads may run meanwhile, what has been looked up is held before.
PyObject* Members::entry_of(PyObject* state, size_t index) {
  PyObject* const param = members_[index].param;
  PyObject* entry = _PyDict_GetItem_KnownHash(state, param, static_cast<Py_hash_t>(reinterpret_cast<uintptr_t>(param)));
  if (!entry && is_tensor(param) && !THPVariable_CheckTypeExact(Py_TYPE(param))) {
    hold(index + 1);
    entry = PyDict_GetItemWithError(state, param);
  }
  if (!entry && PyErr_Occurred()) throw py::error_already_set();
  return entry && PyDict_Check(entry) ? entry : nullptr;
}

// Of a key that equals ours without being it, as those of an unpickled state.
PyObject* Members::find(PyObject* entry, const py::object& key) {
  PyObject* const value = PyDict_GetItemWithError(entry, key.ptr());
  if (!value && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

void Members::hold(size_t end) {
  const auto keep = [this](PyObject* object) {
    if (object) held_.push_back(py::reinterpret_borrow<py::object>(object));
  };
  for (; held_members_ < end; ++held_members_) {
    const Member& member = members_[held_members_];
    keep(member.param);
    for (PyObject* const value : member.values) keep(value);
    keep(member.master);
  }
}

void Members::release() {
  held_.clear();
  held_members_ = 0;
}

}  // namespace dltrain::bindings
