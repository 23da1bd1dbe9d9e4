"""Runs the tests of DistributedDataParallel that torch's package contains, with our hook in every model.

Most need GPUs. pytest collects this file only by name: pytest python_tests/ddp/torchs_own.py
"""

import os
import re
import tempfile
import unittest
from typing import Any

import pytest

pytest.importorskip("expecttest")
if "TEMP_DIR" not in os.environ:  # the processes of the ranks have it
    folder = tempfile.mkdtemp()
    os.environ.update(BACKEND="gloo", WORLD_SIZE="3", TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/init")

from torch import nn
from torch.testing._internal.distributed import distributed_test as theirs

from dltrain_ext import ddp

OF_DDP = re.compile("test_ddp|DataParallel|no_sync|unused|uneven|static", re.IGNORECASE)
PICKLED = "they save the DDP model itself, which a model with our hook refuses: its connections are this process's"
DIFFERENT = {
    "test_DistributedDataParallelCPU": PICKLED,
    "test_DistributedDataParallelCPU_grad_is_view": PICKLED,
    "test_ddp_logging_data_cpu": "has parameters of float64, which the hook refuses",
}


class Hooked(nn.parallel.DistributedDataParallel):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.has_hook = False
        ddp.register(self, codec="raw", algorithm="direct")

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        if self.has_hook:
            raise unittest.SkipTest("it registers a hook of its own, and a model takes one")
        super().register_comm_hook(state, hook)
        self.has_hook = True


nn.parallel.DistributedDataParallel = Hooked
theirs.DistributedDataParallel = Hooked


class TestWithTheHook(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        if reason := DIFFERENT.get(self._testMethodName):
            self.skipTest(reason)
        self._spawn_processes()


for name in dir(TestWithTheHook):
    if name.startswith("test") and not OF_DDP.search(name):
        setattr(TestWithTheHook, name, None)
