"""Progress bar of a run. Its rate counts steps alone; its remaining time includes the evaluations that are due."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{spent}<{left}, {rate_fmt}{postfix}]"


class StepBar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar over the steps of a run, between which evaluations take time."""

    def __init__(self, *, evaluations: int = 0, **options: Any) -> None:
        self._evaluations = evaluations
        self._evaluated = 0.0  # seconds of all evaluations so far
        self._longest = 0.0  # seconds of the longest evaluation; the one before the first step also reads the weights
        super().__init__(bar_format=_FORMAT, **options)

    def count_evaluation(self, seconds: float, *, left: int) -> None:
        """Exclude an evaluation from the time of the steps."""
        self._evaluations, self._evaluated = left, self._evaluated + seconds
        self._longest = max(self._longest, seconds)
        if not self.disable:  # a disabled bar has no clock
            self.start_t += seconds
            self.last_print_t += seconds

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values of tqdm, with elapsed and remaining time including evaluations."""
        values: dict[str, Any] = dict(super().format_dict)
        if values.get("initial") is None:  # the bar was never displayed
            return values
        taken, elapsed = values["n"] - values["initial"], values["elapsed"]
        rate = values["rate"] or (taken / elapsed if elapsed else 0.0)
        left = "?"
        if rate and taken:
            left = self.format_interval((values["total"] - values["n"]) / rate + self._evaluations * self._longest)
        return {**values, "spent": self.format_interval(elapsed + self._evaluated), "left": left}
