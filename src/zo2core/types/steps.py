"""Steps: their evaluations, and their records in the journal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from zo2core.errors import BatchError, NonFiniteLossError, OptionError

MAX_SEED = 2**63 - 1
LARGEST = torch.finfo(torch.float32).max  # largest number that may be added to a weight: more overflows float32

Batch: TypeAlias = Mapping[str, torch.Tensor]  # inputs of the model's forward: input_ids, attention_mask, labels, ...


def require_tensors(batch: Mapping[str, object]) -> None:
    """Refuse a batch with values that are not tensors.

    Raises:
        BatchError: naming the entry.
    """
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise BatchError(f"batch[{key!r}]", found=f"a {kind}", expected="a tensor", remedy="pass only tensors")


class RowGroup(NamedTuple):
    """The rows of a batch on which an evaluation runs: one of several groups of equally many rows."""

    number: int  # index of the group, from 0
    groups: int  # number of groups


class Evaluation(NamedTuple):
    """One forward at ``theta + shift * zo_eps * z(seed)``."""

    seed: int  # of the direction z
    shift: float  # signed multiple of zo_eps
    rows: RowGroup | None = None  # rows of the batch that it runs on; None: all

    def require_finite(self, loss: torch.Tensor, *, step: int) -> None:
        """Refuse a loss of this evaluation, 0-d, that is not finite.

        Raises:
            NonFiniteLossError: naming the evaluation.
        """
        if not math.isfinite(loss.item()):
            raise NonFiniteLossError(
                f"step {step}, seed {self.seed}, shift {self.shift:+g}",
                found=f"loss {loss.item()}",
                expected="a finite loss",
                remedy="lower `lr` or `zo_eps`, or use bfloat16 or float32 where float16 overflows; no step was taken",
            )

    def validated(self) -> Evaluation:
        """Return itself if the seed is in range and the shift is finite.

        Raises:
            OptionError: otherwise.
        """
        if not 0 <= self.seed <= MAX_SEED:
            raise OptionError("seed", found=repr(self.seed), expected=f"0 to {MAX_SEED}", remedy="pass another seed")
        if not math.isfinite(self.shift):
            raise OptionError("shift", found=repr(self.shift), expected="a finite number", remedy="correct the estimator")
        return self


@dataclass(frozen=True, slots=True)
class Update:
    """The record of a zeroth-order step, from which its change of the weights is replayed exactly.

    ``theta <- theta - lr * ((g * z) + (weight_decay * theta))`` for one direction after the other. With
    ``perturb_in_place`` the weights are first perturbed through all evaluations and back, whose rounding is part of MeZO's
    trajectory (MeZO, arXiv 2305.17333, Algorithm 1).
    """

    step: int  # 0-based; the update leads from version step to step + 1
    evaluations: tuple[Evaluation, ...]  # in order
    seeds: tuple[int, ...]  # of each direction
    projected_grads: tuple[float, ...]  # the scalar g of each direction
    lr: float  # applied to each direction
    zo_eps: float
    weight_decay: float
    perturb_in_place: bool
    losses: tuple[float, ...]  # of each evaluation; not needed to replay

    def validated(self) -> Update:
        """Return itself if its projected gradients are finite.

        Raises:
            NonFiniteLossError: if a projected gradient is not finite.
        """
        if not all(math.isfinite(grad) for grad in self.projected_grads):
            raise NonFiniteLossError(
                f"step {self.step}",
                found=f"projected gradients {self.projected_grads}",
                expected="finite projected gradients",
                remedy="raise `zo_eps`: the losses' difference was divided by too small a number; the step was not taken",
            )
        return self

    def contradiction(self) -> tuple[str, str] | None:
        """Find a value that no estimator can have made.

        Weights in float32 have to stay finite: lr, zo_eps, weight decay, the projected gradients, and each product that is
        added to a weight, ``lr * g``, ``lr * weight_decay`` and ``shift * zo_eps``, are at most ``LARGEST``.

        Returns:
            The finding and the expectation, in words; None if all values are valid.
        """
        shape = self._contradiction_of_lengths()
        if shape is not None:
            return shape
        seeds = {evaluation.seed for evaluation in self.evaluations}
        for seed in seeds:
            if not 0 <= seed <= MAX_SEED:
                return _seed_in_words(seed), f"a seed from 0 to {MAX_SEED}"
        for seed in self.seeds:
            if seed not in seeds:
                return f"an update along {_seed_in_words(seed)}", "the seed of an evaluation"
        if not 0 < self.zo_eps <= LARGEST:
            return f"zo_eps {self.zo_eps}", f"a positive number of at most {LARGEST:.4g}"
        for name, value in (("lr", self.lr), ("weight_decay", self.weight_decay)):
            if not 0 <= value <= LARGEST:
                return f"{name} {value}", f"a number from 0 to {LARGEST:.4g}"
        for loss in self.losses:
            if not math.isfinite(loss):
                return f"loss {loss}", "a finite loss"
        bounded = [("projected gradient", grad) for grad in self.projected_grads]
        bounded += [("lr * projected gradient", self.lr * grad) for grad in self.projected_grads]
        bounded += [("shift * zo_eps", shift * self.zo_eps) for _, shift, _ in self.evaluations]
        for name, value in [*bounded, ("lr * weight_decay", self.lr * self.weight_decay)]:
            if not abs(value) <= LARGEST:
                return f"{name} {value:.6g}", f"a number from -{LARGEST:.4g} to {LARGEST:.4g}"
        return None

    def _contradiction_of_lengths(self) -> tuple[str, str] | None:
        for name, values in (("evaluations", self.evaluations), ("seeds", self.seeds)):
            if not values:
                return f"no {name}", "at least one"
        if len(self.losses) != len(self.evaluations):
            return f"{len(self.losses)} losses", f"{len(self.evaluations)}, one for each evaluation"
        if len(self.projected_grads) != len(self.seeds):
            return f"{len(self.projected_grads)} projected gradients", f"{len(self.seeds)}, one for each seed"
        return None


@dataclass(frozen=True, slots=True)
class Commit:
    """The record of a first-order step, which cannot be replayed, since a gradient is not a scalar."""

    step: int  # 0-based
    loss: float  # before the update
    grad_norm: float  # 2-norm of all gradients together, before clipping
    lr: float

    def contradiction(self) -> tuple[str, str] | None:
        """Find a value that no step can have made.

        Returns:
            The finding and the expectation, in words; None if all values are valid.
        """
        for name, value in (("loss", self.loss), ("grad_norm", self.grad_norm), ("lr", self.lr)):
            if not math.isfinite(value):
                return f"{name} {value}", "a finite number"
        for name, value in (("grad_norm", self.grad_norm), ("lr", self.lr)):
            if value < 0:
                return f"{name} {value}", "a number of at least 0"
        return None


def _seed_in_words(seed: int) -> str:
    return f"seed {seed}" if seed.bit_length() <= 128 else f"a seed of {seed.bit_length()} bits"
