"""hypothesis for modules that also have other tests: if it is not installed, only its tests are skipped."""

from typing import Any

import pytest

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
except ModuleNotFoundError:

    class Absent:
        """Replaces all strategies and settings."""

        def __getattr__(self, name: str) -> "Absent":
            return self

        def __call__(self, *args: Any, **options: Any) -> "Absent":
            return self

    def unchanged(test: Any) -> Any:
        return test

    st = HealthCheck = Absent()

    def settings(*args: Any, **options: Any) -> Any:
        return unchanged

    def given(*args: Any, **options: Any) -> Any:
        return pytest.mark.skip(reason="hypothesis is not installed")


def property_test(max_examples: int, **strategies: Any) -> Any:
    """Make a property test that draws the named arguments; fixtures, like device, are the same for all examples."""
    health = [HealthCheck.function_scoped_fixture]
    return lambda test: settings(max_examples=max_examples, deadline=None, suppress_health_check=health)(
        given(**strategies)(test)
    )


__all__ = ["property_test", "st"]
