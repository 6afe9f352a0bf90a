"""The low-rank factors of a run: sums of updates in float32, and perturbed factors for evaluations.

Trade-off: each period adds m * rank float32 numbers and n * rank numbers of the matrix's dtype for each matrix (m, n), which
stay in device memory. Replaying an update draws and adds m * rank numbers, instead of m * n in the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from zo2core.factor_file import FactorFile, sum_elements
from zo2core.journal import Journal
from zo2core.kernels import apply_drawing, fill, form, perturb_each
from zo2core.kernels.encoding import decoded
from zo2core.perturbation import DensePerturbation, Factors, LowRankPerturbation, Perturbation, PerturbedParameter
from zo2core.protocols import SEEDS_IN_TURN
from zo2core.types import BlockLayout, Distribution, Evaluation, ParameterSpec, Perturb, Program, Update, trained
from zo2core.updates import compile_updates, split_updates

# Columns of past periods, as a share of a matrix's inputs, up to which their products are computed beside the activations at
# each visit, for about 1.5 times that share of a forward. Adding them to the weights costs a forward of as many tokens.
BESIDE_UP_TO = 0.05


class LearnedFactors(NamedTuple):
    """Factors of the updates of a matrix (m, n), ``left right^T``; those of several periods are side by side."""

    left: torch.Tensor  # A (m, R), float32
    right: torch.Tensor  # V (n, R), in the parameter's dtype

    def joined(self, other: LearnedFactors) -> LearnedFactors:
        """These columns followed by the other's."""
        return LearnedFactors(*(torch.cat(pair, dim=1) for pair in zip(self, other, strict=True)))


class Learned(NamedTuple):
    """What a run has learned of a parameter."""

    factors: LearnedFactors | None  # of all periods, to be added to the base as ``left @ right^T``; None for a vector
    present: Callable[[], torch.Tensor]  # returns the present weights in the parameter's shape, rounded once to its dtype


@dataclass(eq=False)
class _Sums:
    """Sums of the updates of a parameter."""

    now: torch.Tensor  # float32, flat: A (m, rank) of the present period, or a vector's weights (n,)
    version: int = 0  # updates 0..version-1 are included
    past: LearnedFactors | None = None  # factors of ended periods


class FactorStore:
    """Factors of every parameter, which are brought to the present version segment by segment."""

    def __init__(
        self, settings: LowRankPerturbation, distribution: Distribution, run_seed: int, device: torch.device
    ) -> None:
        self._settings = settings
        self._distribution = distribution
        self._run_seed = run_seed
        self._device = device
        self._sums: dict[str, _Sums] = {}
        self._right: dict[str, tuple[int, torch.Tensor]] = {}  # period and V by parameter
        self._replays: dict[tuple[int, int], Sequence[Program]] = {}  # programs of this sweep by range of updates
        self._file: FactorFile | None = None  # for ended periods; None: they are not written

    def keep_periods(
        self, directory: Path, layouts: Sequence[BlockLayout], journal: Journal, bytes_a_step: float | None
    ) -> FactorFile:
        """Read ended periods from a directory, and write later ones there. Called before the first use."""
        elements, period = sum_elements(trained(layouts), self._settings.rank), self._settings.period
        writes = kept_bytes_a_step(self._settings, layouts, bytes_a_step) > 0
        self._file = FactorFile(directory, elements, period=period, journal=journal, writes=writes)
        return self._file

    @property
    def most_streams(self) -> int | None:
        """Most evaluations that run as one batch; None: all of a step."""
        return self._settings.stack

    def begin_sweep(self) -> None:
        """Forget the programs of the last sweep."""
        self._replays.clear()

    def advance(self, spec: ParameterSpec, theta: torch.Tensor, updates: Sequence[Update], version: int) -> None:
        """Bring a parameter's factors to a version."""
        try:
            self._advance(spec, self._sums_of(spec, theta), updates, version)
        except BaseException:  # the sums are between two versions; replay makes them again
            self._sums.pop(spec.name, None)
            raise

    def _advance(self, spec: ParameterSpec, sums: _Sums, updates: Sequence[Update], version: int) -> None:
        while sums.version < version:
            period = sums.version // self._settings.period
            end = min(version, (period + 1) * self._settings.period)
            for program in self._programs(updates, sums.version, end):
                apply_drawing(sums.now, program, self._distribution, spec.index)
            if end % self._settings.period == 0:
                ended = sums.now
                if len(spec.shape) == 2:
                    columns = LearnedFactors(ended.view(spec.shape[0], -1), self._right_of(spec, sums.version))
                    sums.past = columns if sums.past is None else sums.past.joined(columns)
                    sums.now = torch.zeros_like(ended)
                if self._file is not None:
                    self._file.keep(spec, period, ended)
            sums.version = end

    def forms(self, spec: ParameterSpec) -> bool:
        """Whether a matrix has so many columns of past periods that they are added to its weights for each visit."""
        past = self._sums[spec.name].past if spec.name in self._sums else None
        return past is not None and past.left.shape[1] > BESIDE_UP_TO * spec.shape[1]

    def form(self, spec: ParameterSpec, theta: torch.Tensor, out: torch.Tensor, helper: Executor | None = None) -> None:
        """Write a matrix as of the start of the present period, summed in float32 and rounded once."""
        past = self._sums[spec.name].past
        assert past is not None, "a matrix without past periods is not formed"
        form(theta.view(spec.shape), past.left, past.right, out, helper)

    def perturbations(self, evaluations: Sequence[Evaluation | None], zo_eps: float) -> Program:
        """The program for ``perturbed``: one ``Perturb`` for each stream."""
        perturbing = [None if evaluation is None or evaluation.shift == 0 else evaluation for evaluation in evaluations]
        seeds = {seed: index for index, seed in enumerate(dict.fromkeys(e.seed for e in perturbing if e is not None))}
        instructions = [
            Perturb(0, 0.0, zo_eps) if e is None else Perturb(seeds[e.seed], e.shift, zo_eps) for e in perturbing
        ]
        return Program(tuple(seeds), tuple(instructions))

    def perturbed(self, spec: ParameterSpec, theta: torch.Tensor, perturbations: Program) -> PerturbedParameter:
        """A parameter's factors or values at each stream's evaluation. If ``forms``, without the past periods."""
        sums = self._sums_of(spec, theta)
        count = len(perturbations.instructions)
        streams = torch.empty(count, sums.now.numel(), dtype=spec.dtype, device=self._device)
        perturb_each(sums.now, perturbations, self._distribution, spec.index, streams)
        if len(spec.shape) == 1:
            return streams
        left, right = streams.view(count, spec.shape[0], -1), self._right_of(spec, sums.version)
        if sums.past is not None and not self.forms(spec):
            past = sums.past.left.to(spec.dtype).expand(count, -1, -1)
            left, right = torch.cat([past, left], dim=2), torch.cat([sums.past.right, right], dim=1)
        return Factors(left, right)

    def present(self, spec: ParameterSpec, theta: torch.Tensor) -> torch.Tensor:
        """A parameter's present weights, rounded once to its dtype: flat, on the device of ``theta``."""
        sums = self._sums_of(spec, theta)
        if sums.version == 0:
            return theta
        if len(spec.shape) == 1:
            return sums.now.to(theta)
        left, right = self._factors(spec, sums)
        whole = theta.view(spec.shape).to(self._device, copy=True)
        form(whole, left, right, whole)
        return whole.to(theta.device).view(-1)

    def learned(self, spec: ParameterSpec, theta: torch.Tensor) -> Learned:
        """What a run has learned of a parameter."""

        def present() -> torch.Tensor:
            return self.present(spec, theta if spec.encoding is None else decoded(spec, theta)).view(spec.shape)

        return Learned(self._factors(spec, self._sums_of(spec, theta)) if len(spec.shape) == 2 else None, present)

    def _factors(self, spec: ParameterSpec, sums: _Sums) -> LearnedFactors:
        """Factors of all periods, the present one last."""
        now = LearnedFactors(sums.now.view(spec.shape[0], -1), self._right_of(spec, sums.version))
        return now if sums.past is None else sums.past.joined(now)

    def _sums_of(self, spec: ParameterSpec, theta: torch.Tensor) -> _Sums:
        if spec.name not in self._sums:
            is_vector = len(spec.shape) == 1
            self._sums[spec.name] = self._vector_sums(spec, theta) if is_vector else self._matrix_sums(spec)
        return self._sums[spec.name]

    def _vector_sums(self, spec: ParameterSpec, theta: torch.Tensor) -> _Sums:
        """A vector's weights at the end of the last period on disk, else the base's."""
        while self._file is not None and self._file.periods > 0:
            period = self._file.periods - 1
            if (kept := self._file.read(spec, period)) is not None:
                return _Sums(kept.to(self._device), (period + 1) * self._settings.period)
        return _Sums(theta.to(self._device, torch.float32, copy=True))

    def _matrix_sums(self, spec: ParameterSpec) -> _Sums:
        """A matrix's factors of the periods on disk, and zeros for the next one."""
        (rows, columns), rank, done = spec.shape, self._settings.rank, 0
        count = 0 if self._file is None else self._file.periods
        left = torch.empty(rows, count * rank, dtype=torch.float32, device=self._device)
        right = torch.empty(columns, count * rank, dtype=spec.dtype, device=self._device)
        for period in range(count):
            assert self._file is not None
            if (kept := self._file.read(spec, period)) is None:
                break
            left[:, done : done + rank] = kept.view(rows, rank)
            right[:, done : done + rank] = self._drawn_right(spec, period * self._settings.period)
            done += rank
        past = LearnedFactors(left[:, :done].contiguous(), right[:, :done].contiguous()) if done else None
        now = torch.zeros(rows * rank, dtype=torch.float32, device=self._device)
        return _Sums(now, done // rank * self._settings.period, past)

    def _right_of(self, spec: ParameterSpec, step: int) -> torch.Tensor:
        """V in the period of a step, divided by the root of the rank: (n, rank) in the parameter's dtype."""
        period = step // self._settings.period
        if self._right.get(spec.name, (None, None))[0] != period:
            self._right[spec.name] = period, self._drawn_right(spec, step)
        return self._right[spec.name][1]

    def _drawn_right(self, spec: ParameterSpec, step: int) -> torch.Tensor:
        rank, seed = self._settings.rank, self._settings.period_seed(self._run_seed, step)
        drawn = torch.empty(spec.shape[1] * rank, dtype=torch.float32, device=self._device)
        fill(drawn, self._distribution, seed, spec.index)
        return drawn.div_(rank**0.5).to(spec.dtype).view(spec.shape[1], rank)

    def _programs(self, updates: Sequence[Update], start: int, end: int) -> Sequence[Program]:
        """Compile updates to programs of at most ``SEEDS_IN_TURN`` directions."""
        if (start, end) not in self._replays:
            parts = split_updates(updates[start:end], SEEDS_IN_TURN)
            self._replays[start, end] = [compile_updates(part)[False] for part in parts]
        return self._replays[start, end]


def factor_bytes(perturbation: Perturbation, layouts: Sequence[BlockLayout], updates: int = 0) -> int:
    """Bytes of a run's factors in memory, of ended periods and of the present one."""
    if isinstance(perturbation, DensePerturbation):
        return 0
    periods, specs = updates // perturbation.period + 1, trained(layouts)
    matrices = [spec for spec in specs if len(spec.shape) == 2]
    columns = sum(4 * spec.shape[0] + spec.dtype.itemsize * spec.shape[1] for spec in matrices)
    vectors = sum(4 * spec.numel for spec in specs if len(spec.shape) == 1)
    return columns * perturbation.rank * periods + vectors


def kept_bytes_a_step(perturbation: Perturbation, layouts: Sequence[BlockLayout], most: float | None = None) -> float:
    """Average bytes a step that a low-rank run writes for its ended periods."""
    if isinstance(perturbation, DensePerturbation):
        return 0.0
    on_average = 4 * sum(sum_elements(trained(layouts), perturbation.rank).values()) / perturbation.period
    return on_average if most is None or on_average <= most else 0.0
