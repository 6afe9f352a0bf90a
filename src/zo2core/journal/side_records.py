"""Records of a journal that are not steps: digests of the base's bytes, and the results of evaluations."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from zo2core.io.record_log import Record
from zo2core.journal.damage import ImpossibleRecordError, shown

DIGESTS = "base_digests"  # the only key of a record of digests
EVALUATION = "evaluation"  # the only key of a record of an evaluation's result
DIGEST = re.compile("[0-9a-f]+")

_STEP = "step"


class SideRecords:
    """A journal's digests and evaluations, which the weights do not depend on."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}  # segment name -> hexadecimal digest of the base's bytes
        self.evaluations: dict[int, Mapping[str, float]] = {}  # number of updates -> results by name

    def add(self, record: Record, version: int) -> bool:
        """Add a record if it holds digests or an evaluation."""
        if DIGESTS in record:
            self._add_digests(record)
        elif EVALUATION in record:
            self._add_evaluation(record, version)
        else:
            return False
        return True

    def digest_records(self) -> list[Record]:
        """One record of all digests; empty if there are none."""
        return [{DIGESTS: dict(self.digests)}] if self.digests else []

    def until(self, step: int) -> SideRecords:
        """A copy without evaluations of later steps."""
        copy = SideRecords()
        copy.digests = {**self.digests}
        copy.evaluations = {version: values for version, values in self.evaluations.items() if version <= step}
        return copy

    def clear(self) -> None:
        """Remove all digests and evaluations."""
        self.digests.clear()
        self.evaluations.clear()

    def _add_digests(self, record: Record) -> None:
        digests = record[DIGESTS]
        if len(record) != 1 or not isinstance(digests, dict):
            raise ImpossibleRecordError(f"{DIGESTS} {shown(digests)}", "an object of digests and no other key")
        for segment, digest in digests.items():
            if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
                raise ImpossibleRecordError(f"{shown(digest)} as digest of {shown(segment)}", "hexadecimal digits")
            if self.digests.setdefault(segment, digest) != digest:
                raise ImpossibleRecordError(f"a second digest of {shown(segment)}", f"{self.digests[segment]} again")

    def _add_evaluation(self, record: Record, version: int) -> None:
        result = record[EVALUATION]
        if len(record) != 1 or not isinstance(result, dict):
            raise ImpossibleRecordError(f"{EVALUATION} {shown(result)}", "an object of results and no other key")
        step = result.get(_STEP)
        if type(step) is not int or not 0 <= step <= version:
            raise ImpossibleRecordError(f"an evaluation of step {shown(step)}", f"a step from 0 to {version}")
        values = {name: math.nan if value is None else value for name, value in result.items() if name != _STEP}
        for name, value in values.items():
            if type(value) is not float:
                raise ImpossibleRecordError(f"{shown(value)} as {shown(name)} of an evaluation", "a float, or null")
        self.evaluations[step] = values  # replaces an earlier result


def evaluation_record(step: int, values: Mapping[str, float]) -> Record:
    """The record of an evaluation's result; null stands for a value that is not finite, which JSON lacks."""
    assert _STEP not in values, "the name of the step is reserved"
    results = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
    return {EVALUATION: {_STEP: step, **results}}
