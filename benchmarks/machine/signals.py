"""What asks us to end."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def listening() -> Iterator[list[int]]:
    """The signals that ask us to end, as they come. Noted only: an exception could break into the cleaning up."""
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: heard.append(number))
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
