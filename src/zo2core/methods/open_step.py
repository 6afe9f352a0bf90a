"""A step that was begun and whose losses are awaited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zo2core.errors import OptionError
from zo2core.sweep.microbatch import labelled_tokens, rows_of
from zo2core.types import Batch, Evaluation
from zo2core.workers import Plan


class OpenStep(NamedTuple):
    """What is known of a step before its losses are."""

    step: int  # 0-based
    lr: float
    evaluations: tuple[Evaluation, ...]
    began: float  # seconds, of ``time.perf_counter``
    plan: Plan  # how workers share it out
    batch: int | None = None  # digest of the batch; None where it is not known
    tokens: int = 0  # labelled ones of the rows that this worker has, where rows are shared out

    @property
    def places(self) -> range:
        """Places of the evaluations to be made here, among the step's."""
        return self.plan.shard.evaluations

    @property
    def own(self) -> tuple[Evaluation, ...]:
        """The evaluations to be made here."""
        return tuple(self.evaluations[place] for place in self.places)

    def without_shard(self) -> OpenStep:
        """The same step, of which nothing is to be made here."""
        return self._replace(plan=self.plan.without_shard())

    def sharded(self, batches: Sequence[Batch]) -> tuple[OpenStep, Sequence[Batch]]:
        """This step, and of each batch the rows that are this worker's."""
        if self.plan.shard.parts == 1:
            return self, batches
        slices = [self.plan.shard.rows(len(batch["labels"])) for batch in batches]
        own = [rows_of(batch, rows.start, rows.stop) for batch, rows in zip(batches, slices, strict=True)]
        return self._replace(tokens=sum(map(labelled_tokens, own))), own

    @property
    def has_no_loss(self) -> bool:
        """Whether this worker's rows have no labelled token."""
        return self.plan.shard.parts > 1 and self.tokens == 0

    def groups(
        self, batches_at: Callable[[Evaluation], Sequence[Batch]], *, in_place: bool
    ) -> list[tuple[Evaluation, Sequence[Batch]]]:
        """What a sweep evaluates to make this worker's losses.

        Args:
            batches_at: What runs at an evaluation.
            in_place: Whether weights walk from one evaluation to the next: they then pass those of other workers, too.
        """
        if not in_place:
            return [(evaluation, batches_at(evaluation)) for evaluation in self.own]
        passed = enumerate(self.evaluations[: self.places.stop])
        return [(evaluation, batches_at(evaluation) if place in self.places else ()) for place, evaluation in passed]

    def path_to(self, evaluation: Evaluation) -> tuple[Evaluation, ...]:
        """The evaluations up to this one: weights that walk from one to the next pass them in their order.

        Raises:
            OptionError: if it is none of the step's.
        """
        if evaluation not in self.evaluations:
            raise OptionError(
                "at", found=repr(evaluation), expected="an evaluation that ask() returned", remedy="ask for this step's"
            )
        return self.evaluations[: self.evaluations.index(evaluation) + 1]

    def require_all(self, losses: Sequence[torch.Tensor]) -> None:
        """Refuse losses that are not one an evaluation.

        Raises:
            OptionError: if there are more or fewer.
        """
        if len(losses) != len(self.places):
            raise OptionError(
                "losses",
                found=f"{len(losses)} of them",
                expected=f"{len(self.places)}, one for each evaluation that ask() returned",
                remedy="tell all of them at once, in that order",
            )
