#pragma once

#include <Python.h>

#include <cstdint>

#include "core/cache_line.h"

// The uses of CPython's private API, which are only for speed. setup.py sets this macro to 0 if DLTRAIN_PRIVATE_CPYTHON=0, for a version of
// CPython that has changed this API.
#ifndef DLT_PRIVATE_CPYTHON
#define DLT_PRIVATE_CPYTHON 1
#endif

namespace dltrain::bindings::private_cpython {

inline constexpr bool used = DLT_PRIVATE_CPYTHON;

#if DLT_PRIVATE_CPYTHON

// The item of a key whose hash is its address, as a borrowed reference. Null if there is none, or if an error is set.
inline PyObject* item_by_address(PyObject* dict, PyObject* key) {
  return _PyDict_GetItem_KnownHash(dict, key, static_cast<Py_hash_t>(reinterpret_cast<uintptr_t>(key)));
}

// The hash table of a dict. It may no longer exist when it is prefetched.
inline const void* table_of(PyObject* dict) { return reinterpret_cast<PyDictObject*>(dict)->ma_keys; }
// Always inlined, because GCC treats a function that only prefetches as one without effects, and removes its calls.
__attribute__((always_inline)) inline void fetch_table(const void* table) {
  for (int line = 0; line < 3; ++line) __builtin_prefetch(static_cast<const char*>(table) + cache_line * line);
}

#else

inline PyObject* item_by_address(PyObject*, PyObject*) { return nullptr; }
inline const void* table_of(PyObject*) { return nullptr; }
inline void fetch_table(const void*) {}

#endif

}  // namespace dltrain::bindings::private_cpython
