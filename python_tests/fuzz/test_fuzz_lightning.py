"""Fuzz tests of the classes that replace Lightning's."""

import pytest
from fuzzing import attempt, fuzz, spoiled
from hypothesis import given
from hypothesis import strategies as st

pytestmark = [pytest.mark.needs("lightning"), pytest.mark.xdist_group("lightning")]  # its import takes long

SCALER = {
    "init_scale": st.just(4.0),
    "growth_interval": st.just(2),
    "min_scale": st.just(1.0),
    "hysteresis": st.just(1),
}


@fuzz("lightning.MixedPrecision", examples=60)
@given(spoiled({"precision": st.sampled_from(["16-mixed", "bf16-mixed"]), "device": st.just("cpu"), **SCALER}))
def test_mixed_precision(arguments):
    from dltrain_ext.lightning import MixedPrecision

    attempt(MixedPrecision, arguments, names=[*arguments, "max_scale", "mixed"])
