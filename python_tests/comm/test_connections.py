"""How ranks agree on a transport, and how NCCL is found at run time."""

import importlib.util
import os
import subprocess
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from dltrain_ext import _ops
from dltrain_ext.comm import connections, transports
from dltrain_ext.comm.connections import Connections
from dltrain_ext.comm.groups import Members

ROOT = Path(__file__).parents[2]


class Broken(RuntimeError):
    pass


def made(monkey, rank, name, *, version=lambda rank: "2.28.9", connects=lambda rank: True, transport="auto"):
    """Connections in which NCCL gives the scripted results, and Gloo replaces both transports that need a GPU."""

    def nccl_version():
        if isinstance(answer := version(rank), Exception):
            raise answer
        return answer

    class Level:
        @staticmethod
        def over_nccl(unique_id, index, device, ranks, timeout):
            assert unique_id == bytes(range(128)) and ranks[index] == rank
            if not connects(rank):
                raise Broken("ncclCommInitRankConfig: unhandled system error")
            return "nccl"

        @staticmethod
        def over_backend(backend, device, ranks):
            return "c10d"

    monkey.setattr(transports, "_CONNECTING", timedelta(seconds=20))
    monkey.setattr(_ops, "nccl_version", nccl_version)
    monkey.setattr(_ops, "nccl_unique_id", lambda: bytes(range(128)))
    monkey.setattr(_ops, "Level", Level)
    monkey.setattr(_ops, "Communicator", lambda across, inside, control, members, device, *timeouts: (across, inside))
    monkey.setattr(dist, "ProcessGroupNCCL", lambda store, rank, size, timeout: "a backend", raising=False)
    store = dist.PrefixStore(name, dist.group.WORLD.get_group_store())
    silence, ranks = timedelta(seconds=20), list(range(dist.get_world_size()))
    members = Members("group", "", ranks, dist.get_rank(), store, silence, torch.device("cuda", rank))
    made = Connections(members, silence, transport, 2, timedelta(seconds=5), False)
    return made.connect(torch.device("cuda", rank))


def check_agreement(rank, world_size, case):
    given, expected, reason = {
        "all have it": ({}, "nccl", None),
        "one has none": (
            dict(version=lambda rank: Broken("NCCL cannot be loaded: no such file") if rank == 2 else "2.28.9"),
            "c10d",
            "rank 2: NCCL cannot be loaded: no such file",
        ),
        "one is too old": (
            dict(version=lambda rank: Broken("expected version 2.14 or later, got 2.8.3") if rank == 0 else "2.28.9"),
            "c10d",
            "rank 0: expected version 2.14 or later, got 2.8.3",
        ),
        "one fails": (
            dict(connects=lambda rank: rank != 1),
            "c10d",
            "rank 1: ncclCommInitRankConfig: unhandled system error",
        ),
        "not wanted": (dict(transport="c10d", version=lambda rank: Broken("never asked")), "c10d", None),
    }[case]
    with pytest.MonkeyPatch.context() as monkey, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        connections.tell_once.cache_clear()
        for name in ("first", "second"):
            assert made(monkey, rank, name, **given) == (expected, expected)
    told = [str(warning.message) for warning in caught if "dltrain_ext" in str(warning.message)]
    assert len(told) == (reason is not None) and all(reason in text for text in told)
    if reason:
        wanted = pytest.raises(dist.DistBackendError, match=f"transport: nccl cannot be used: .*{reason}")
        with pytest.MonkeyPatch.context() as monkey, wanted:
            made(monkey, rank, "wanted", **given, transport="nccl")


@pytest.mark.parametrize("case", ["all have it", "one has none", "one is too old", "one fails", "not wanted"])
def test_ranks_agree_on_the_transport(case):
    run_ranks(4, check_agreement, case)


def load(rank, world_size, library):
    """Return what a fresh process prints about the NCCL library that it is given."""
    os.environ["DLTRAIN_NCCL"] = str(library)
    try:
        return f"{_ops.nccl_version()} {len(_ops.nccl_unique_id())}"
    except RuntimeError as error:
        return str(error)


def loaded(library):
    return run_ranks(1, load, library, fresh=True)[0]


def test_the_error_says_why_a_library_cannot_be_loaded(tmp_path):
    said = loaded(tmp_path / "libnccl.so.2")
    assert f"NCCL cannot be loaded: {tmp_path}/libnccl.so.2: cannot open shared object file" in said
    (tmp_path / "empty.c").write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-o", tmp_path / "libnccl.so.2", tmp_path / "empty.c"], check=True)
    said = loaded(tmp_path / "libnccl.so.2")
    assert f"NCCL ({tmp_path}/libnccl.so.2) has no ncclGetVersion: expected version 2.14 or later" in said


def nccl_folder() -> Path | None:
    """Find the library in the package that torch's CUDA builds require."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder, "nccl") for folder in (spec.submodule_search_locations or [] if spec else [])]
    return next((folder for folder in folders if (folder / "include" / "nccl.h").is_file()), None)


NCCL = nccl_folder()
needs_nccl = pytest.mark.skipif(NCCL is None, reason="needs NCCL: pip install --no-deps nvidia-nccl-cu13")


@needs_nccl
def test_the_real_library_loads():
    said = loaded(NCCL / "lib" / "libnccl.so.2")
    version, length = said.split()
    assert version.startswith("2.") and length == "128", said


CHECK = """
#include <nccl.h>
#include <type_traits>
#include "comm/transport/nccl/api.h"

namespace ours = dltrain::comm::nccl;

// Theirs may be an enum where ours is a number, or a struct of the same meaning; all else is the same type.
template <class A, class B>
constexpr bool same() {
  if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
    using T = std::remove_cv_t<std::remove_pointer_t<A>>;
    using U = std::remove_cv_t<std::remove_pointer_t<B>>;
    if constexpr (std::is_same_v<T, ncclConfig_t>) return std::is_same_v<U, ours::Config>;
    if constexpr (std::is_same_v<T, ncclUniqueId>) return std::is_same_v<U, ours::UniqueId>;
    if constexpr (std::is_enum_v<T>) return std::is_same_v<U, int> && sizeof(T) == sizeof(U);
    return std::is_same_v<A, B>;
  } else {
    return sizeof(A) == sizeof(B) && std::is_class_v<A> == std::is_class_v<B>;
  }
}
template <class R, class... A, class S, class... B>
constexpr bool fits(R (*)(A...), S (*)(B...)) {
  static_assert(sizeof...(A) == sizeof...(B));
  return same<R, S>() && (same<A, B>() && ...);
}

#define DLT_NCCL(theirs, name, ...) static_assert(fits(&theirs, decltype(ours::Api::name){}), #theirs);
DLT_NCCL_FUNCTIONS(DLT_NCCL)

static_assert(sizeof(ours::UniqueId) == sizeof(ncclUniqueId));
static_assert(offsetof(ours::Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(ours::Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(ours::Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(ours::success == ncclSuccess);
static_assert(ours::int8 == ncclInt8 && ours::uint8 == ncclUint8 && ours::int32 == ncclInt32);
static_assert(ours::int64 == ncclInt64 && ours::fp16 == ncclFloat16 && ours::bf16 == ncclBfloat16);
static_assert(ours::fp32 == ncclFloat32 && ours::fp64 == ncclFloat64);
static_assert(ours::sum == ncclSum && ours::avg == ncclAvg);
constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
static_assert(ours::Config{}.magic == theirs.magic);
"""
# The parts of CUDA that NCCL's header needs.
CUDA_RUNTIME = """#pragma once
#include <stddef.h>
#include <stdint.h>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
"""


@needs_nccl
def test_the_declarations_equal_those_of_nccls_header(tmp_path):
    (tmp_path / "check.cpp").write_text(CHECK)
    for name in ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):
        (tmp_path / name).write_text(CUDA_RUNTIME)
    include = [f"-I{folder}" for folder in (tmp_path, NCCL / "include", ROOT / "csrc")]
    command = ["c++", "-std=c++20", "-fsyntax-only", *include, str(tmp_path / "check.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
