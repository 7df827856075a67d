"""A published figure beside the one obtained."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

RowKind = Literal["input", "calibrated", "predicted"]


class Row(NamedTuple):
    """One figure.

    input: the paper's, taken as it is. calibrated: a parameter was fitted to it. predicted: nothing was. `published`
    is None where the paper prints a curve but no number. `reason` says why the published number cannot come from the
    stated set-up.
    """

    table: str
    quantity: str
    unit: str
    published: float | None
    obtained: float
    kind: RowKind
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Relative error; None without a published number."""
        return self.obtained / self.published - 1 if self.published else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "error": self.error}


class Assumption(NamedTuple):
    """A number that the paper does not print, and where it comes from."""

    name: str
    value: str
    origin: str
