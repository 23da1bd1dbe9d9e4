"""Selects for each bucket the fastest codec whose error is within a budget, by measuring time and error."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from dltrain_ext._arguments import as_number
from dltrain_ext.comm import Communicator, Work
from dltrain_ext.comm.arguments import check_names
from dltrain_ext.comm.tuning import LIKE_THE_FASTEST, most_accurate
from dltrain_ext.ddp.buckets import Bucket, are_same
from dltrain_ext.ddp.selection import PLAIN

_UNDECIDED = "auto"
_FIRST, _RARELY = 4, 256  # passes; DDP has rebuilt its buckets by then
_PART = 0.8  # of the budget: errors may grow until they are measured again
_LARGE = 1e9  # an error; infinity would become NaN on its way
_log = logging.getLogger("dltrain_ext")


def check_budget(max_error: object, codec: str) -> float | None:
    """Returns the budget. Raises TypeError or ValueError that names the argument, the expected and the actual value."""
    if not isinstance(codec, str):
        raise TypeError(f"codec: expected a str, got {codec!r}")
    if max_error is None:
        return None
    number = as_number(max_error, "max_error")
    if not 0 < number < 1:
        raise ValueError(f"max_error: expected a number above 0 and below 1, or None, got {max_error!r}")
    if codec != "auto":
        raise ValueError(f"max_error: expected None, or the codec 'auto', got {max_error!r} with {codec!r}")
    return number


def is_due(count: int) -> bool:
    """Returns whether errors are measured from that pass on, of those that may be compressed: 4, 11, 19, 35, 67, 131,
    259, 515, 771, ... At first gradients change fast. A search ends with the passes after that, and a run is rarely
    saved in the middle of it."""
    since = count - _FIRST + 1
    if since < _RARELY:
        return since == 1 or (since >= 8 and since & (since - 1) == 0)
    return since % _RARELY == 0


def by_speed(seconds: Mapping[str, float]) -> tuple[str, list[str]]:
    """Returns the faster one of ``PLAIN``, and the codecs that are clearly faster than that, the fastest first.

    Of those that take at most 10 % longer than another, the more accurate one comes first.
    """
    exact = {name: seconds[name] for name in PLAIN if name in seconds}
    if not exact:
        return "raw", []
    plain = min(exact, key=exact.__getitem__)
    left = {c: s for c, s in seconds.items() if c not in PLAIN and LIKE_THE_FASTEST * s < seconds[plain]}
    order = []
    while left:
        order.append(most_accurate(left))
        del left[order[-1]]
    return plain, order


def relative_error(found: Tensor, exact: Tensor) -> Tensor:
    """Returns the 2-norm of the difference over that of ``exact``, as float64. It is NaN where ``exact`` is not finite,
    and infinite where it is zero, or ``found`` alone is not finite: these are no measurements of a small error."""
    lost = torch.linalg.vector_norm(found - exact, dtype=torch.float64)
    whole = torch.linalg.vector_norm(exact, dtype=torch.float64)
    error = torch.nan_to_num(lost / whole, nan=math.inf, posinf=math.inf)
    return torch.where(whole.isfinite(), error, math.nan)


@dataclass(eq=False)
class Search:
    """The search for a bucket's codec. The bucket is sent plain meanwhile."""

    parameters: list[Tensor]
    plain: str
    left: list[str]  # codecs to try, the fastest first; empty when it is over

    def judge(self, error: float, max_error: float) -> str | None:
        """Takes the error of the first codec that is left. Returns what was found, if the search is over."""
        if math.isnan(error):
            return None  # the step has overflowed; the next one tells
        codec = self.left.pop(0)
        if error <= _PART * max_error:
            self.left = []
            return codec
        return None if self.left else self.plain


class Probe:
    """A bucket that is averaged plain, and a copy of it that is averaged in the codec to be tried."""

    def __init__(self, search: Search, copy: tuple[Tensor, Work], exact: tuple[Tensor, Work]):
        self.search = search
        self._averages: list[tuple[Tensor, Work]] = [copy, exact]
        self._error: Tensor | None = None
        if torch._C._current_graph_task_id() == -1:
            self.finish()  # of a rank that has joined, which has no backward pass
        else:
            queue: Any = Variable._execution_engine.queue_callback
            queue(self.finish)  # when backward ends; later on its gradients may be changed

    def finish(self) -> Tensor:
        """Returns the error, and needs the averages no more."""
        if self._error is None:
            for _, work in self._averages:
                work.wait()
            self._error = relative_error(*(tensor for tensor, _ in self._averages))
            self._averages = []
        return self._error


class Budget:
    """The codecs of the parameters, all in one plan. They are searched for a bucket as a whole, and kept by parameter,
    since DDP changes its buckets.

    Args:
        max_error: of a bucket, as ``relative_error`` of its average.
        algorithm: by which they are averaged.
        is_small: whether a parameter is sent raw in any case.
        tells: whether the logger is told what was found.
    """

    def __init__(
        self,
        max_error: float,
        communicator: Communicator,
        algorithm: str,
        is_small: Callable[[Tensor], bool],
        *,
        tells: bool,
    ):
        self.max_error, self.calls = max_error, 0  # of the communicator, that were not for gradients
        self._communicator, self.algorithm = communicator, algorithm
        self._is_small, self._tells = is_small, tells
        self._codecs: dict[Tensor, str] = {}
        self._errors: dict[Tensor, float] = {}  # when they were measured, of the codecs that lose something
        self._told: dict[Tensor, str] = {}
        self._searches: dict[int, Search] = {}  # by the index of the bucket
        self._probes: list[Probe] = []
        self._begins = self._may_begin = False  # whether searches begin in this pass, for all buckets or for new ones

    def begin(self, count: int, buckets: Iterable[Bucket]) -> list[Tensor]:
        """Begins a pass, of which ``count`` may have been compressed. It is collective if a search begins, or is under
        way, and then waits for the device.

        buckets: those of the passes before. Returns the parameters that are sent plain from now on.
        """
        before = {p for p, codec in self._codecs.items() if codec not in PLAIN}
        if self._probes:
            self._judge()
        self._begins, self._may_begin = is_due(count), count >= _FIRST
        if self._begins:
            self._searches.clear()
            for bucket in buckets:  # while nothing else is under way
                self._times(bucket.layout.numel, bucket.parameters)
        if self._codecs != self._told and not any(search.left for search in self._searches.values()):
            self._tell()
        return [p for p in before if self._codecs[p] in PLAIN]

    def _judge(self) -> None:
        device = self._probes[0].finish().device
        errors = torch.stack([probe.finish().to(device) for probe in self._probes]).float().clamp(max=_LARGE)
        # All ranks have averaged the same bits, but processors may round the norms in different ways.
        self._communicator.all_reduce(errors, "avg", algorithm="direct")
        self.calls += 1
        for probe, error in zip(self._probes, errors.tolist(), strict=True):
            if found := probe.search.judge(error, self.max_error):
                self._decide(probe.search, found, error)
        self._probes = []

    def _decide(self, search: Search, codec: str, error: float = 0.0) -> None:
        for parameter in search.parameters:
            coded = codec not in PLAIN and not self._is_small(parameter)
            self._codecs[parameter] = codec if coded or codec in PLAIN else "raw"
            self._errors[parameter] = error if coded else 0.0

    def _tell(self) -> None:
        self._told = dict(self._codecs)
        if self._tells:
            shares = ", ".join(f"{100 * share:.3g} % as {codec}" for codec, share in self.shares().items())
            _log.warning("max_error %g: gradients travel: %s; error %.3g", self.max_error, shares, self.error)

    def _times(self, numel: int, parameters: Sequence[Tensor]) -> dict[str, float]:
        return self._communicator.times_for(4 * numel, self.algorithm, parameters[0].dtype)

    def codecs_for(self, index: int, parameters: Sequence[Tensor], numel: int) -> tuple[str, ...]:
        """Returns the codec of each parameter of a bucket in this pass; a plain one during a search and before."""
        search = self._searches.pop(index, None)
        if search is None or not are_same(search.parameters, parameters):
            search = self._search(parameters, numel)
        if search is not None:
            self._searches[index] = search
            if search.left:
                return (search.plain,) * len(parameters)
        return tuple(self._codecs.get(p, "raw") for p in parameters)

    def _search(self, parameters: Sequence[Tensor], numel: int) -> Search | None:
        """Returns a new search if one begins for such a bucket in this pass."""
        if not self._begins and not (self._may_begin and any(p not in self._codecs for p in parameters)):
            return None
        plain, codecs = by_speed(self._times(numel, parameters))
        search = Search(list(parameters), plain, [] if all(map(self._is_small, parameters)) else codecs)
        if not search.left:
            self._decide(search, plain)
        return search

    def tries(self, index: int) -> str | None:
        """Returns the codec in which a copy of a bucket is averaged, too."""
        search = self._searches.get(index)
        return search.left[0] if search is not None and search.left else None

    def compare(self, index: int, copy: tuple[Tensor, Work], exact: tuple[Tensor, Work]) -> None:
        """Takes the copy and the bucket, with the work after which they are averages."""
        self.calls += 1
        self._probes.append(Probe(self._searches[index], copy, exact))

    @property
    def error(self) -> float:
        """The largest error of the codecs in use, when it was measured."""
        return max(self._errors.values(), default=0.0)

    def shares(self) -> dict[str, float]:
        """Returns the part of the elements that travel in each codec."""
        numels: dict[str, int] = {}
        for parameter, codec in self._codecs.items():
            numels[codec] = numels.get(codec, 0) + parameter.numel()
        total = sum(numels.values())
        return {codec: numel / total for codec, numel in sorted(numels.items())}

    def metrics(self) -> dict[str, float]:
        shares = {f"ddp/share_{codec}": share for codec, share in self.shares().items()}
        return {"ddp/budget_error": self.error, **shares} if self._errors else shares

    def to_dict(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        codecs = {name: self._codecs.get(parameter, _UNDECIDED) for name, parameter in named.items()}
        return {"max_error": self.max_error, "codecs": codecs}

    def load(self, states: Sequence[Mapping[str, Any]], named: Mapping[str, Tensor], world_size: int) -> None:
        """Takes the codecs of checkpoints, if they are of as many ranks and of the same budget; else selects anew.

        Raises ValueError if they are something else, or differ. Nothing has changed then.
        """
        saved = [_checked(state["budget"], named) for state in states if "budget" in state]
        if any(each != saved[0] for each in saved):
            raise ValueError("state_dict: expected states of one budget, got several")
        self._searches, self._probes, self._codecs, self._errors, self._told = {}, [], {}, {}, {}
        if saved and saved[0]["max_error"] == self.max_error and states[0]["world_size"] == world_size:
            codecs = saved[0]["codecs"]
            self._codecs = {named[name]: codec for name, codec in codecs.items() if codec != _UNDECIDED}


def _checked(plain: object, named: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """Returns what ``Budget.to_dict`` has returned. Raises ValueError if it is something else."""
    if not isinstance(plain, Mapping) or not isinstance(plain.get("codecs"), Mapping) or "max_error" not in plain:
        raise ValueError(f"state_dict: expected budget of max_error and codecs, got {plain!r}")
    if not isinstance(plain["max_error"], int | float):
        raise ValueError(f"state_dict: expected max_error of budget as a number, got {plain['max_error']!r}")
    for name, codec in plain["codecs"].items():
        try:
            if name not in named:
                raise ValueError("no parameter")
            check_names("auto", "raw" if codec in (*PLAIN, _UNDECIDED) else codec)
        except (TypeError, ValueError) as error:
            found = f"{codec!r} for {name!r}"
            raise ValueError(f"state_dict: expected a codec of a parameter in budget, got {found}") from error
    return plain
