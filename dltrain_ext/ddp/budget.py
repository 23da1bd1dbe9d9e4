"""Selects for each bucket the fastest codec whose error is within a budget, by measuring time and error."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from dltrain_ext._arguments import as_number
from dltrain_ext.comm import Communicator, Work
from dltrain_ext.comm.arguments import check_names
from dltrain_ext.comm.tuning import LIKE_THE_FASTEST, most_accurate
from dltrain_ext.ddp.buckets import are_same
from dltrain_ext.ddp.selection import PLAIN

_UNDECIDED = "auto"
_FIRST, _RARELY = 4, 256  # passes; DDP has rebuilt its buckets by then
_PART = 0.8  # of the budget: errors may grow until they are measured again
_log = logging.getLogger("dltrain_ext")


def check_budget(max_error: object, codec: str | None) -> float | None:
    """Returns the budget. Raises TypeError or ValueError that names the argument, the expected and the actual value."""
    if max_error is None:
        return None
    number = as_number(max_error, "max_error")
    if not 0 < number < 1:
        raise ValueError(f"max_error: expected a number above 0 and below 1, or None, got {max_error!r}")
    if codec != "auto":
        raise ValueError(f"max_error: expected None, or the codec 'auto', got {max_error!r} with {codec!r}")
    return number


def is_due(count: int) -> bool:
    """Returns whether errors are measured from that pass on, of those that may be compressed. At first gradients change
    fast: 4, 8, 16, ..., 256, 512, 768, ..."""
    if count < _RARELY:
        return count >= _FIRST and count & (count - 1) == 0
    return count % _RARELY == 0


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
    """Returns the 2-norm of the difference over that of ``exact``: 0 if there is none, NaN if some elements of
    ``exact`` are not finite. Overwrites ``found`` if it is float32."""
    lost = torch.linalg.vector_norm(found.float().sub_(exact))
    whole = torch.linalg.vector_norm(exact, dtype=torch.float32)
    return torch.where(lost == 0, lost, lost / whole)


@dataclass(eq=False)
class Search:
    """The search for a bucket's codec. The bucket is sent plain meanwhile."""

    parameters: list[Tensor]
    plain: str
    left: list[str]  # codecs to try, the fastest first; empty when it is over
    error: float = 0.0  # of the codec that was found

    def judge(self, error: float, max_error: float) -> str | None:
        """Takes the error of the first codec that is left. Returns what was found, if the search is over."""
        if math.isnan(error):
            return None  # the step has overflowed; the next one tells
        codec = self.left.pop(0)
        if error <= _PART * max_error:
            self.left, self.error = [], error
            return codec
        return None if self.left else self.plain


class Probe:
    """A copy of a bucket that is averaged in the codec to be tried, and how it differs from the bucket."""

    def __init__(self, search: Search, copy: Tensor, work: Work):
        self.search = search
        self._copy, self._work = copy, work
        self._error: Tensor | None = None

    def compare(self, exact: Tensor, work: Work) -> None:
        """Is told where the exact average will be."""
        self._exact, self._exact_work = exact, work
        if torch._C._current_graph_task_id() != -1:
            queue: Any = Variable._execution_engine.queue_callback
            queue(lambda: self.error)  # when backward ends; later on its gradients may be changed

    @property
    def error(self) -> Tensor:
        if self._error is None:
            self._work.wait()
            self._exact_work.wait()
            self._error = relative_error(self._copy, self._exact)
            del self._copy, self._exact
        return self._error


class Budget:
    """The codecs of the parameters, all in one plan. A bucket's codec is that of its parameters.

    Args:
        max_error: of a bucket, as ``relative_error`` of its average.
        algorithm: as for :meth:`Communicator.times_for`.
        tells: whether the logger is told what was found.
    """

    def __init__(self, max_error: float, communicator: Communicator, algorithm: str, *, tells: bool):
        self.max_error, self._tells = max_error, tells
        self._communicator, self._algorithm = communicator, algorithm
        self._codecs: dict[Tensor, str] = {}  # those that were found
        self._searches: dict[int, Search] = {}  # by the index of the bucket
        self._probes: list[Probe] = []
        self._count, self._is_due = 0, False

    def begin(self, count: int) -> None:
        """Begins a pass, of which ``count`` may have been compressed. A collective call if the pass before has
        measured."""
        if self._probes:
            self._judge()
        self._count, self._is_due = count, is_due(count)
        if self._is_due:
            self._searches.clear()

    def _judge(self) -> None:
        device = self._probes[0].error.device
        errors = torch.stack([probe.error.to(device) for probe in self._probes])
        # All ranks have averaged the same bits, but processors may round the norms in different ways.
        self._communicator.all_reduce(errors, "avg", algorithm="direct")
        before = dict(self._codecs)
        for probe, error in zip(self._probes, errors.tolist(), strict=True):
            if found := probe.search.judge(error, self.max_error):
                self._codecs.update(dict.fromkeys(probe.search.parameters, found))
        self._probes = []
        if self._tells and self._codecs != before and not any(search.left for search in self._searches.values()):
            self._tell()

    def _tell(self) -> None:
        shares = ", ".join(f"{100 * share:.3g} % as {codec}" for codec, share in self.shares().items())
        _log.warning("max_error %g: gradients travel: %s; error %.3g", self.max_error, shares, self.error)

    def codecs_for(self, index: int, parameters: Sequence[Tensor], numel: int) -> tuple[str, ...]:
        """Returns the codec of each parameter of a bucket in this pass; one of ``PLAIN`` during a search."""
        search = self._search_for(index, parameters, numel)
        if search is not None and search.left:
            return (search.plain,) * len(parameters)
        return tuple(self._codecs.get(p, "raw") for p in parameters)

    def _search_for(self, index: int, parameters: Sequence[Tensor], numel: int) -> Search | None:
        """Returns the search for a bucket: none until one is due, unless some of its parameters have no codec."""
        search = self._searches.get(index)
        if search is not None and are_same(search.parameters, parameters):
            return search
        self._searches.pop(index, None)
        if not self._is_due and (self._count < _FIRST or all(p in self._codecs for p in parameters)):
            return None
        seconds = self._communicator.times_for(4 * numel, self._algorithm, parameters[0].dtype)
        search = self._searches[index] = Search(list(parameters), *by_speed(seconds))
        if not search.left:
            self._codecs.update(dict.fromkeys(parameters, search.plain))
        return search

    def tries(self, index: int) -> str | None:
        """Returns the codec in which a copy of a bucket is averaged, too."""
        search = self._searches.get(index)
        return search.left[0] if search is not None and search.left else None

    def probe(self, index: int, copy: Tensor, work: Work) -> Probe:
        self._probes.append(Probe(self._searches[index], copy, work))
        return self._probes[-1]

    @property
    def error(self) -> float:
        """The largest error, when it was measured, of the codecs that were found last."""
        return max((search.error for search in self._searches.values()), default=0.0)

    def shares(self) -> dict[str, float]:
        """Returns the part of the elements that travel in each codec."""
        numels: dict[str, int] = {}
        for parameter, codec in self._codecs.items():
            numels[codec] = numels.get(codec, 0) + parameter.numel()
        total = sum(numels.values())
        return {codec: numel / total for codec, numel in sorted(numels.items())}

    def to_dict(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        codecs = {name: self._codecs.get(parameter, _UNDECIDED) for name, parameter in named.items()}
        return {"max_error": self.max_error, "codecs": codecs}

    def load(self, states: Sequence[Mapping[str, Any]], named: Mapping[str, Tensor], world_size: int) -> None:
        """Takes the codecs of checkpoints, if they are of as many ranks and of the same budget; else selects anew.

        Raises ValueError if they are something else. Nothing has changed then.
        """
        saved = [_checked(state["budget"], named) for state in states if "budget" in state]
        self._searches.clear()
        self._probes.clear()
        self._codecs = {}
        if saved and saved[0]["max_error"] == self.max_error and states[0]["world_size"] == world_size:
            codecs = saved[0]["codecs"]
            self._codecs = {named[name]: codec for name, codec in codecs.items() if codec != _UNDECIDED}


def _checked(plain: object, named: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """Returns what ``Budget.to_dict`` has returned. Raises ValueError if it is something else."""
    if not isinstance(plain, Mapping) or not isinstance(plain.get("codecs"), Mapping) or "max_error" not in plain:
        raise ValueError(f"state_dict: expected budget of max_error and codecs, got {plain!r}")
    for name, codec in plain["codecs"].items():
        try:
            if name not in named:
                raise ValueError("no parameter")
            check_names("auto", "raw" if codec in (*PLAIN, _UNDECIDED) else codec)
        except (TypeError, ValueError) as error:
            found = f"{codec!r} for {name!r}"
            raise ValueError(f"state_dict: expected a codec of a parameter in budget, got {found}") from error
    return plain
