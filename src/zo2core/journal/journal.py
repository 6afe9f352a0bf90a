"""The journal: an append-only list of updates. With the base checkpoint it determines the weights of every step.

On disk it is a file of checksummed records (``io/record_log.py``): the first is the header (format version and identity of
the run), each further one a step, digests of the base's bytes, or the result of an evaluation. The steps of a zeroth-order
run are updates, which can be replayed. Those of a first-order run, whose header has a `method`, are commits, which cannot.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from zo2core.errors import JournalError, reason
from zo2core.io.record_log import DamagedRecordError, Record, RecordFile, from_line, to_json, to_line
from zo2core.journal.records import (
    COMMIT,
    DIGEST,
    DIGESTS,
    DRAWN,
    EVALUATION,
    FORMAT,
    METHOD,
    Header,
    ImpossibleRecordError,
    SideRecords,
    completed,
    damaged,
    decode,
    decode_commit,
    differences,
    encode,
    encode_commit,
    evaluation_record,
    may_be_torn_header,
    require_header,
    shown,
    unwritable,
)
from zo2core.ranges import counted
from zo2core.types import Commit, Update


class Journal:
    """Steps 0, 1, 2, ... of one run, in memory and, given a path, on disk as well. Only one thread at a time may append.

    Args:
        path: File to continue, or to create with the first record. None keeps the journal in memory. One object at a time
            writes a file, from ``lock`` or its first record until ``close``; others may read it meanwhile.

    Raises:
        JournalError: if the file exists and cannot be read, is not a journal, or is damaged before its last record.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._name = "journal" if path is None else str(path)
        self._header: Header | None = None
        self._updates: list[Update] = []
        self._commits: list[Commit] = []  # one of the two lists is empty
        self._side_records = SideRecords()
        self._chain: list[int] = [0]  # version -> checksum over header and updates up to it
        self._torn = False
        self._started_at: int | None = None  # version when this object wrote the header; None: it did not
        self._file = None if path is None else self._open(Path(path))

    @property
    def name(self) -> str:
        """The path, or "journal" for a journal in memory; for errors."""
        return self._name

    @property
    def header(self) -> Header | None:
        """Identity of the run; None before ``begin``."""
        return self._header

    @property
    def updates(self) -> Sequence[Update]:
        """All updates so far, a live view; empty for a first-order run."""
        return self._updates

    @property
    def commits(self) -> Sequence[Commit]:
        """All steps of a first-order run so far, a live view; empty for a zeroth-order run."""
        return self._commits

    @property
    def steps(self) -> Sequence[Update | Commit]:
        """All updates or commits so far, a live view."""
        return self._commits or self._updates

    @property
    def version(self) -> int:
        """Number of steps so far."""
        return len(self._updates) + len(self._commits)

    @property
    def is_replayable(self) -> bool:
        """Whether the journal and the base determine the weights of every step; first-order runs need snapshots."""
        return self._header is None or METHOD not in self._header

    @property
    def base_digests(self) -> Mapping[str, str]:
        """Hexadecimal digest of each segment's bytes in the base, by segment name, as far as noted; a live view."""
        return MappingProxyType(self._side_records.digests)

    @property
    def evaluations(self) -> Mapping[int, Mapping[str, float]]:
        """Results of evaluations, by number of updates in the weights and then by name; a live view."""
        return MappingProxyType(self._side_records.evaluations)

    @property
    def torn(self) -> bool:
        """Whether the file ended with an incomplete record, which was dropped.

        A crash during a write leaves one, and damage to the last record looks the same; ``require_version`` detects it.
        """
        return self._torn

    @property
    def noise(self) -> str | None:
        """Name of the run's noise generator; None before ``begin`` and for a first-order run.

        Raises:
            JournalError: if the header lacks it.
        """
        if self._header is None or not self.is_replayable:
            return None
        if self._header.get("noise") is None:
            raise JournalError(
                self._name,
                found="a header without noise",
                expected="the name of the noise generator",
                remedy="restore the journal from a copy",
            )
        return str(self._header["noise"])

    def lock(self) -> None:
        """Keep every other engine from writing the file until ``close``; one that does not exist is locked by ``begin``.

        Raises:
            JournalError: if another engine writes the file, it has changed since it was read, or it cannot be written.
        """
        if self._file is not None:
            try:
                self._file.lock()
            except OSError as error:
                raise unwritable(self._name, error) from error

    def begin(self, header: Header) -> None:
        """Write the header of a new journal, or check that an existing one belongs to the same run.

        Args:
            header: Header of the run, of JSON values. Keys with the value None are not compared, nor are "model" and
                "provenance" where the journal of an earlier version lacks them.

        Raises:
            TypeError, ValueError, RecursionError: if a value is not a JSON value, or is of another type than its key has.
            JournalError: if the journal has another header (with each difference) or noise of other numbers, or the file
                cannot be written.
        """
        header = completed(header)
        if self._header is None:
            header = {key: value for key, value in header.items() if value is not None}
            require_header(header)
            self._started_at = self.version
            self._write(header, partial(self._add_header, header), lambda: self._header is not None)
            return
        differing = differences(self._header, header)
        if differing is not None:
            theirs, ours = differing
            raise JournalError(
                self._name,
                found=theirs,
                expected=ours,
                remedy="continue with the base checkpoint and options that the journal was started with, or start a new one",
            )
        recorded, drawn = (one.get(DRAWN) or {} for one in (self._header, header))
        if recorded and drawn and recorded.get("crc32") != drawn.get("crc32"):  # of equal numbers, torch may be another
            raise JournalError(
                self._name,
                found=f"noise that torch {shown(recorded.get('torch'))} drew, of checksum {shown(recorded.get('crc32'))}",
                expected=f"that which torch {shown(drawn.get('torch'))} draws here, of checksum {shown(drawn.get('crc32'))}",
                remedy="use the version of torch and the kind of processor that the run began with",
            )

    def append(self, step: Update | Commit) -> None:
        """Add the next step; on return it is durable if the journal is a file.

        Raises:
            JournalError: if no estimator can have made the update, the file cannot be written, or it was removed or
                replaced. After any exception, also an interrupt, either file and memory both have the step, or neither has.
        """
        assert self._header is not None, "a journal has a header before it has steps"
        assert step.step == self.version, "steps are appended in order"
        record = _record_of(step)
        try:
            decoded = self._decoded(record)  # refuses a record that could not be read back, before anything is written
        except ImpossibleRecordError as error:
            raise JournalError(
                f"{self._name}, step {step.step}",
                found=error.found,
                expected=error.expected,
                remedy="fix the estimator, or lower `lr`; the step was not taken",
            ) from error
        self._write(record, partial(self._count, decoded, record), lambda: self.version > step.step)

    def withdraw(self) -> None:
        """Undo ``begin`` or ``take_excerpt`` if this object wrote the header and no step followed.

        A run that is refused leaves no file.

        Raises:
            OSError: if the file cannot be removed.
        """
        if self._header is not None and self._started_at == self.version:
            self._header, self._chain, self._started_at = None, [0], None
            self._updates.clear()
            self._commits.clear()
            self._side_records.clear()
            if self._file is not None:
                self._file.remove()

    def withdraw_if_refused(self, kind: type[BaseException] | None, *_: object) -> None:
        """Call ``withdraw`` and ``close`` after an exception, as an exit callback of an ``ExitStack``."""
        if kind is not None:
            with contextlib.suppress(OSError):
                self.withdraw()
            self.close()

    def note_base(self, digests: Mapping[str, str]) -> None:
        """Add digests of the base's bytes; on return they are durable if the journal is a file.

        Args:
            digests: Segment name to lower-case hexadecimal digest. Known digests are not written again.

        Raises:
            JournalError: if another digest of a segment is known, or the file cannot be written.
        """
        assert self._header is not None, "a journal has a header before it has digests"
        for segment, digest in digests.items():
            assert DIGEST.fullmatch(digest), "a digest is written in lower-case hexadecimal digits"
            known = self.base_digests.get(segment, digest)
            if known != digest:
                raise JournalError(
                    self._name,
                    found=f"a base whose {segment} has digest {shown(digest)}",
                    expected=f"digest {shown(known)}, as when the run was started",
                    remedy="restore the base checkpoint, or start a new run",
                )
        unknown = {segment: digest for segment, digest in digests.items() if segment not in self.base_digests}
        if unknown:
            kept = self._side_records.digests
            self._write({DIGESTS: unknown}, partial(kept.update, unknown), lambda: unknown.keys() <= kept.keys())

    def note_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Add the result of an evaluation; on return it is durable if the journal is a file.

        Args:
            step: Number of updates in the weights that were evaluated.
            values: Results by name. They replace an earlier result of the same step.

        Raises:
            JournalError: if the file cannot be written.
        """
        assert 0 <= step <= self.version, "the evaluated step belongs to the run"
        record, kept = evaluation_record(step, values), self._side_records.evaluations
        before = kept.get(step)
        count = partial(self._side_records.add, record, self.version)
        self._write(record, count, lambda: kept.get(step) is not before)

    def require_version(self, version: int, where: str) -> None:
        """Refuse a journal that has lost durable steps.

        Args:
            version: Number of steps that are known to have been durable.
            where: Name of the file that they are known from, for the error.

        Raises:
            JournalError: naming both numbers.
        """
        if self.version < version:
            torn = " and a damaged last record" if self._torn else ""
            raise JournalError(
                self._name,
                found=f"{counted(self.version, 'step')}{torn}",
                expected=f"at least {version}, since {where} knows of step {version - 1}",
                remedy=f"restore the journal from a copy: its end was damaged or cut; or remove {where} to do without them",
            )

    def until(self, step: int) -> Journal:
        """A copy in memory of the run's first steps.

        Raises:
            JournalError: if the run is shorter.
        """
        if not 0 <= step <= self.version:
            raise JournalError(
                self._name,
                found=counted(self.version, "step"),
                expected=f"at least {shown(step)}",
                remedy=f"pass a step from 0 to {self.version}",
            )
        copy = Journal()
        copy._header = self._header
        copy._updates, copy._commits = self._updates[:step], self._commits[:step]
        copy._side_records = self._side_records.until(step)
        copy._chain = self._chain[: step + 1]
        return copy

    def excerpt(self, begin: int) -> bytes:
        """Lines of a file: header, digests of the base, steps from ``begin`` on, evaluations; empty without a header.

        An evaluation precedes the update of its step, as in the run's file, so that the files of all workers are equal.
        """
        if self._header is None:
            return b""
        records = [self._header, *self._side_records.digest_records()]
        for step in range(self.version + 1):
            if step in self.evaluations:
                records.append(evaluation_record(step, self.evaluations[step]))
            if begin <= step < self.version:
                records.append(_record_of(self.steps[step]))
        return b"".join(map(to_line, records))

    def take_excerpt(self, lines: bytes) -> None:
        """Append the records of another journal's excerpt that this journal lacks.

        Args:
            lines: Excerpt of a journal that starts with this journal's steps.

        Raises:
            JournalError: if a line is damaged, or the file cannot be written.
        """
        try:
            records = [from_line(line) for line in lines.splitlines()]
            for record in records[:1]:
                require_header(record)
            decode_step = decode_commit if any(METHOD in record for record in records[:1]) else decode
            steps = [decode_step(record) for record in records[1:] if not {DIGESTS, EVALUATION} & record.keys()]
            side_records = SideRecords()
            for record in records[1:]:
                side_records.add(record, steps[-1].step + 1 if steps else self.version)
        except (ValueError, RecursionError) as error:
            raise JournalError(
                self._name,
                found=f"a damaged record of another worker ({error})",
                expected="records as they are in its journal",
                remedy="start the workers again",
            ) from error
        is_new = self._header is None
        try:
            for header in records[:1]:
                self.begin(header)
            self.note_base(side_records.digests)
            for step in steps:
                self._add_evaluations(side_records, step.step)
                if step.step >= self.version:
                    self.append(step)
            self._add_evaluations(side_records, self.version)
        finally:
            self._started_at = self.version if is_new else None

    def _add_evaluations(self, side_records: SideRecords, last: int) -> None:
        """Note evaluations, up to a step, that this journal lacks."""
        for step in sorted(side_records.evaluations.keys() - self.evaluations.keys()):
            if step <= min(last, self.version):
                self.note_evaluation(step, side_records.evaluations[step])

    @property
    def checksum(self) -> int:
        """Checksum over header and all steps: journals with the same checksum are of the same run, at the same step."""
        return self._chain[self.version]

    def chain(self, version: int) -> int | None:
        """Checksum over header and steps 0..version-1, which identifies the weights of a version of this run.

        Makes the journal durable: weights of a version may be written to disk once its checksum is known.

        Returns:
            The checksum; None if the journal is shorter.

        Raises:
            JournalError: if an existing file cannot be synced.
        """
        if self._file is not None:
            try:
                self._file.settle()
            except OSError as error:
                raise JournalError(
                    self._name,
                    found=reason(error),
                    expected="a file that can be synced",
                    remedy="repair the disk; blocks are written back only after the journal",
                ) from error
        return self._chain[version] if 0 <= version <= self.version else None

    def close(self) -> None:
        """Close the file, which ends its lock. May be called twice; the next record reopens it."""
        if self._file is not None:
            self._file.close()

    def _write(self, record: Record, count: Callable[[], object], is_counted: Callable[[], bool]) -> None:
        """Write a record durably and add it in memory: both or neither, also after an interrupt between the two."""
        if self._file is None:
            count()
            return
        end = 0 if self._header is None else self._file.end
        try:
            if self._header is None:
                self._file.retract(end)  # a withdrawn header that an interrupt left in the file
            self._file.append(record)
            count()
        except BaseException as error:
            if not is_counted():
                with contextlib.suppress(OSError):
                    self._file.retract(end)  # otherwise a resumed run would have a step that this one has not
            if isinstance(error, OSError):
                raise unwritable(self._name, error) from error
            raise

    def _open(self, path: Path) -> RecordFile:
        try:
            file = RecordFile(path)
        except OSError as error:
            raise JournalError(path, found=reason(error), expected="a readable journal", remedy="check the path") from error
        except DamagedRecordError as error:
            raise damaged(path, error.line, f"a damaged record ({error})", f"a record of format {FORMAT}") from error
        for line, record in enumerate(file.loaded, start=1):
            try:
                self._add(record)
            except ImpossibleRecordError as error:
                raise damaged(path, line, error.found, error.expected) from error
            except (ValueError, RecursionError) as error:  # infinity, as json reads 1e999; a value nested too deep
                raise damaged(path, line, f"a value that JSON lacks ({error})", f"a record of format {FORMAT}") from error
        file.loaded.clear()
        self._torn = bool(file.torn)
        if self._header is None and not may_be_torn_header(file.torn):  # the file would be overwritten
            found = f"{len(file.torn)} bytes that are not the beginning of a journal"  # not shown: they may be secret
            raise JournalError(path, found=found, expected="a journal", remedy="check the path")
        return file

    def _add(self, record: Record) -> None:
        if self._header is None:
            require_header(record)
            self._add_header(record)
        elif not self._side_records.add(record, self.version):
            self._add_step(record)

    def _add_header(self, header: Record) -> None:
        self._chain = [zlib.crc32(to_json({key: value for key, value in header.items() if key != DRAWN}))]
        self._header = header

    def _add_step(self, record: Record) -> None:
        step = self._decoded(record)
        if step.step != self.version:
            raise ImpossibleRecordError(f"step {shown(step.step)}", f"step {self.version}")
        self._count(step, record)

    def _decoded(self, record: Record) -> Update | Commit:
        """The step of a record."""
        if (COMMIT in record) is self.is_replayable:
            found, expected = ("a commit", "an update") if self.is_replayable else ("no commit", "a commit")
            raise ImpossibleRecordError(found, f"{expected}, as the header says")
        return decode(record) if self.is_replayable else decode_commit(record)

    def _count(self, step: Update | Commit, record: Record) -> None:
        version = self.version
        self._chain[version + 1 :] = [zlib.crc32(to_json(record), self._chain[version])]  # counts with the step
        if isinstance(step, Commit):
            self._commits.append(step)
        else:
            self._updates.append(step)


def _record_of(step: Update | Commit) -> Record:
    return encode_commit(step) if isinstance(step, Commit) else encode(step)
