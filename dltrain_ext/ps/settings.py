"""What all ranks of a store agree on, as text: workers send it, and servers take it from them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dltrain_ext.ps.layout import Key

SERVES = "serves"  # what a rank says that has no settings of its own


@dataclass(frozen=True)
class Settings:
    """The keys and options of a store.

    Attributes:
        servers: ranks of the group.
        workers: ranks of the group; the first one's values count.
        keys: of all tensors.
        optimizer: the name of a class of dltrain_ext.optim.
        groups: its options for each group of keys.
        staleness: how many clocks a reader may be behind; None: any number.
        quorum: how many contributions make a version; 0 for those of all workers.
        lockstep: all workers pull each version once.
        push_codec, pull_codec: the codecs of gradients and of values.
        delay_compensation: the factor lambda.
        window: how many pushes of a worker may wait.
        records: whether servers record the order of what they handle.
        grace: how many seconds a quorum waits for more contributions; 0 for none.
    """

    servers: tuple[int, ...]
    workers: tuple[int, ...]
    keys: tuple[Key, ...]
    optimizer: str
    groups: tuple[Mapping[str, Any], ...]
    staleness: int | None
    quorum: int
    lockstep: bool
    push_codec: str
    pull_codec: str
    delay_compensation: float
    window: int
    records: bool
    grace: float = 0.0

    def text(self) -> str:
        return json.dumps(asdict(self) | {"keys": [list(key) for key in self.keys]})

    @staticmethod
    def of(text: str) -> "Settings":
        said: dict[str, Any] = json.loads(text)
        said["keys"] = tuple(Key(name, tuple(shape), group) for name, shape, group in said["keys"])
        return Settings(**said | {name: tuple(said[name]) for name in ("servers", "workers", "groups")})


def agreed(texts: Sequence[str], ranks: Sequence[int]) -> Settings:
    """Returns the settings of all workers. Raises ValueError that names a rank whose settings differ, and in what."""
    given = {rank: Settings.of(text) for rank, text in zip(ranks, texts, strict=True) if text != SERVES}
    if not given:
        raise ValueError("serve: expected at least one rank that makes a store, got none")
    first, expected = next(iter(given.items()))
    for rank, settings in given.items():
        for name, value in asdict(expected).items():
            if asdict(settings)[name] != value:
                raise ValueError(
                    f"{name}: expected the same on all ranks, got {value!r} on rank {first} and "
                    f"{asdict(settings)[name]!r} on rank {rank}"
                )
    missing = [rank for rank in ranks if rank not in given and rank not in expected.servers]
    if missing:
        raise ValueError(f"servers: expected all ranks that call serve, {missing} are not among {expected.servers}")
    return replace(expected, workers=tuple(given))
