"""The progress bar of a run: its rate is that of steps alone, and its time left counts the evaluations that are due."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{spent}<{left}, {rate_fmt}{postfix}]"


class StepBar(tqdm):  # type: ignore[type-arg]
    """A bar over the steps of a run, between which evaluations take time.

    Args:
        evaluations: Evaluations that are still to come.
        options: Options of tqdm.
    """

    def __init__(self, *, evaluations: int = 0, **options: Any) -> None:
        self._evaluations = evaluations
        self._evaluated = 0.0  # seconds, in all
        self._longest = 0.0  # seconds of the longest evaluation: the one before the first step reads the weights as well
        super().__init__(bar_format=_FORMAT, **options)

    def count_evaluation(self, seconds: float, *, left: int) -> None:
        """Leave an evaluation out of the steps' time.

        Args:
            seconds: What it took.
            left: Evaluations that are still to come.
        """
        self._evaluations, self._evaluated = left, self._evaluated + seconds
        self._longest = max(self._longest, seconds)
        if not self.disable:  # a bar that is not shown has no clock
            self.start_t += seconds
            self.last_print_t += seconds

    @property
    def format_dict(self) -> dict[str, Any]:
        """As tqdm has it, with the time since the run began and the time that is left."""
        known: dict[str, Any] = dict(super().format_dict)
        if known.get("initial") is None:  # of a bar that was never shown
            return known
        taken, elapsed = known["n"] - known["initial"], known["elapsed"]
        rate = known["rate"] or (taken / elapsed if elapsed else 0.0)
        left = "?"
        if rate and taken:
            left = self.format_interval((known["total"] - known["n"]) / rate + self._evaluations * self._longest)
        return {**known, "spent": self.format_interval(elapsed + self._evaluated), "left": left}
