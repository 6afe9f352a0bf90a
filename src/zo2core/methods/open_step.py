"""An open step: a step that was started, and whose losses are not known yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zo2core.errors import OptionError
from zo2core.sweep.microbatch import labelled_tokens, rows_of
from zo2core.types import Batch, Evaluation
from zo2core.workers import Plan


class OpenStep(NamedTuple):
    """A step without its losses."""

    step: int  # 0-based
    lr: float
    evaluations: tuple[Evaluation, ...]  # of all workers
    started: float  # ``time.perf_counter``, in seconds
    plan: Plan  # how the step is sharded among workers
    batch: int | None = None  # digest of the batch; None: it is not known
    tokens: int = 0  # labelled tokens of this worker's rows, if rows are sharded

    @property
    def indices(self) -> range:
        """Indices of this worker's evaluations among all evaluations of the step."""
        return self.plan.shard.evaluations

    @property
    def local(self) -> tuple[Evaluation, ...]:
        """The evaluations of this worker."""
        return tuple(self.evaluations[index] for index in self.indices)

    def sharded(self, batches: Sequence[Batch]) -> tuple[OpenStep, Sequence[Batch]]:
        """Return this step with its tokens, and this worker's rows of each batch."""
        if self.plan.shard.parts == 1:
            return self, batches
        slices = [self.plan.shard.rows(len(batch["labels"])) for batch in batches]
        local = [rows_of(batch, rows.start, rows.stop) for batch, rows in zip(batches, slices, strict=True)]
        return self._replace(tokens=sum(map(labelled_tokens, local))), local

    @property
    def has_no_loss(self) -> bool:
        """Whether this worker's rows have no labelled token."""
        return self.plan.shard.parts > 1 and self.tokens == 0

    def groups(
        self, batches_at: Callable[[Evaluation], Sequence[Batch]], *, in_place: bool
    ) -> list[tuple[Evaluation, Sequence[Batch]]]:
        """Return the evaluations of a sweep that computes this worker's losses, each with its batches.

        Args:
            batches_at: Returns the batches of an evaluation.
            in_place: Whether weights are perturbed in place from one evaluation to the next. The sweep then includes the
                preceding evaluations of other workers, without batches.
        """
        if not in_place:
            return [(evaluation, batches_at(evaluation)) for evaluation in self.local]
        passed = enumerate(self.evaluations[: self.indices.stop])
        return [(evaluation, batches_at(evaluation) if index in self.indices else ()) for index, evaluation in passed]

    def path_to(self, evaluation: Evaluation) -> tuple[Evaluation, ...]:
        """Return the evaluations up to this one, through which weights are perturbed in place.

        Raises:
            OptionError: if it is not an evaluation of the step.
        """
        if evaluation not in self.evaluations:
            raise OptionError(
                "at",
                found=repr(evaluation),
                expected="an evaluation that ask() returned",
                remedy="pass an evaluation of this step",
            )
        return self.evaluations[: self.evaluations.index(evaluation) + 1]

    def require_all(self, losses: Sequence[torch.Tensor]) -> None:
        """Refuse more or fewer losses than this worker has evaluations.

        Raises:
            OptionError: if the numbers differ.
        """
        if len(losses) != len(self.indices):
            raise OptionError(
                "losses",
                found="1 loss" if len(losses) == 1 else f"{len(losses)} losses",
                expected=f"{len(self.indices)}, one for each evaluation that ask() returned",
                remedy="pass all losses in one call, in the order of the evaluations",
            )
