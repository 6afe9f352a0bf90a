"""A step that was begun and whose losses are awaited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zo2core.errors import OptionError
from zo2core.types import Evaluation


class OpenStep(NamedTuple):
    """What is known of a step before its losses are."""

    step: int  # 0-based
    lr: float
    evaluations: tuple[Evaluation, ...]
    began: float  # seconds, of ``time.perf_counter``

    def way_to(self, evaluation: Evaluation) -> tuple[Evaluation, ...]:
        """The evaluations up to this one: weights that walk from one to the next pass them in their order.

        Raises:
            OptionError: if it is none of the step's.
        """
        if evaluation not in self.evaluations:
            raise OptionError(
                "at", found=repr(evaluation), expected="an evaluation that ask() returned", remedy="ask for this step's"
            )
        return self.evaluations[: self.evaluations.index(evaluation) + 1]

    def require_finite(self, losses: Sequence[torch.Tensor]) -> None:
        """Refuse losses that are not one finite number an evaluation.

        Raises:
            OptionError: if there are more or fewer.
            NonFiniteLossError: if one is not finite.
        """
        if len(losses) != len(self.evaluations):
            raise OptionError(
                "losses",
                found=f"{len(losses)} of them",
                expected=f"{len(self.evaluations)}, one for each evaluation that ask() returned",
                remedy="tell all of them at once, in that order",
            )
        for evaluation, loss in zip(self.evaluations, losses, strict=True):
            evaluation.require_finite(loss, step=self.step)
