"""The thin factors of a run beside the activations: sums of updates in float32, and directions to evaluate.

Trade-off: a matrix of m x n has m * rank float32 numbers a period and n * rank in its own dtype, whatever it is itself; they
stay in the device's memory. Replaying an update draws and adds m * rank numbers, where in the weights it is m * n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from zo2core.journal import Journal
from zo2core.kernels import apply_drawing, fill, form, perturb_each
from zo2core.kernels.encoding import decoded
from zo2core.perturbation.factor_file import FactorFile, sum_elements
from zo2core.perturbation.perturbation import DensePerturbation, LowRankPerturbation, Perturbation, require_perturbation
from zo2core.perturbation.stacked_model import Factors, Moved
from zo2core.protocols import SEEDS_IN_TURN, BlockModel, CounterNoise, NoiseGenerator, ZOEstimator
from zo2core.types import BlockLayout, Distribution, Evaluation, ParameterSpec, Perturb, Program, Update, trained
from zo2core.updates import compile_updates, rounds

# Columns of past periods, as a share of a matrix's inputs, up to which they are taken beside the activations at each visit:
# there they cost about 1.5 times that share of a forward. Forming them costs a forward of as many tokens as columns.
BESIDE_UP_TO = 0.05


class Columns(NamedTuple):
    """Factors of a matrix (m, n), of one period or of several side by side: R columns."""

    own: torch.Tensor  # A (m, R), float32
    shared: torch.Tensor  # V (n, R), in the parameter's dtype

    def joined(self, other: Columns) -> Columns:
        """These columns, and then the other's."""
        return Columns(*(torch.cat(pair, dim=1) for pair in zip(self, other, strict=True)))


class Learned(NamedTuple):
    """What a run has learned of a parameter."""

    columns: Columns | None  # of all periods: the matrix is the base's and ``own @ shared^T``; None of a vector
    present: Callable[[], torch.Tensor]  # makes the present weights, of its shape, rounded once to its dtype


@dataclass(eq=False)
class _Sums:
    """What the updates of a parameter came to."""

    now: torch.Tensor  # float32, flat: A (m, rank) of the present period; of a vector its weights (n,)
    version: int = 0  # updates 0..version-1 are in it
    past: Columns | None = None  # of the periods that have ended


class FactorStore:
    """Factors of every parameter, brought to the present version segment by segment.

    Args:
        settings: Rank and period.
        distribution: Distribution of U, V and the directions of vectors.
        run_seed: Periods' seeds follow from it.
        device: Where factors are.
    """

    def __init__(
        self, settings: LowRankPerturbation, distribution: Distribution, run_seed: int, device: torch.device
    ) -> None:
        self._settings = settings
        self._distribution = distribution
        self._run_seed = run_seed
        self._device = device
        self._sums: dict[str, _Sums] = {}
        self._period: dict[str, tuple[int, torch.Tensor]] = {}  # parameter -> the period of its V, and V
        self._replays: dict[tuple[int, int], Sequence[Program]] = {}  # of this sweep, by the updates' range
        self._file: FactorFile | None = None  # of the periods that have ended; None keeps none

    def keep_periods(
        self, directory: Path, layouts: Sequence[BlockLayout], journal: Journal, bytes_a_step: float | None
    ) -> FactorFile:
        """Begin with what ended periods have left in a directory, and leave there what will end. Before the first use.

        Args:
            directory: Directory of the run.
            layouts: Layouts of the model.
            journal: Journal of the run, begun.
            bytes_a_step: Most that may be written on average; None: no limit. Periods that take more are read, not kept.

        Returns:
            To be closed by the caller.

        Raises:
            JournalError: as ``FactorFile`` says.
        """
        elements, period = sum_elements(trained(layouts), self._settings.rank), self._settings.period
        writes = kept_bytes_a_step(self._settings, layouts, bytes_a_step) > 0
        self._file = FactorFile(directory, elements, period=period, journal=journal, writes=writes)
        return self._file

    @property
    def most_streams(self) -> int | None:
        """Evaluations that run as one batch, at most; None: all of a step."""
        return self._settings.stack

    def begin_sweep(self) -> None:
        """Forget the programs of the last sweep."""
        self._replays.clear()

    def advance(self, spec: ParameterSpec, theta: torch.Tensor, updates: Sequence[Update], version: int) -> None:
        """Bring a parameter's factors to a version.

        Args:
            spec: The parameter.
            theta: The base weights of the parameter as they are stored, flat, on the device; only read.
            updates: All of the run.
            version: Number of them to apply.
        """
        try:
            self._advance(spec, self._sums_of(spec, theta), updates, version)
        except BaseException:  # sums between two versions: the journal has them all
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
                    columns = Columns(ended.view(spec.shape[0], -1), self._shared(spec, sums.version))
                    sums.past = columns if sums.past is None else sums.past.joined(columns)
                    sums.now = torch.zeros_like(ended)
                if self._file is not None:
                    self._file.keep(spec, period, ended)
            sums.version = end

    def forms(self, spec: ParameterSpec) -> bool:
        """Whether a matrix has so many columns of past periods that they are to be formed into its weights for a visit."""
        past = self._sums[spec.name].past if spec.name in self._sums else None
        return past is not None and past.own.shape[1] > BESIDE_UP_TO * spec.shape[1]

    def form(self, spec: ParameterSpec, theta: torch.Tensor, out: torch.Tensor, helper: Executor | None = None) -> None:
        """Write a matrix as it was when the present period began, summed in float32 and rounded once.

        Args:
            spec: A parameter that ``forms``.
            theta: The base weights of the parameter in its dtype, flat, on the device; only read.
            out: Memory for the matrix, of its shape and dtype; may be ``theta``'s.
            helper: Runs a part of the work beside the caller.
        """
        past = self._sums[spec.name].past
        assert past is not None, "what forms has a past"
        form(theta.view(spec.shape), past.own, past.shared, out, helper)

    def moves(self, evaluations: Sequence[Evaluation | None], zo_eps: float) -> Program:
        """What ``moved`` does to a parameter, one move a stream.

        Args:
            evaluations: Evaluations of the streams; None is the present weights.
            zo_eps: Perturbation scale.
        """
        moved = [None if evaluation is None or evaluation.shift == 0 else evaluation for evaluation in evaluations]
        places = {seed: place for place, seed in enumerate(dict.fromkeys(e.seed for e in moved if e is not None))}
        at = [Perturb(0, 0.0, zo_eps) if e is None else Perturb(places[e.seed], e.shift, zo_eps) for e in moved]
        return Program(tuple(places), tuple(at))

    def moved(self, spec: ParameterSpec, theta: torch.Tensor, moves: Program) -> Moved:
        """A parameter at evaluations, one a stream. Of what ``forms``, beside what is formed.

        Args:
            spec: A parameter that ``advance`` brought to the present version.
            theta: As there.
            moves: What ``moves`` returned.
        """
        sums = self._sums_of(spec, theta)
        count = len(moves.instructions)
        streams = torch.empty(count, sums.now.numel(), dtype=spec.dtype, device=self._device)
        perturb_each(sums.now, moves, self._distribution, spec.index, streams)
        if len(spec.shape) == 1:
            return streams
        own, shared = streams.view(count, spec.shape[0], -1), self._shared(spec, sums.version)
        if sums.past is not None and not self.forms(spec):
            past = sums.past.own.to(spec.dtype).expand(count, -1, -1)
            own, shared = torch.cat([past, own], dim=2), torch.cat([sums.past.shared, shared], dim=1)
        return Factors(own, shared)

    def present(self, spec: ParameterSpec, theta: torch.Tensor) -> torch.Tensor:
        """A parameter's weights at the version of its factors, rounded once to their dtype: flat, where ``theta`` is.

        Args:
            spec: As of ``moved``.
            theta: The base weights of the parameter in its dtype, flat, on any device; only read.
        """
        sums = self._sums_of(spec, theta)
        if sums.version == 0:
            return theta
        if len(spec.shape) == 1:
            return sums.now.to(theta)
        own, shared = self._columns(spec, sums)
        whole = theta.view(spec.shape).to(self._device, copy=True)
        form(whole, own, shared, whole)
        return whole.to(theta.device).view(-1)

    def learned(self, spec: ParameterSpec, theta: torch.Tensor) -> Learned:
        """What a parameter has learned by the version of its factors.

        Args:
            spec: As of ``moved``.
            theta: As of ``present``, or encoded.
        """

        def present() -> torch.Tensor:
            return self.present(spec, theta if spec.encoding is None else decoded(spec, theta)).view(spec.shape)

        return Learned(self._columns(spec, self._sums_of(spec, theta)) if len(spec.shape) == 2 else None, present)

    def _columns(self, spec: ParameterSpec, sums: _Sums) -> Columns:
        """Factors of all periods; those of the present period come last."""
        now = Columns(sums.now.view(spec.shape[0], -1), self._shared(spec, sums.version))
        return now if sums.past is None else sums.past.joined(now)

    def _sums_of(self, spec: ParameterSpec, theta: torch.Tensor) -> _Sums:
        if spec.name not in self._sums:
            make = self._vector_sums if len(spec.shape) == 1 else self._matrix_sums
            self._sums[spec.name] = make(spec, theta)
        return self._sums[spec.name]

    def _vector_sums(self, spec: ParameterSpec, theta: torch.Tensor) -> _Sums:
        """A vector's weights at the end of the last period that was kept, else the base's."""
        while self._file is not None and self._file.periods > 0:
            period = self._file.periods - 1
            if (kept := self._file.read(spec, period)) is not None:
                return _Sums(kept.to(self._device), (period + 1) * self._settings.period)
        return _Sums(theta.to(self._device, torch.float32, copy=True))

    def _matrix_sums(self, spec: ParameterSpec, _: torch.Tensor) -> _Sums:
        """A matrix's factors of the periods that were kept, and nothing yet of the next one."""
        (rows, columns), rank, done = spec.shape, self._settings.rank, 0
        count = 0 if self._file is None else self._file.periods
        own = torch.empty(rows, count * rank, dtype=torch.float32, device=self._device)
        shared = torch.empty(columns, count * rank, dtype=spec.dtype, device=self._device)
        for period in range(count):
            assert self._file is not None
            if (kept := self._file.read(spec, period)) is None:
                break
            own[:, done : done + rank] = kept.view(rows, rank)
            shared[:, done : done + rank] = self._drawn_shared(spec, period * self._settings.period)
            done += rank
        past = Columns(own[:, :done].contiguous(), shared[:, :done].contiguous()) if done else None
        now = torch.zeros(rows * rank, dtype=torch.float32, device=self._device)
        return _Sums(now, done // rank * self._settings.period, past)

    def _shared(self, spec: ParameterSpec, step: int) -> torch.Tensor:
        """V in the period of a step, divided by the root of the rank: (n, rank) in the parameter's dtype."""
        period = step // self._settings.period
        if self._period.get(spec.name, (None, None))[0] != period:
            self._period[spec.name] = period, self._drawn_shared(spec, step)
        return self._period[spec.name][1]

    def _drawn_shared(self, spec: ParameterSpec, step: int) -> torch.Tensor:
        rank, seed = self._settings.rank, self._settings.period_seed(self._run_seed, step)
        drawn = torch.empty(spec.shape[1] * rank, dtype=torch.float32, device=self._device)
        fill(drawn, self._distribution, seed, spec.index)
        return drawn.div_(rank**0.5).to(spec.dtype).view(spec.shape[1], rank)

    def _programs(self, updates: Sequence[Update], start: int, end: int) -> Sequence[Program]:
        """Updates, compiled, with at most so many directions each as kernels draw in turn."""
        if (start, end) not in self._replays:
            missing = rounds(updates[start:end], SEEDS_IN_TURN)
            self._replays[start, end] = [compile_updates(part)[False] for part in missing]
        return self._replays[start, end]


def factor_bytes(perturbation: Perturbation, layouts: Sequence[BlockLayout], updates: int = 0) -> int:
    """Bytes of a run's factors: of the periods that have ended, and of the present one.

    Args:
        perturbation: The run's; directions in the weights have no factors.
        layouts: Layouts of the model.
        updates: Steps that were taken.
    """
    if isinstance(perturbation, DensePerturbation):
        return 0
    periods, specs = updates // perturbation.period + 1, trained(layouts)
    matrices = [spec for spec in specs if len(spec.shape) == 2]
    columns = sum(4 * spec.shape[0] + spec.dtype.itemsize * spec.shape[1] for spec in matrices)
    vectors = sum(4 * spec.numel for spec in specs if len(spec.shape) == 1)
    return columns * perturbation.rank * periods + vectors


def kept_bytes_a_step(perturbation: Perturbation, layouts: Sequence[BlockLayout], most: float | None = None) -> float:
    """Bytes that a run beside the activations writes a step, on average, to keep what its periods came to.

    Args:
        perturbation: The run's; directions in the weights have no factors.
        layouts: Layouts of the model.
        most: Number of bytes that it may write; None: no limit. A run whose periods take more keeps none of them.
    """
    if isinstance(perturbation, DensePerturbation):
        return 0.0
    on_average = 4 * sum(sum_elements(trained(layouts), perturbation.rank).values()) / perturbation.period
    return on_average if most is None or on_average <= most else 0.0


def open_factors(
    perturbation: Perturbation,
    model: BlockModel,
    estimator: ZOEstimator | None,
    noise: NoiseGenerator,
    journal: Journal,
    seed: int,
    device: torch.device,
    *,
    replay: str,
    write_back_every: object,
    snapshot_every: object,
) -> FactorStore | None:
    """The factors of a run; None where directions are in the weights.

    Args:
        perturbation: The run's.
        model: Whose parameters have factors.
        estimator: None for a run that takes no steps: then the journal's seed counts.
        noise: What draws U, V and the directions of vectors.
        journal: Journal of the run.
        seed: Seed of the run.
        device: Where factors are.
        replay: Who was asked to replay.
        write_back_every: How often it was asked to write back.
        snapshot_every: How often at least.

    Raises:
        OptionError, UnsupportedModelError: as ``require_perturbation`` says.
    """
    require_perturbation(
        perturbation,
        model,
        estimator,
        noise,
        replay=replay,
        write_back_every=write_back_every,
        snapshot_every=snapshot_every,
    )
    if isinstance(perturbation, DensePerturbation):
        return None
    assert isinstance(noise, CounterNoise), "other noise was refused"
    recorded = None if journal.header is None else journal.header.get("seed")
    run_seed = recorded if estimator is None and isinstance(recorded, int) else seed
    return FactorStore(perturbation, noise.distribution, run_seed, device)
