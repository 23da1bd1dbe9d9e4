"""Devices: a test that asks for `device` runs on the CPU and, marked gpu, on a CUDA device where there is one."""

import pytest
import torch

from dltrain_ext import _ops


def no_gpu() -> str | None:
    """Why tests marked gpu cannot run; None if they can."""
    if not _ops.built_with_cuda:
        return "this build of dltrain_ext is without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := no_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
