"""python -m dltrain_ext.advise: measures links, optimizer and model for some seconds, and says what to use.

By torchrun it is one of its ranks, also on several hosts; run alone, it starts its ranks on this machine, and so
measures no link between hosts. It prints the time of a step predicted for plain DDP and for each codec, and what to
write. The prediction takes all-reduces for independent of backward: where both need the same cores a step takes longer.
"""

import argparse
import importlib.util
import sys

from dltrain_ext.advise.session import run
from dltrain_ext.selftest import command


def main(argv: list[str]) -> int:
    return command.on_ranks("advise", run, parse(argv, command.given_ranks()))


def count(text: str) -> int:
    """Converts 350000, 12.6M or 1.3B to a number of parameters."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper(), 0)
    try:
        number = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 1e12:
        raise argparse.ArgumentTypeError(f"expected a number of parameters such as 350000, 12.6M or 1.3B, got {text!r}")
    return round(number)


def milliseconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1e9:
        raise argparse.ArgumentTypeError(f"expected a number of milliseconds of at least 0, got {text!r}")
    return number


def parse(argv: list[str], given: int | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dltrain_ext.advise", description=__doc__.splitlines()[0])
    command.add_options(parser)
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function that returns the model, and a function that returns its loss: parameters and times are those",
    )
    parser.add_argument(
        "--parameters", type=count, default="25.6M", help="their number, without --model (default 25.6M)"
    )
    for name in ("forward", "backward"):
        parser.add_argument(
            f"--{name}", type=milliseconds, default=0.0, help=f"milliseconds of {name}, without --model (default 0)"
        )
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to time all-reduces (default 10)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of the model (default cpu)")
    options = parser.parse_args(argv)
    command.check_options(parser, options, given, least=2)
    if not 1 <= options.seconds <= 3600:
        parser.error(f"--seconds: expected 1 to 3600, got {options.seconds}")
    if options.model is not None:
        package = options.model.partition(":")[0].partition(".")[0]
        if not package or not importlib.util.find_spec(package):
            parser.error(f"--model: expected module:function of a module that can be imported, got {options.model!r}")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
