"""Records of a journal that are no updates: digests of the base's bytes, and the results of evaluations."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from zo2core.io.record_log import Record
from zo2core.journal.damage import ImpossibleRecordError, shown

DIGESTS = "base_digests"  # the one member of a record of digests
EVALUATION = "evaluation"  # and of a record of an evaluation's result
DIGEST = re.compile("[0-9a-f]+")

_STEP = "step"


class Notes:
    """What a journal holds beside its header and its updates. No bit of the weights depends on it."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}  # segment name -> hexadecimal digest of the base's bytes
        self.evaluations: dict[int, Mapping[str, float]] = {}  # number of updates -> results by name

    def take(self, record: Record, version: int) -> bool:
        """Take a record over, if it is one of digests or of an evaluation.

        Args:
            record: As it was read.
            version: Number of updates that precede it.

        Returns:
            Whether it is such a record.

        Raises:
            ImpossibleRecordError: if it is one that a journal cannot have written.
        """
        if DIGESTS in record:
            self._take_digests(record)
        elif EVALUATION in record:
            self._take_evaluation(record, version)
        else:
            return False
        return True

    def digest_records(self) -> list[Record]:
        """One record of all digests, or none."""
        return [{DIGESTS: dict(self.digests)}] if self.digests else []

    def until(self, step: int) -> Notes:
        """A copy, without evaluations of later steps."""
        copy = Notes()
        copy.digests = {**self.digests}
        copy.evaluations = {at: values for at, values in self.evaluations.items() if at <= step}
        return copy

    def clear(self) -> None:
        """Forget all."""
        self.digests.clear()
        self.evaluations.clear()

    def _take_digests(self, record: Record) -> None:
        digests = record[DIGESTS]
        if len(record) != 1 or not isinstance(digests, dict):
            raise ImpossibleRecordError(f"{DIGESTS} {shown(digests)}", "an object of digests, and nothing beside it")
        for segment, digest in digests.items():
            if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
                raise ImpossibleRecordError(f"{shown(digest)} as digest of {shown(segment)}", "hexadecimal digits")
            if self.digests.setdefault(segment, digest) != digest:
                raise ImpossibleRecordError(f"a second digest of {shown(segment)}", f"{self.digests[segment]} again")

    def _take_evaluation(self, record: Record, version: int) -> None:
        result = record[EVALUATION]
        if len(record) != 1 or not isinstance(result, dict):
            raise ImpossibleRecordError(f"{EVALUATION} {shown(result)}", "an object of results, and nothing beside it")
        step = result.get(_STEP)
        if type(step) is not int or not 0 <= step <= version:
            raise ImpossibleRecordError(f"an evaluation of step {shown(step)}", f"a step from 0 to {version}")
        values = {name: math.nan if value is None else value for name, value in result.items() if name != _STEP}
        for name, value in values.items():
            if type(value) is not float:
                raise ImpossibleRecordError(f"{shown(value)} as {shown(name)} of an evaluation", "a float, or null")
        self.evaluations[step] = values  # the last one counts


def evaluation_record(step: int, values: Mapping[str, float]) -> Record:
    """The record of an evaluation's result. JSON has no number that is not finite: null stands for one.

    Args:
        step: Number of updates in the weights that were evaluated.
        values: Results by name; none is called "step".
    """
    assert _STEP not in values, "the step is beside the results"
    results = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
    return {EVALUATION: {_STEP: step, **results}}
