"""The journal: an append-only list of updates.

With the base checkpoint it determines the weights of every step. On disk it is a file of
checksummed records (``io/durable.py``). A branch is a new journal with the first steps of a run: it
undoes the later ones.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from zo2core.errors import JournalError, OutputError, system_errors_as
from zo2core.io import durable
from zo2core.journal.records import (
    COMMIT,
    DIGEST,
    DIGESTS,
    DRAWN,
    EVALUATION,
    MEASURED,
    METHOD,
    Header,
    ImpossibleRecordError,
    completed,
    damaged,
    decode,
    decode_digests,
    decode_results,
    differences,
    encode,
    encode_results,
    json_object,
    may_be_torn_header,
    require_header,
    shown,
    unwritable,
)
from zo2core.ranges import counted
from zo2core.types import Commit, Update


class Journal:
    """Steps 0, 1, 2, ... of one run, in memory and, given a path, on disk as well.

    Only one thread at a time may append.

    Args:
        path: File to continue, or to create with the first record. None keeps the journal in
            memory. One object at a time writes a file, from ``lock`` or its first record until
            ``close``; others may read it meanwhile.

    Attributes:
        name: The path, or "journal" for a journal in memory; for errors.
        header: Identity of the run; None before ``begin``.
        base_digests: Hexadecimal digest of each segment's bytes in the base, by segment name, as
            far as noted. Only read it.
        evaluations: Results of evaluations, by number of updates in the weights and then by name.
            Only read them.
        measured: What steps have measured beside their losses, by step and then by name. Only read
            it.
        torn: Whether the file ended with an incomplete record, which was dropped. A crash during a
            write leaves one, and damage to the last record looks the same; ``require_version``
            detects it.

    Raises:
        JournalError: if the file exists and cannot be read, is not a journal, or is damaged before
            its last record.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.name = "journal" if path is None else str(path)
        self.header: Header | None = None
        self.base_digests: dict[str, str] = {}
        self.evaluations: dict[int, Mapping[str, float]] = {}
        self.measured: dict[int, Mapping[str, float]] = {}
        self.torn = False
        self._steps: list[Update] | list[Commit] = []
        self._chain: list[int] = [0]  # version -> checksum over header and updates up to it
        # version when this object wrote the header; None: it did not
        self._started_at: int | None = None
        self._file = None if path is None else self._open(Path(path))

    @property
    def steps(self) -> Sequence[Update | Commit]:
        """All updates or commits so far, a live view."""
        return self._steps

    @property
    def updates(self) -> Sequence[Update]:
        """All updates so far, a live view; empty for a first-order run."""
        return cast("list[Update]", self._steps) if self.is_replayable else ()

    @property
    def commits(self) -> Sequence[Commit]:
        """All steps of a first-order run so far, a live view; empty for a zeroth-order run."""
        return () if self.is_replayable else cast("list[Commit]", self._steps)

    @property
    def version(self) -> int:
        """Number of steps so far."""
        return len(self._steps)

    @property
    def is_replayable(self) -> bool:
        """Whether the journal and the base determine the weights of every step; first-order runs
        need snapshots.
        """
        return self.header is None or METHOD not in self.header

    @property
    def noise(self) -> str | None:
        """Name of the run's noise generator; None before ``begin`` and for a first-order run.

        Raises:
            JournalError: if the header lacks it.
        """
        if self.header is None or not self.is_replayable:
            return None
        if self.header.get("noise") is None:
            expected, remedy = "the name of the noise generator", "restore the journal from a copy"
            raise JournalError(self.name, "a header without noise", expected, remedy)
        return str(self.header["noise"])

    def require_run(self) -> Header:
        """Return the header, and refuse a journal without one."""
        if self.header is None:
            remedy = "check the path, or start a run first"
            raise JournalError(self.name, "no journal", "the journal of a run", remedy)
        return self.header

    def lock(self) -> None:
        """Keep every other engine from writing the file until ``close``; one that does not exist is
        locked by ``begin``.

        Raises:
            JournalError: if another engine writes the file, it has changed since it was read, or it
                cannot be written.
        """
        if self._file is not None:
            try:
                self._file.lock()
            except OSError as error:
                raise unwritable(self.name, error) from error

    def begin(self, header: Header) -> None:
        """Write the header of a new journal, or check that an existing one belongs to the same run.

        Args:
            header: Header of the run, of JSON values. Keys with the value None are not compared.

        Raises:
            TypeError, ValueError, RecursionError: if a value is not a JSON value, or is of another
                type than its key has.
            JournalError: if the journal has another header (with each difference) or noise of other
                numbers, or the file cannot be written.
        """
        header = completed(header)
        if self.header is None:
            header = {key: value for key, value in header.items() if value is not None}
            require_header(header)
            self._started_at = self.version
            self._write(header, partial(self._add_header, header), lambda: self.header is not None)
            return
        differing = differences(self.header, header)
        if differing is not None:
            theirs, ours = differing
            remedy = (
                "continue with the base checkpoint and options that the journal was started with, "
                "or start a new one"
            )
            raise JournalError(self.name, theirs, ours, remedy)
        recorded, drawn = (one.get(DRAWN) or {} for one in (self.header, header))
        if recorded and drawn and recorded.get("crc32") != drawn.get("crc32"):
            # of equal numbers, torch may be another
            then, now = (
                [shown(one.get(key)) for key in ("torch", "crc32")] for one in (recorded, drawn)
            )
            raise JournalError(
                self.name,
                found=f"noise that torch {then[0]} drew, of checksum {then[1]}",
                expected=f"that which torch {now[0]} draws here, of checksum {now[1]}",
                remedy="use the version of torch and the kind of processor that the run began with",
            )

    def append(self, step: Update | Commit) -> None:
        """Add the next step; on return it is durable if the journal is a file.

        Raises:
            JournalError: if no estimator can have made the update, the file cannot be written, or
                it was removed or replaced. After any exception, also an interrupt, either file and
                memory both have the step, or neither has.
        """
        assert self.header is not None, "a journal has a header before it has steps"
        assert step.step == self.version, "steps are appended in order"
        record = encode(step)
        try:
            # refuses a record that could not be read back, before anything is written
            decoded = self._decoded(record)
        except ImpossibleRecordError as error:
            where = f"{self.name}, step {step.step}"
            remedy = "fix the estimator, or lower `lr`; the step was not taken"
            raise JournalError(where, error.found, error.expected, remedy) from error
        self._write(record, partial(self._count, decoded, record), lambda: self.version > step.step)

    def withdraw(self) -> None:
        """Undo ``begin`` or ``take_excerpt`` if this object wrote the header and no step followed.

        A run that is refused leaves no file.

        Raises:
            OSError: if the file cannot be removed.
        """
        if self.header is not None and self._started_at == self.version:
            self.header = None
            self._chain = [0]
            self._started_at = None
            for records in (self._steps, self.base_digests, self.evaluations, self.measured):
                records.clear()
            if self._file is not None:
                self._file.remove()

    def withdraw_if_refused(self, kind: type[BaseException] | None, *_: object) -> None:
        """Call ``withdraw`` and ``close`` after an exception, as an exit callback of an
        ``ExitStack``.
        """
        if kind is not None:
            with contextlib.suppress(OSError):
                self.withdraw()
            self.close()

    def note_base(self, digests: Mapping[str, str]) -> None:
        """Add digests of the base's bytes; on return they are durable if the journal is a file.

        Args:
            digests: Segment name to lower-case hexadecimal digest. Known digests are not written
                again.

        Raises:
            JournalError: if another digest of a segment is known, or the file cannot be written.
        """
        assert self.header is not None, "a journal has a header before it has digests"
        for segment, digest in digests.items():
            assert DIGEST.fullmatch(digest), "a digest is written in lower-case hexadecimal digits"
            known = self.base_digests.get(segment, digest)
            if known != digest:
                raise JournalError(
                    self.name,
                    found=f"a base whose {segment} has digest {shown(digest)}",
                    expected=f"digest {shown(known)}, as when the run was started",
                    remedy="restore the base checkpoint, or start a new run",
                )
        kept = self.base_digests
        unknown = {segment: digest for segment, digest in digests.items() if segment not in kept}
        if unknown:
            self._write(
                {DIGESTS: unknown},
                partial(kept.update, unknown),
                lambda: unknown.keys() <= kept.keys(),
            )

    def note_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Add the result of an evaluation; on return it is durable if the journal is a file.

        Args:
            step: Number of updates in the weights that were evaluated.
            values: Results by name. They replace an earlier result of the same step.

        Raises:
            JournalError: if the file cannot be written.
        """
        assert 0 <= step <= self.version, "the evaluated step belongs to the run"
        self._note(EVALUATION, self.evaluations, step, values)

    def note_measured(self, values: Mapping[str, float]) -> None:
        """Add what the next step has measured beside its losses; on return it is durable if the
        journal is a file.

        Args:
            values: Results by name. They replace earlier ones of a step that was not taken then;
                equal ones are not written again.

        Raises:
            JournalError: if the file cannot be written.
        """
        if self.measured.get(self.version) != values:
            self._note(MEASURED, self.measured, self.version, values)

    def _note(
        self, kind: str, noted: Mapping[int, object], step: int, values: Mapping[str, float]
    ) -> None:
        """Add a record of results of a step."""
        record = encode_results(kind, step, values)
        previous = noted.get(step)
        self._write(record, partial(self._add, record), lambda: noted.get(step) is not previous)

    def require_version(self, version: int, where: str) -> None:
        """Refuse a journal that has lost durable steps.

        Args:
            version: Number of steps that are known to have been durable.
            where: Name of the file that they are known from, for the error.

        Raises:
            JournalError: naming both numbers.
        """
        if self.version < version:
            torn = " and a damaged last record" if self.torn else ""
            raise JournalError(
                self.name,
                found=f"{counted(self.version, 'step')}{torn}",
                expected=f"at least {version}, since {where} knows of step {version - 1}",
                remedy="restore the journal from a copy: its end was damaged or cut; or remove "
                f"{where} to do without them",
            )

    def until(self, step: int) -> Journal:
        """A copy in memory of the run's first steps.

        Raises:
            JournalError: if the run is shorter.
        """
        if not 0 <= step <= self.version:
            raise JournalError(
                self.name,
                found=counted(self.version, "step"),
                expected=f"at least {shown(step)}",
                remedy=f"pass a step from 0 to {self.version}",
            )
        copy = Journal()
        copy.header = self.header
        copy.base_digests = {**self.base_digests}
        copy.evaluations = {
            version: values for version, values in self.evaluations.items() if version <= step
        }
        copy.measured = {
            noted_step: values for noted_step, values in self.measured.items() if noted_step < step
        }
        copy._steps = self._steps[:step]
        copy._chain = self._chain[: step + 1]
        return copy

    def excerpt(self, begin: int) -> bytes:
        """Lines of a file: header, digests of the base, steps from ``begin`` on, and the results of
        all; empty without a header.

        The results of a step precede its update, as in the run's file, so that the files of all
        workers are equal.
        """
        if self.header is None:
            return b""
        written = [self.header, *([{DIGESTS: self.base_digests}] if self.base_digests else [])]
        for step in range(self.version + 1):
            for kind, results in ((EVALUATION, self.evaluations), (MEASURED, self.measured)):
                if step in results:
                    written.append(encode_results(kind, step, results[step]))
            if begin <= step < self.version:
                written.append(encode(self._steps[step]))
        return b"".join(map(durable.to_line, written))

    def take_excerpt(self, lines: bytes) -> None:
        """Append the records of another journal's excerpt that this journal lacks.

        Args:
            lines: Excerpt of a journal that starts with this journal's steps.

        Raises:
            JournalError: if a line is damaged, or the file cannot be written.
        """
        is_new = self.header is None
        theirs = self.until(self.version)
        theirs.base_digests.clear()
        try:
            header, *others = [durable.from_line(line) for line in lines.splitlines()]
            require_header(header)
            for record in [header, *others] if is_new else others:
                theirs._add(record, known=self.version)
        except (ValueError, RecursionError) as error:
            raise JournalError(
                self.name,
                found=f"a damaged record of another worker ({error})",
                expected="records as they are in its journal",
                remedy="start the workers again",
            ) from error
        try:
            self.begin(header)
            self.note_base(theirs.base_digests)
            for version in range(self.version, theirs.version + 1):
                for evaluated in sorted(theirs.evaluations.keys() - self.evaluations.keys()):
                    if evaluated <= version:
                        self.note_evaluation(evaluated, theirs.evaluations[evaluated])
                if version in theirs.measured:
                    self.note_measured(theirs.measured[version])
                if version < theirs.version:
                    self.append(theirs.steps[version])
        finally:
            self._started_at = self.version if is_new else None

    @property
    def checksum(self) -> int:
        """Checksum over header and all steps: journals with the same checksum are of the same run,
        at the same step.
        """
        return self._chain[self.version]

    def chain(self, version: int) -> int | None:
        """Checksum over header and steps 0..version-1, which identifies the weights of a version of
        this run.

        Makes the journal durable: weights of a version may be written to disk once its checksum is
        known.

        Returns:
            The checksum; None if the journal is shorter.

        Raises:
            JournalError: if an existing file cannot be synced.
        """
        if self._file is not None:
            with system_errors_as(
                JournalError,
                self.name,
                expected="a file that can be synced",
                remedy="check the path and its disk",
                afterwards="blocks are written back only after the journal",
            ):
                self._file.settle()
        return self._chain[version] if 0 <= version <= self.version else None

    def close(self) -> None:
        """Close the file, which ends its lock. May be called twice; the next record reopens it."""
        if self._file is not None:
            self._file.close()

    def _write(
        self, record: durable.Record, count: Callable[[], object], is_counted: Callable[[], bool]
    ) -> None:
        """Write a record durably and add it in memory: both or neither, also after an interrupt
        between the two.
        """
        if self._file is None:
            count()
            return
        try:
            if self.header is None:
                self._file.retract(0)  # a withdrawn header that an interrupt left in the file
            self._file.append(record, count, is_counted)
        except OSError as error:
            raise unwritable(self.name, error) from error

    def _open(self, path: Path) -> durable.RecordFile:
        try:
            with system_errors_as(
                JournalError, path, expected="a readable journal", remedy="check the path"
            ):
                file = durable.RecordFile(path)
        except durable.DamagedRecordError as error:
            raise damaged(path, error.line, f"a damaged record ({error})") from error
        for line, record in enumerate(file.loaded, start=1):
            try:
                self._add(record)
            except ImpossibleRecordError as error:
                raise damaged(path, line, error.found, error.expected) from error
            except (ValueError, RecursionError) as error:
                # infinity, as json reads 1e999; a value nested too deep
                raise damaged(path, line, f"a value that JSON lacks ({error})") from error
        file.loaded.clear()
        self.torn = bool(file.torn)
        if self.header is None and not may_be_torn_header(file.torn):
            # the file would be overwritten
            # not shown: they may be secret
            found = f"{len(file.torn)} bytes that are not the beginning of a journal"
            raise JournalError(path, found, "a journal", "check the path")
        return file

    def _add(self, record: durable.Record, known: int = 0) -> None:
        """Add a record that was read, unless it is one of the first ``known`` steps."""
        if self.header is None:
            require_header(record)
            self._add_header(record)
        elif DIGESTS in record:
            self.base_digests |= decode_digests(record, self.base_digests)
        elif EVALUATION in record:
            evaluated, values = decode_results(EVALUATION, record, self.version)
            self.evaluations[evaluated] = values  # replaces an earlier result
        elif MEASURED in record:
            step_of, values = decode_results(MEASURED, record, self.version)
            self.measured[step_of] = values
        elif (step := self._decoded(record)).step == self.version:
            self._count(step, record)
        elif not 0 <= step.step < known:
            raise ImpossibleRecordError(f"step {shown(step.step)}", f"step {self.version}")

    def _add_header(self, header: durable.Record) -> None:
        self._chain = [
            zlib.crc32(
                durable.to_json({key: value for key, value in header.items() if key != DRAWN})
            )
        ]
        self.header = header

    def _decoded(self, record: durable.Record) -> Update | Commit:
        """The step of a record."""
        if (COMMIT in record) is self.is_replayable:
            found, expected = (
                ("a commit", "an update") if self.is_replayable else ("no commit", "a commit")
            )
            raise ImpossibleRecordError(found, f"{expected}, as the header says")
        return decode(record)

    def _count(self, step: Update | Commit, record: durable.Record) -> None:
        version = self.version
        # counts with the step
        self._chain[version + 1 :] = [zlib.crc32(durable.to_json(record), self._chain[version])]
        self._steps.append(step)  # type: ignore[arg-type]


def branch_journal(
    source: Journal | Path | str,
    destination: Path | str,
    step: int,
    *,
    estimator: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write a new journal with the first steps of a run; an engine that opens it continues from
    there.

    The header is that of the new run. Its key ``branched`` lists the runs that the steps were
    copied from, oldest first: for each run the number of copied steps, the journal's checksum at
    that step, and its estimator's options.

    Args:
        source: The journal to branch from, or its path. It is only read, and may belong to a
            running engine.
        destination: Path of the new journal. It appears whole and durable, or not at all.
        step: Number of steps to copy.
        estimator: Options of the new run's estimator (``estimator.options``); None keeps the
            source's.
        provenance: Provenance of the new run; None keeps the source's.

    Raises:
        JournalError: if the source is not a journal, is damaged, or has fewer steps.
        OutputError: if the destination exists or cannot be written.
        OptionError: if ``provenance`` is not made of JSON values.
    """
    opened = source if isinstance(source, Journal) else Journal(source)
    try:
        header = dict(opened.require_run())
        if not opened.is_replayable:
            expected, remedy = (
                "steps that can be replayed",
                "start a new run from an adapter that zo2 export wrote",
            )
            raise JournalError(opened.name, "first-order steps", expected, remedy)
        branch = opened.until(step)
    finally:
        if opened is not source:
            opened.close()
    origin = {
        "step": step,
        "checksum": f"{branch.checksum:08x}",
        "estimator": header.get("estimator"),
    }
    header["branched"] = [*header.get("branched", ()), origin]
    for name, values in (("estimator", estimator), ("provenance", provenance)):
        if values is not None:
            header[name] = json_object(name, values)
    branch.header = header
    branch.evaluations.clear()
    if os.path.lexists(destination):
        raise OutputError(destination, "a file", "a path that is free", "choose another path")
    copy_journal(branch, destination)


def copy_journal(source: Journal, destination: Path | str) -> None:
    """Write a copy of a journal to a path.

    Args:
        source: The journal, on disk or in memory.
        destination: Path of the copy; a file at this path is replaced at once, whole and durable,
            or not at all.

    Raises:
        JournalError: if the journal has no header.
        OutputError: if the file cannot be written.
    """
    source.require_run()
    path = Path(destination)
    remedy = "free space or choose another path"
    with system_errors_as(OutputError, path, expected="a path that can be written", remedy=remedy):
        durable.make_directory(path.absolute().parent)
        durable.replace_file(path, source.excerpt(0))
