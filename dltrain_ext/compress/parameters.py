"""The names of a model's parameters, and a number for each element that does not depend on its position in a buffer."""

from collections.abc import Iterable

from torch import Tensor


def numbers_of(numel: int) -> int:
    """Returns how many numbers so many elements take: random numbers are generated four at a time."""
    return (numel + 3) // 4 * 4


class Parameters:
    """Numbers the elements of a model's parameters.

    Args:
        named: all parameters with their names, in the model's order; None if they are not known.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]] | None):
        self.names: dict[str, Tensor] | None = None
        self._numbers: dict[Tensor, int] = {}
        self._next = 0
        if named is None:
            return
        self.names = {}
        if not isinstance(named, Iterable) or isinstance(named, str | Tensor):
            raise TypeError(f"named_parameters: expected pairs of a str and a tensor, got {named!r}")
        for pair in named:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"named_parameters: expected pairs of a str and a tensor, got {pair!r}")
            name, parameter = pair
            if not isinstance(name, str) or not isinstance(parameter, Tensor):
                raise TypeError(
                    "named_parameters: expected pairs of a str and a tensor, as of model.named_parameters(), "
                    f"got {type(name).__name__} and {type(parameter).__name__}"
                )
            if parameter.requires_grad:
                self.names[name] = parameter
                self._add(parameter)

    def _add(self, parameter: Tensor) -> int:
        number = self._numbers[parameter] = self._next
        self._next += numbers_of(parameter.numel())
        return number

    def number(self, parameter: Tensor) -> int:
        """Returns the number of the first element, a multiple of 4; unnamed parameters are numbered on demand."""
        if (number := self._numbers.get(parameter)) is not None:
            return number
        if self.names is not None:
            raise ValueError(
                "named_parameters: expected all parameters of the model, one of shape "
                f"{tuple(parameter.shape)} is missing"
            )
        return self._add(parameter)

    def named(self) -> dict[str, Tensor]:
        """Returns the parameters by name. Raises ValueError if the names are not known."""
        if self.names is None:
            raise ValueError(
                "named_parameters: expected model.named_parameters() when the state was made, since a checkpoint goes "
                "by names, got None; ddp.register takes them from the model"
            )
        return self.names
