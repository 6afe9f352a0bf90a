"""Low-rank factors of a run: sums of updates in float32, perturbed factors for evaluations, and a
file of them.

Trade-off: each period adds m * rank float32 numbers and n * rank numbers of the matrix's dtype for
each matrix (m, n), which stay in device memory. Replaying an update draws and adds m * rank
numbers, instead of m * n in the weights.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import RawIOBase
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zo2core.encodings.decoding import decoded
from zo2core.errors import (
    ScratchError,
    ZO2Warning,
    reason,
)
from zo2core.estimators.perturbation import (
    DensePerturbation,
    Factors,
    LowRankPerturbation,
    Perturbation,
    PerturbedParameter,
)
from zo2core.io import durable, system_calls
from zo2core.io.direct_file import RangedFile, byte_view, chunk_checksum, combined_checksum
from zo2core.journal.journal import Journal
from zo2core.kernels import Draw, fill, form, perturb_each
from zo2core.kernels.dispatch import choose_kernel
from zo2core.kernels.programs import compile_updates, split_updates
from zo2core.protocols import (
    SEEDS_IN_TURN,
)
from zo2core.types import (
    BlockLayout,
    Distribution,
    Evaluation,
    ParameterSpec,
    Perturb,
    Program,
    Update,
    trained,
)

DATA = "factors.bin"
MANIFEST = "factors.jsonl"
FORMAT = 1  # version of the manifest


class FactorFile:
    """The sums of all parameters at the end of each period on disk, from which a run resumes.

    Not thread-safe.

    The files are a cache: replaying the journal on the base gives the same bits, but takes longer.
    The sums of an ended period never change, so those of each parameter are written once. A period
    counts once the manifest has its record, which follows the sums of all parameters, and only if
    the journal's checksum at its end and the checksums of its bytes match. Damaged periods are
    dropped with a warning and replayed.

    Trade-off: factors take as much disk as memory: for each period float32 numbers, rank times the
    rows of every matrix, and all vectors.

    The files are locked while they are open for writing: from the start if they exist, else from
    the first period.
    """

    def __init__(
        self,
        directory: Path,
        elements: dict[str, int],
        *,
        period: int,
        journal: Journal,
        writes: bool,
    ) -> None:
        self._directory = directory.absolute()  # the process may change its own
        self._elements = elements
        self._period = period
        self._journal = journal
        self._writes = writes
        self._positions = {name: position for position, name in enumerate(elements)}
        *offsets, self._size = accumulate((4 * count for count in elements.values()), initial=0)
        self._offsets = dict(zip(elements, offsets, strict=True))  # bytes from a period's start
        # checksums of written sums by parameter, for periods without a record
        self._ended: dict[int, dict[str, str]] = {}
        # open for writing from the first record on
        self._manifest: durable.RecordFile | None = None
        self._data: RangedFile | None = None  # open for writing from the first sums on
        self._reading: RawIOBase | None = None  # open from the first read on
        self._records: list[durable.Record] = []
        try:
            if writes and any(os.path.lexists(self._directory / name) for name in (DATA, MANIFEST)):
                self._try_or_warn(self._lock)
            self._records = self._try_or_warn(self._read_manifest) or []
        except BaseException:
            self.close()
            raise

    @property
    def periods(self) -> int:
        """Number of periods on disk, from the run's first one on."""
        return len(self._records)

    def read(self, spec: ParameterSpec, period: int) -> torch.Tensor | None:
        """Read a parameter's sums at the end of a period."""
        sums = torch.empty(self._elements[spec.name], dtype=torch.float32)
        try:
            self._read(spec, period, sums)
        except (OSError, EOFError) as error:
            self._warn(reason(error))
            # as too many open files
            is_temporary = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
            self._drop(period, on_disk=not is_temporary)
            return None
        return sums

    def keep(self, spec: ParameterSpec, period: int, sums: torch.Tensor) -> None:
        """Write a parameter's sums at the end of a period, which gets its record with the sums of
        the last parameter.
        """
        if not self._writes:
            return
        try:
            self._write(spec.name, period, sums)
            while len(self._ended.get(self.periods, ())) == len(self._elements):
                self._append_record()
        except OSError as error:
            self._warn(reason(error))
            self._writes = False
            self._ended.clear()

    def close(self) -> None:
        """Close the files. May be called twice."""
        for file in (self._manifest, self._data, self._reading):
            if file is not None:
                file.close()
        self._manifest = self._data = self._reading = None

    def _lock(self) -> None:
        """Open the file of sums for writing. Its lock covers the manifest."""
        try:
            self._data = RangedFile(self._directory / DATA, writable=True)
        except durable.LockedFileError as error:
            raise ScratchError(
                self._directory / DATA,
                found=reason(error),
                expected="a directory for ended periods that no other engine uses",
                remedy="close that engine, wait until its process has ended, or choose another "
                "directory",
            ) from error

    def _read_manifest(self) -> list[durable.Record]:
        """Read the valid records: those up to the first that is not of the next period and of this
        journal.
        """
        try:
            header, *records = durable.RecordFile(self._directory / MANIFEST).loaded or [{}]
        except durable.DamagedRecordError as error:
            self._warn(f"line {error.line}: {error}")
            return []
        if header != self._header():
            return []  # the files of another run
        valid: list[durable.Record] = []
        for record in records:
            version = (len(valid) + 1) * self._period
            if record.get("version") != version:
                break
            chain = self._journal.chain(version)
            if chain is None:
                self._journal.require_version(version, str(self._directory / MANIFEST))
            checksums = record.get("xxh3")
            if (
                record.get("chain") != chain
                or not isinstance(checksums, list)
                or len(checksums) != len(self._elements)
            ):
                break
            valid.append(record)
        return valid

    def _read(self, spec: ParameterSpec, period: int, sums: torch.Tensor) -> None:
        if self._reading is None:
            # Through the page cache, and ahead: small ranges of all periods are read while the disk
            # reads blocks. And unbuffered: a buffer would miss later writes.
            self._reading = durable.open_regular(self._directory / DATA).detach()
            system_calls.read_ahead(self._reading.fileno(), 0, self.periods * self._size)
        view = byte_view(sums)
        self._reading.seek(period * self._size + self._offsets[spec.name])
        done = 0
        while done < len(view):
            if not (count := self._reading.readinto(view[done:])):
                raise EOFError(f"{DATA} ends in period {period}")
            done += count
        record = self._records[period]
        if record["xxh3"][self._positions[spec.name]] != self._checksum(
            spec.name, record["version"], view
        ):
            raise EOFError(f"damaged sums of {spec.name} in period {period}")

    def _write(self, name: str, period: int, sums: torch.Tensor) -> None:
        if self._data is None:
            durable.make_directory(self._directory)
            self._data = RangedFile(self._directory / DATA, writable=True)
        on_host = sums.cpu().contiguous()  # waits for a device, once a period
        view = byte_view(on_host)
        self._data.write(period * self._size + self._offsets[name], view)
        self._ended.setdefault(period, {})[name] = self._checksum(
            name, (period + 1) * self._period, view
        )

    def _append_record(self) -> None:
        """Make the next period's sums durable, and then append its record."""
        period = self.periods
        version = (period + 1) * self._period
        if self._manifest is None:  # without records that are not valid
            self._replace_manifest()
            self._manifest = durable.RecordFile(self._directory / MANIFEST)
        self._manifest.retract()
        chain = self._journal.chain(version)  # makes the journal durable up to there
        assert chain is not None, "the updates of an ended period are in the journal"
        assert self._data is not None
        self._data.sync()
        checksums = self._ended[period]
        record = {
            "version": version,
            "chain": chain,
            "xxh3": [checksums[name] for name in self._elements],
        }
        self._manifest.append(
            record, lambda: self._records.append(record), lambda: self.periods > period
        )
        del self._ended[period]

    def _replace_manifest(self) -> None:
        lines = [durable.to_line(record) for record in [self._header(), *self._records]]
        durable.replace_file(self._directory / MANIFEST, b"".join(lines))

    def _drop(self, period: int, *, on_disk: bool) -> None:
        """Drop a period and those after it, and write no more: parameters that read them already
        will not end them again.
        """
        del self._records[period:]
        if self._writes:
            self._writes = False
            self._ended.clear()
            if on_disk and self._data is not None:  # while the lock is held
                self._try_or_warn(self._replace_manifest)
            self.close()

    def _header(self) -> durable.Record:
        return {
            "format": FORMAT,
            "elements": list(self._elements.values()),
            "chain": self._journal.chain(0),
        }

    def _checksum(self, name: str, version: int, view: memoryview) -> str:
        """Checksum of a parameter's position, version and bytes."""
        return combined_checksum([self._positions[name], version, chunk_checksum(view)])

    def _try_or_warn(self, action: Callable[[], Any]) -> Any:
        """Return an action's result; None, with a warning, if the disk fails: the run does not need
        the files.
        """
        try:
            return action()
        except (OSError, EOFError) as error:
            self._warn(reason(error))
            return None

    def _warn(self, found: str) -> None:
        warnings.warn(
            f"{self._directory / MANIFEST}: {found}. The updates of ended periods are replayed "
            "from the journal, "
            "with the same bits",
            ZO2Warning,
            stacklevel=2,
        )


def sum_elements(parameters: Sequence[ParameterSpec], rank: int) -> dict[str, int]:
    """Number of a period's sums by parameter: m times the rank for a matrix (m, n), n for a vector
    (n,).
    """
    return {
        spec.name: spec.shape[0] * rank if len(spec.shape) == 2 else spec.numel
        for spec in parameters
    }


# Columns of past periods, as a share of a matrix's inputs, up to which their products are computed
# beside the activations at each visit, for about 1.5 times that share of a forward. Adding them to
# the weights costs a forward of as many tokens.
BESIDE_UP_TO = 0.05


class Learned(NamedTuple):
    """What a run has learned of a parameter."""

    # of all periods, to be added to the base as ``left @ right^T``; None for a vector
    factors: Factors | None
    # returns the present weights in the parameter's shape, rounded once to its dtype
    present: Callable[[], torch.Tensor]


@dataclass(eq=False)
class _Sums:
    """Sums of the updates of a parameter."""

    # float32, flat: A (m, rank) of the present period, or a vector's weights (n,)
    now: torch.Tensor
    version: int = 0  # updates 0..version-1 are included
    past: Factors | None = None  # factors of ended periods


class FactorStore:
    """Factors of every parameter, which are brought to the present version segment by segment."""

    def __init__(
        self,
        settings: LowRankPerturbation,
        distribution: Distribution,
        run_seed: int,
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._distribution = distribution
        self._run_seed = run_seed
        self._device = device
        # runs programs on sums
        self._apply = choose_kernel(torch.empty(0, dtype=torch.float32, device=device), copies=())
        self._sums: dict[str, _Sums] = {}
        self._right: dict[str, tuple[int, torch.Tensor]] = {}  # period and V by parameter
        # programs of this sweep by range of updates
        self._replays: dict[tuple[int, int], Sequence[Program]] = {}
        self._file: FactorFile | None = None  # for ended periods; None: they are not written

    def keep_periods(
        self,
        directory: Path,
        layouts: Sequence[BlockLayout],
        journal: Journal,
        bytes_a_step: float | None,
    ) -> FactorFile:
        """Read ended periods from a directory, and write later ones there.

        Called before the first use.
        """
        elements = sum_elements(trained(layouts), self._settings.rank)
        period = self._settings.period
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

    def advance(
        self, spec: ParameterSpec, theta: torch.Tensor, updates: Sequence[Update], version: int
    ) -> None:
        """Bring a parameter's factors to a version."""
        try:
            self._advance(spec, self._sums_of(spec, theta), updates, version)
        except BaseException:  # the sums are between two versions; replay makes them again
            self._sums.pop(spec.name, None)
            raise

    def _advance(
        self, spec: ParameterSpec, sums: _Sums, updates: Sequence[Update], version: int
    ) -> None:
        while sums.version < version:
            period = sums.version // self._settings.period
            end = min(version, (period + 1) * self._settings.period)
            for program in self._programs(updates, sums.version, end):
                self._apply(sums.now, program, Draw(self._distribution, spec.index), None, None)
            if end % self._settings.period == 0:
                ended = sums.now
                if len(spec.shape) == 2:
                    columns = Factors(
                        ended.view(spec.shape[0], -1), self._right_of(spec, sums.version)
                    )
                    sums.past = columns if sums.past is None else sums.past.joined(columns)
                    sums.now = torch.zeros_like(ended)
                if self._file is not None:
                    self._file.keep(spec, period, ended)
            sums.version = end

    def forms(self, spec: ParameterSpec) -> bool:
        """Whether a matrix has so many columns of past periods that they are added to its weights
        for each visit.
        """
        past = self._sums[spec.name].past if spec.name in self._sums else None
        return past is not None and past.left.shape[1] > BESIDE_UP_TO * spec.shape[1]

    def form(self, spec: ParameterSpec, theta: torch.Tensor, out: torch.Tensor) -> None:
        """Write a matrix as of the start of the present period, summed in float32 and rounded
        once.
        """
        past = self._sums[spec.name].past
        assert past is not None, "a matrix without past periods is not formed"
        form(theta.view(spec.shape), past.left, past.right, out)

    def perturbations(self, evaluations: Sequence[Evaluation | None], zo_eps: float) -> Program:
        """The program for ``perturbed``: one ``Perturb`` for each stream."""
        perturbing = [
            None if evaluation is None or evaluation.shift == 0 else evaluation
            for evaluation in evaluations
        ]
        seeds = {
            seed: index
            for index, seed in enumerate(dict.fromkeys(e.seed for e in perturbing if e is not None))
        }
        instructions = [
            Perturb(0, 0.0, zo_eps) if e is None else Perturb(seeds[e.seed], e.shift, zo_eps)
            for e in perturbing
        ]
        return Program(tuple(seeds), tuple(instructions))

    def perturbed(
        self, spec: ParameterSpec, theta: torch.Tensor, perturbations: Program
    ) -> PerturbedParameter:
        """A parameter's factors or values at each stream's evaluation.

        If ``forms``, without the past periods.
        """
        sums = self._sums_of(spec, theta)
        count = len(perturbations.instructions)
        streams = torch.empty(count, sums.now.numel(), dtype=spec.dtype, device=self._device)
        perturb_each(sums.now, perturbations, self._distribution, spec.index, streams)
        if len(spec.shape) == 1:
            return streams
        left = streams.view(count, spec.shape[0], -1)
        right = self._right_of(spec, sums.version)
        if sums.past is not None and not self.forms(spec):
            past = Factors(sums.past.left.to(spec.dtype).expand(count, -1, -1), sums.past.right)
            return past.joined(Factors(left, right))
        return Factors(left, right)

    def present(self, spec: ParameterSpec, theta: torch.Tensor) -> torch.Tensor:
        """A parameter's present weights, rounded once to its dtype: flat, on the device of
        ``theta``.
        """
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
            return self.present(
                spec, theta if spec.encoding is None else decoded(spec, theta)
            ).view(spec.shape)

        return Learned(
            self._factors(spec, self._sums_of(spec, theta)) if len(spec.shape) == 2 else None,
            present,
        )

    def _factors(self, spec: ParameterSpec, sums: _Sums) -> Factors:
        """Factors of all periods, the present one last."""
        now = Factors(sums.now.view(spec.shape[0], -1), self._right_of(spec, sums.version))
        return now if sums.past is None else sums.past.joined(now)

    def _sums_of(self, spec: ParameterSpec, theta: torch.Tensor) -> _Sums:
        if spec.name not in self._sums:
            is_vector = len(spec.shape) == 1
            self._sums[spec.name] = (
                self._vector_sums(spec, theta) if is_vector else self._matrix_sums(spec)
            )
        return self._sums[spec.name]

    def _vector_sums(self, spec: ParameterSpec, theta: torch.Tensor) -> _Sums:
        """A vector's weights at the end of the last period on disk, else the base's."""
        while self._file is not None and self._file.periods > 0:
            period = self._file.periods - 1
            if (saved := self._file.read(spec, period)) is not None:
                return _Sums(saved.to(self._device), (period + 1) * self._settings.period)
        return _Sums(theta.to(self._device, torch.float32, copy=True))

    def _matrix_sums(self, spec: ParameterSpec) -> _Sums:
        """A matrix's factors of the periods on disk, and zeros for the next one."""
        rows = spec.shape[0]
        rank = self._settings.rank
        period = self._settings.period
        columns: list[Factors] = []
        while self._file is not None and len(columns) < self._file.periods:
            if (saved := self._file.read(spec, len(columns))) is None:
                break
            left = saved.to(self._device).view(rows, rank)
            right = self._draw_right(spec, len(columns) * period)
            columns.append(Factors(left, right))
        past = (
            Factors(*(torch.cat(side, dim=-1) for side in zip(*columns, strict=True)))
            if columns
            else None
        )
        now = torch.zeros(rows * rank, dtype=torch.float32, device=self._device)
        return _Sums(now, len(columns) * period, past)

    def _right_of(self, spec: ParameterSpec, step: int) -> torch.Tensor:
        """V in the period of a step, divided by the root of the rank: (n, rank) in the parameter's
        dtype.
        """
        period = step // self._settings.period
        if self._right.get(spec.name, (None, None))[0] != period:
            self._right[spec.name] = period, self._draw_right(spec, step)
        return self._right[spec.name][1]

    def _draw_right(self, spec: ParameterSpec, step: int) -> torch.Tensor:
        rank = self._settings.rank
        seed = self._settings.period_seed(self._run_seed, step)
        drawn = torch.empty(spec.shape[1] * rank, dtype=torch.float32, device=self._device)
        fill(drawn, self._distribution, seed, spec.index)
        return drawn.div_(rank**0.5).to(spec.dtype).view(spec.shape[1], rank)

    def _programs(self, updates: Sequence[Update], start: int, end: int) -> Sequence[Program]:
        """Compile updates to programs of at most ``SEEDS_IN_TURN`` directions."""
        if (start, end) not in self._replays:
            parts = split_updates(updates[start:end], SEEDS_IN_TURN)
            self._replays[start, end] = [compile_updates(part)[False] for part in parts]
        return self._replays[start, end]


def kept_bytes_a_step(
    perturbation: Perturbation, layouts: Sequence[BlockLayout], most: float | None = None
) -> float:
    """Average bytes a step that a low-rank run writes for its ended periods."""
    if isinstance(perturbation, DensePerturbation):
        return 0.0
    on_average = (
        4 * sum(sum_elements(trained(layouts), perturbation.rank).values()) / perturbation.period
    )
    return on_average if most is None or on_average <= most else 0.0
