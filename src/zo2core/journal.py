"""The journal: an append-only list of updates.

With the base checkpoint it determines the weights of every step.

On disk it is a file of checksummed records (``io/durable.py``): the first is the header (format
version and identity of the run), each further one a step, digests of the base's bytes, or the
result of an evaluation. The steps of a zeroth-order run are updates, which can be replayed. Those
of a first-order run, whose header has a `method`, are commits, which cannot.

A branch is a new journal with the first steps of a run: it undoes the later ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

from zo2core.errors import JournalError, OptionError, OutputError, reason, system_errors_as
from zo2core.io import durable
from zo2core.ranges import counted
from zo2core.types import Commit, Evaluation, ParameterSpec, Update

SHOWN = 80  # characters of a value that an error shows


class ImpossibleRecordError(ValueError):
    """A record whose checksum is right, but which no run of this format writes."""

    def __init__(self, found: str, expected: str) -> None:
        self.found = found
        self.expected = expected
        super().__init__(f"{found}; expected {expected}")


def shown(value: object) -> str:
    """A value's ``repr``, truncated so that an error stays one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, values nested too deep
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def damaged(path: Path, line: int, found: str, expected: str | None = None) -> JournalError:
    """The error for a file with a damaged line."""
    remedy = "restore the journal from a copy; records after the damage cannot be trusted"
    expected = f"a record of format {FORMAT}" if expected is None else expected
    return JournalError(f"{path}, line {line}", found, expected, remedy)


def unwritable(name: str, error: OSError) -> JournalError:
    """The error for a file that cannot be opened for writing, or written."""
    expected, remedy = "a file that can be written and synced", "free space or repair the disk"
    if isinstance(error, durable.LockedFileError):
        expected, remedy = (
            "a file that no other engine writes",
            "close that engine, or wait until its process has ended",
        )
    elif isinstance(error, durable.DisturbedFileError):
        expected, remedy = "the file as it was left", "put the file back, or resume from a copy"
    remedy += "; the step was not taken and can be repeated"
    return JournalError(name, reason(error), expected, remedy)


FORMAT = 1
METHOD = "method"  # key of first-order runs' headers only
# key of headers of torch's noise only: its version, and a checksum of what it drew; not compared
DRAWN = "drawn"

Header: TypeAlias = Mapping[str, Any]

_WORDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a whole number",
    type(None): "null",
}
# Types of the values that this library writes; other keys are the caller's.
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("base", "parameters", "noise"), (str,)),
    **dict.fromkeys(("model", "provenance", "perturbation", METHOD, DRAWN), (dict,)),
    "estimator": (dict, type(None)),
    "seed": (int, type(None)),
    "branched": (list,),
}
_NESTING = 64  # most levels of nested values
_LISTED = 6  # most differences that an error lists
_ABSENT = object()


def completed(header: Header) -> Header:
    """A header as it is written and read: with its format, and with JSON values only."""
    return {"format": FORMAT, **json.loads(json.dumps(dict(header), allow_nan=False))}


def json_object(name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A caller's values as JSON values for a header."""
    try:
        converted = json.loads(json.dumps(dict(values), allow_nan=False))
        _leaves(converted, name)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            name, str(error), "finite JSON values in an object", "pass strings and numbers"
        ) from error
    assert isinstance(converted, dict)
    return converted


def require_header(record: Mapping[str, Any]) -> None:
    """Refuse a record that is not a header of this format."""
    if type(record.get("format")) is not int or record["format"] != FORMAT:
        raise ImpossibleRecordError(_described(record, "format"), f"a header of format {FORMAT}")
    for key, types in _TYPES.items():
        if key in record and type(record[key]) not in types:
            raise ImpossibleRecordError(
                _described(record, key), f"{' or '.join(_WORDS[kind] for kind in types)} as {key}"
            )
    _leaves(record)


def may_be_torn_header(torn: bytes) -> bool:
    """Whether bytes may be a header whose write was interrupted: its beginning, or a sector of
    zeros.
    """
    start = b'{"format":'
    return start.startswith(torn[: len(start)]) or not torn[:512].strip(b"\0")


def differences(theirs: Header, ours: Header) -> tuple[str, str] | None:
    """The differences, leaf by leaf, between a journal's header and that of a run that would
    continue it.

    Keys of the run with the value None are not compared.
    """
    compared = {key for key, value in ours.items() if value is not None} - {DRAWN}
    journal, run = (
        _leaves({key: header[key] for key in compared if key in header})
        for header in (theirs, ours)
    )
    keys = [
        key
        for key in sorted({*journal, *run})
        if not _same(journal.get(key, _ABSENT), run.get(key, _ABSENT))
    ]
    return (_listed(journal, keys), _listed(run, keys)) if keys else None


def digest(parameters: Iterable[ParameterSpec]) -> str:
    """Identifies a model's parameters: names, shapes, dtypes, indices, decay, transfer dtypes and
    encodings.
    """
    listed: list[list[object]] = []
    for spec in parameters:
        # older journals have none
        transfer = [str(spec.transfer_dtype), spec.transfer_back] if spec.is_low_bit else []
        encoded = [] if spec.encoding is None else [repr(spec.encoding)]
        frozen = ["frozen"] if spec.frozen else []
        listed.append(
            [
                spec.name,
                list(spec.shape),
                str(spec.dtype),
                spec.index,
                spec.decays,
                *transfer,
                *encoded,
                *frozen,
            ]
        )
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _leaves(value: object, path: str = "", depth: int = 0) -> dict[str, Any]:
    """Nested objects and lists as one flat dictionary, with dotted paths as keys."""
    if depth > _NESTING:
        raise ImpossibleRecordError(
            f"more than {_NESTING} levels in {path.split('.')[0]}", "a header that is less nested"
        )
    if isinstance(value, dict):
        items: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list) and value:
        items = enumerate(value)
    else:
        return {path: value}
    leaves: dict[str, Any] = {}
    for key, item in items:
        leaves |= _leaves(item, f"{path}.{key}" if path else str(key), depth + 1)
    return leaves


def _same(one: object, other: object) -> bool:
    """Whether two JSON values are equal: numbers by their value, and true is not a number."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _described(header: Header, key: str) -> str:
    name = key if key.isprintable() else shown(key)  # an error is one line
    return f"{name} {shown(header[key])}" if key in header else f"no {name}"


def _listed(leaves: Mapping[str, Any], keys: list[str]) -> str:
    listed = [_described(leaves, key) for key in keys[:_LISTED]]
    more = len(keys) - _LISTED
    return "; ".join([*listed, f"and {more} more"] if more > 0 else listed)


DIGESTS = "base_digests"  # the only key of a record of digests
EVALUATION = "evaluation"  # the only key of a record of an evaluation's result
COMMIT = "commit"  # the only key of a commit's record
DIGEST = re.compile("[0-9a-f]+")

_STEP = "step"


def decode_digests(record: durable.Record, known: Mapping[str, str]) -> dict[str, str]:
    """Digests of the base's bytes by segment, which agree with the known ones."""
    digests = record[DIGESTS]
    if len(record) != 1 or not isinstance(digests, dict):
        raise ImpossibleRecordError(
            f"{DIGESTS} {shown(digests)}", "an object of digests and no other key"
        )
    for segment, digest in digests.items():
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise ImpossibleRecordError(
                f"{shown(digest)} as digest of {shown(segment)}", "hexadecimal digits"
            )
        if known.get(segment, digest) != digest:
            raise ImpossibleRecordError(
                f"a second digest of {shown(segment)}", f"{known[segment]} again"
            )
    return digests


def encode_evaluation(step: int, values: Mapping[str, float]) -> durable.Record:
    """The record of an evaluation's result; null stands for a value that is not finite, which JSON
    lacks.
    """
    assert _STEP not in values, "the name of the step is reserved"
    results = {
        name: float(value) if math.isfinite(value) else None for name, value in values.items()
    }
    return {EVALUATION: {_STEP: step, **results}}


def decode_evaluation(record: durable.Record, version: int) -> tuple[int, Mapping[str, float]]:
    """Number of updates in the evaluated weights, and the results by name."""
    result = record[EVALUATION]
    if len(record) != 1 or not isinstance(result, dict):
        raise ImpossibleRecordError(
            f"{EVALUATION} {shown(result)}", "an object of results and no other key"
        )
    step = result.get(_STEP)
    if type(step) is not int or not 0 <= step <= version:
        raise ImpossibleRecordError(
            f"an evaluation of step {shown(step)}", f"a step from 0 to {version}"
        )
    values = {
        name: math.nan if value is None else value
        for name, value in result.items()
        if name != _STEP
    }
    for name, value in values.items():
        if type(value) is not float:
            raise ImpossibleRecordError(
                f"{shown(value)} as {shown(name)} of an evaluation", "a float, or null"
            )
    return step, values


_SCALARS = {
    "int": (int, "a whole number"),
    "float": (float, "a finite number"),
    "bool": (bool, "true or false"),
}


def encode(step: Update | Commit) -> dict[str, Any]:
    """The record of a step: its fields in their order."""
    values = {
        field.name: _written(str(field.type), getattr(step, field.name)) for field in fields(step)
    }
    return {COMMIT: values} if isinstance(step, Commit) else values


def decode(record: durable.Record) -> Update | Commit:
    """The step of a record."""
    kind, values = (Commit, record[COMMIT]) if COMMIT in record else (Update, record)
    kinds = {field.name: str(field.type) for field in fields(kind)}
    if kind is Commit and (
        len(record) != 1 or not isinstance(values, dict) or values.keys() != kinds.keys()
    ):
        raise ImpossibleRecordError(
            f"{COMMIT} {shown(values)}", f"an object of {', '.join(kinds)} alone"
        )
    if "workers" in values:
        raise ImpossibleRecordError(
            f"workers {shown(values['workers'])}", "an update from the losses of all workers"
        )
    for name in kinds:
        if name not in values:
            raise ImpossibleRecordError(f"no {name}", f"an update with {name}")
        if kind is Commit and kinds[name] == "float" and type(values[name]) is int:
            raise ImpossibleRecordError(f"{shown(values[name])} as {name}", "a float")
    step = kind(**{name: _read(kinds[name], values[name], name) for name in kinds})
    contradiction = step.contradiction()
    if contradiction is not None:
        raise ImpossibleRecordError(*contradiction)
    return step


def _written(kind: str, value: Any) -> object:
    """A value of a step, of the type that its field is annotated with, as JSON."""
    if kind == Evaluation.__name__:
        return [int(value.seed), float(value.shift)]
    return (
        _SCALARS[kind][0](value)
        if kind in _SCALARS
        else [_written(_item(kind), one) for one in value]
    )


def _read(kind: str, value: object, name: str) -> Any:
    """The value that ``_written`` has written."""
    if kind in _SCALARS:
        scalar, expected = _SCALARS[kind]
        if scalar is float and type(value) is int:
            with contextlib.suppress(OverflowError):
                value = float(value)
        if type(value) is not scalar:
            raise ImpossibleRecordError(f"{shown(value)} as {name}", expected)
        return value
    if kind == Evaluation.__name__:
        if not isinstance(value, list) or len(value) != 2:
            raise ImpossibleRecordError(f"{name} {shown(value)}", "[seed, shift]")
        return Evaluation(_read("int", value[0], "a seed"), _read("float", value[1], "a shift"))
    if not isinstance(value, list):
        raise ImpossibleRecordError(f"{name} {shown(value)}", f"a list as {name}")
    return tuple(_read(_item(kind), one, f"an item of {name}") for one in value)


def _item(kind: str) -> str:
    """The type of a tuple's items."""
    return kind.removeprefix("tuple[").removesuffix(", ...]")


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
            where, remedy = (
                f"{self.name}, step {step.step}",
                "fix the estimator, or lower `lr`; the step was not taken",
            )
            raise JournalError(where, error.found, error.expected, remedy) from error
        self._write(record, partial(self._count, decoded, record), lambda: self.version > step.step)

    def withdraw(self) -> None:
        """Undo ``begin`` or ``take_excerpt`` if this object wrote the header and no step followed.

        A run that is refused leaves no file.

        Raises:
            OSError: if the file cannot be removed.
        """
        if self.header is not None and self._started_at == self.version:
            self.header, self._chain, self._started_at = None, [0], None
            for kept in (self._steps, self.base_digests, self.evaluations):
                kept.clear()
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
        record, before = encode_evaluation(step, values), self.evaluations.get(step)
        self._write(
            record, partial(self._add, record), lambda: self.evaluations.get(step) is not before
        )

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
        copy.header, copy.base_digests = self.header, {**self.base_digests}
        copy.evaluations = {
            version: values for version, values in self.evaluations.items() if version <= step
        }
        copy._steps = self._steps[:step]
        copy._chain = self._chain[: step + 1]
        return copy

    def excerpt(self, begin: int) -> bytes:
        """Lines of a file: header, digests of the base, steps from ``begin`` on, evaluations; empty
        without a header.

        An evaluation precedes the update of its step, as in the run's file, so that the files of
        all workers are equal.
        """
        if self.header is None:
            return b""
        written = [self.header, *([{DIGESTS: self.base_digests}] if self.base_digests else [])]
        for step in range(self.version + 1):
            if step in self.evaluations:
                written.append(encode_evaluation(step, self.evaluations[step]))
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
        is_new, theirs = self.header is None, self.until(self.version)
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
            expected, remedy = (
                "a file that can be synced",
                "repair the disk; blocks are written back only after the journal",
            )
            with system_errors_as(JournalError, self.name, expected=expected, remedy=remedy):
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
            evaluated, values = decode_evaluation(record, self.version)
            self.evaluations[evaluated] = values  # replaces an earlier result
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
    before = {
        "step": step,
        "checksum": f"{branch.checksum:08x}",
        "estimator": header.get("estimator"),
    }
    header["branched"] = [*header.get("branched", ()), before]
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
    path, remedy = Path(destination), "free space or choose another path"
    with system_errors_as(OutputError, path, expected="a path that can be written", remedy=remedy):
        durable.make_directory(path.absolute().parent)
        durable.replace_file(path, source.excerpt(0))
