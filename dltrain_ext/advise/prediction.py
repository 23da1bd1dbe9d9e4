"""The time of a training step with each codec, predicted from a tuning, and which codec to use."""

from collections.abc import Sequence
from dataclasses import dataclass

from dltrain_ext.advise.workload import Workload
from dltrain_ext.codecs import error_bound
from dltrain_ext.comm import Tuning
from dltrain_ext.comm.tuning import most_accurate, seconds_for
from dltrain_ext.sim.training import exposed_seconds

PLAIN = "native"  # DDP without a hook


@dataclass(frozen=True)
class Prediction:
    """A step with gradients in one codec.

    seconds: of the step, the sum of forward, backward, ``exposed`` and ``optimizer``. sending: seconds of all
    all-reduces. exposed: seconds of those after the end of backward. optimizer: seconds of its step. error: of an
    element that is encoded, rms, relative to the largest one of its block. plan: that of the largest bucket.
    """

    codec: str
    seconds: float
    sending: float
    exposed: float
    optimizer: float
    error: float
    plan: str


def plain(tuning: Tuning, workload: Workload) -> Prediction:
    """Returns a step with plain DDP and torch's optimizer."""
    return _of_codec(PLAIN, tuning, workload, workload.torch_step)


def predict(tuning: Tuning, workload: Workload) -> list[Prediction]:
    """Returns steps with our optimizer, with plain DDP and with each codec of the tuning."""
    return [_of_codec(codec, tuning, workload, workload.our_step) for codec in tuning.table]


def _of_codec(codec: str, tuning: Tuning, workload: Workload, optimizer: float) -> Prediction:
    buckets = workload.buckets
    each = [seconds_for(tuning.table[codec], nbytes) for nbytes in buckets]
    exposed = exposed_seconds(buckets, each, workload.backward)
    seconds = workload.forward + workload.backward + exposed + optimizer
    error = 0.0 if codec in (PLAIN, "raw") else error_bound(codec).rms
    return Prediction(
        codec, seconds, sum(each), exposed, optimizer, error, tuning.choose(codec, max(buckets)).algorithm
    )


def best(predictions: Sequence[Prediction]) -> Prediction:
    """Returns that of the most accurate codec whose step takes at most 10 % longer than the fastest. It is never
    ``sign``, whose error is as large as the signal."""
    by_codec = {each.codec: each for each in predictions if each.codec != "sign"}
    return by_codec[most_accurate({codec: each.seconds for codec, each in by_codec.items()})]
