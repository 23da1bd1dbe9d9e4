#pragma once

#include <Python.h>

#include <cstdint>

#include "core/cache_line.h"

// What is used of CPython beside its public API, for speed alone. setup.py sets this to 0 where DLTRAIN_PRIVATE_CPYTHON=0, for a CPython
// that no longer has it so.
#ifndef DLT_PRIVATE_CPYTHON
#define DLT_PRIVATE_CPYTHON 1
#endif

namespace dltrain::bindings::private_cpython {

inline constexpr bool used = DLT_PRIVATE_CPYTHON;

#if DLT_PRIVATE_CPYTHON

// The item of a key whose hash is its address; borrowed. Null where there is none, or an error is set.
inline PyObject* item_by_address(PyObject* dict, PyObject* key) {
  return _PyDict_GetItem_KnownHash(dict, key, static_cast<Py_hash_t>(reinterpret_cast<uintptr_t>(key)));
}

// Where a dict looks up its keys. It need not be there any more when it is fetched.
inline const void* table_of(PyObject* dict) { return reinterpret_cast<PyDictObject*>(dict)->ma_keys; }
// Inlined: GCC takes a function that does no more than prefetch for one without effect, and drops its calls.
__attribute__((always_inline)) inline void fetch_table(const void* table) {
  for (int line = 0; line < 3; ++line) __builtin_prefetch(static_cast<const char*>(table) + cache_line * line);
}

#else

inline PyObject* item_by_address(PyObject*, PyObject*) { return nullptr; }
inline const void* table_of(PyObject*) { return nullptr; }
inline void fetch_table(const void*) {}

#endif

}  // namespace dltrain::bindings::private_cpython
