"""Rewards: numbers that say how good completions are, computed in a child process with limited
memory and time.
"""

from __future__ import annotations

import hashlib
import math
import symtable
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from zo2adapters.limited_process import LimitedProcess, LimitedProcessError
from zo2adapters.optional_package import optional_package
from zo2adapters.tasks import reward_program
from zo2adapters.tasks.option_tree import ZEROTH, Change, Option, number, size, whole
from zo2core.errors import DataError, OptionError, reason, system_remedy
from zo2core.io.durable import open_regular

_PROGRAM = Path(reward_program.__file__)
_MOST_NAMES = 12  # that an error lists
# absolute value of a reward: sums and squares of many have to be finite, in float32 also each of
# them
_LARGEST_REWARD = 1e30
LONGEST_CALL = 1e6  # seconds: the system's timers end at some number
_CALLS = 64  # calls of a request: a request that fails is repeated call by call, to name the row


class RewardName(NamedTuple):
    """A reward of the command line: ``NAME`` or ``FILE.py:function``, and ``=WEIGHT`` behind it."""

    name: str  # of a ready reward or of the function
    file: Path | None = None  # of the function; None: a ready reward
    weight: float = 1.0

    @classmethod
    def parsed(cls, text: str) -> RewardName:
        """Parse a reward of the command line."""
        name, separator, weight = text.rpartition("=")
        if not separator:
            name, weight = text, "1"
        path, _, function = name.rpartition(":")
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        is_known = (
            path.endswith(".py") and function.isidentifier()
            if path
            else name in reward_program.READY
        )
        if not is_known or not math.isfinite(number):
            expected = (
                f"one of {', '.join(reward_program.READY)}, or FILE.py:function, with =WEIGHT "
                "behind it or without"
            )
            raise OptionError(
                "reward", repr(text), expected, "pass one of these, such as exact-match=0.5"
            )
        return cls(function, Path(path), number) if path else cls(name, None, number)

    def __str__(self) -> str:
        name = self.name if self.file is None else f"{self.file}:{self.name}"
        return name if self.weight == 1 else f"{name}={self.weight:g}"

    @property
    def absolute(self) -> RewardName:
        """The same reward, whose file does not depend on the current directory."""
        return self if self.file is None else self._replace(file=self.file.resolve())


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """Rewards, and how the completions that they judge are generated."""

    reward: Annotated[
        tuple[str, ...],
        Option(
            "method",
            effect=ZEROTH,
            excludes={"head": "a causal language model", "objective": "one objective"},
        ),
    ] = ()
    """Learn from a number that says how good each completion is that the model writes, instead of
    from the rows' own completions. exact-match, arithmetic, json-schema, regex and length are
    ready; FILE.py:function is a function of the prompt, the completion and the row. Several are
    added; NAME=0.5 gives one a weight. Use it with --estimator es.
    """
    max_new_tokens: Annotated[
        int,
        Option(
            "method",
            effect=ZEROTH,
            check=whole(1),
            needs=("reward",),
            elsewhere=("max_completion_length",),
        ),
    ] = 32
    """With --reward: most tokens of a completion.

    Each takes a pass over the blocks, for all rows together.
    """
    temperature: Annotated[
        float, Option("method", effect=ZEROTH, needs=("reward",), check=number(least=0))
    ] = 0.0
    """With --reward: temperature at which completions are sampled; 0 takes the likeliest token."""
    top_p: Annotated[
        float, Option("method", effect=ZEROTH, needs=("reward",), check=number(above=0, most=1))
    ] = 1.0
    """With --reward: probability mass of the likeliest tokens that are sampled from."""
    reward_seconds: Annotated[
        float,
        Option(
            "method", Change.RESUME, ZEROTH, number(above=0, most=LONGEST_CALL), needs=("reward",)
        ),
    ] = 5.0
    """With --reward: most seconds that one call of a reward may take."""
    reward_memory: Annotated[
        str, Option("method", Change.RESUME, ZEROTH, size, unchecked=(None,), needs=("reward",))
    ] = "1GiB"
    """With --reward: most memory that the process of the rewards may take."""
    max_drift: Annotated[
        float | None, Option("method", Change.RESUME, ZEROTH, number(above=0), needs=("reward",))
    ] = None
    """With --reward: end the run if what the base wrote has become less likely than this, in nats a
    token, for the first rows to train on. Every tenth step and every evaluation say how much less
    likely it is.
    """

    @property
    def names(self) -> Sequence[RewardName]:
        """The rewards."""
        return [RewardName.parsed(text) for text in self.reward]

    @property
    def columns(self) -> frozenset[str] | None:
        """Columns of a row that the rewards read beside the prompt; None: any, as functions may."""
        if any(name.file is not None for name in self.names):
            return None
        return frozenset().union(*(reward_program.COLUMNS[name.name] for name in self.names))

    @property
    def new_tokens(self) -> int | None:
        """Most tokens of a completion; None: nothing is generated."""
        return self.max_new_tokens if self.reward else None

    def require_valid(self) -> None:
        """Refuse names of no reward, and one twice."""
        if len({*self.names}) < len(self.reward):
            raise OptionError("reward", "one twice", "different ones", "give it a weight of 2")

    def absolute(self) -> RewardOptions:
        """The same options, whose files do not depend on the current directory."""
        return replace(self, reward=tuple(str(name.absolute) for name in self.names))


class Completion(NamedTuple):
    """A completion of a row."""

    text: str
    prompt: Any  # as the row has it: a string, or messages
    row: Mapping[str, Any]  # the row of the data file
    line: int  # of the row


class Rewards:
    """The rewards of a run. The child process starts with the first completions."""

    def __init__(
        self,
        names: Sequence[RewardName],
        *,
        seconds: float,
        memory: int,
        start_seconds: float = 60.0,
    ) -> None:
        if any(name.file is None and name.name == "json-schema" for name in names):
            optional_package("jsonschema", install="zo2core[rewards]")  # which the process imports
        self.names = names
        self._seconds = seconds
        self._memory = memory
        self._start_seconds = start_seconds
        self._sources = [
            None if name.file is None else function_source(name.file, name.name) for name in names
        ]
        self._process = LimitedProcess(_PROGRAM)

    @property
    def provenance(self) -> list[list[Any]]:
        """Name, weight and the digest of the file of each reward, as JSON values."""
        digests = [
            None if source is None else hashlib.sha256(source.encode()).hexdigest()
            for source in self._sources
        ]
        return [
            [name.name, name.weight, digest]
            for name, digest in zip(self.names, digests, strict=True)
        ]

    def start(self) -> None:
        """Run the files of functions in the child process, so that they are known to run before
        anything is generated.
        """
        for index, name in enumerate(self.names):
            if name.file is None:
                continue
            try:
                self._ask(index, [])
            except LimitedProcessError as error:
                expected = (
                    f"a file that Python runs in {self._start_seconds:g} s, with the function "
                    f"{name.name}"
                )
                remedy = "correct the file, or raise --reward-memory if it needs more"
                raise OptionError("reward", f"{name.file}: {error}", expected, remedy) from error

    def of(self, completions: Sequence[Completion], *, option: str = "data") -> list[list[float]]:
        """Compute the rewards of completions."""
        starts = range(0, len(completions), _CALLS)
        return [
            [
                value
                for start in starts
                for value in self._values(index, completions[start:][:_CALLS], option)
            ]
            for index in range(len(self.names))
        ]

    def total(self, values: Sequence[Sequence[float]]) -> list[float]:
        """The weighted sum of the rewards of each completion."""
        weights = [name.weight for name in self.names]
        return [
            math.fsum(w * value for w, value in zip(weights, column, strict=True))
            for column in zip(*values, strict=True)
        ]

    def close(self) -> None:
        """End the child process. May be called twice."""
        self._process.close()

    def _values(self, index: int, completions: Sequence[Completion], option: str) -> list[float]:
        """A reward's values of the completions of one request."""
        try:
            values = self._ask(index, completions)
        except LimitedProcessError as error:
            if len(completions) > 1:
                return [
                    value
                    for completion in completions
                    for value in self._values(index, [completion], option)
                ]
            raise self._failure(index, completions[0], str(error), option) from error
        weight = self.names[index].weight
        for completion, value in zip(completions, values, strict=False):
            # up to the first one that is a text
            why = (
                value
                if isinstance(value, str)
                else f"{value:g}" + (f" with a weight of {weight:g}" if weight != 1 else "")
            )
            if (
                isinstance(value, str)
                or not max(abs(value), abs(weight * value)) <= _LARGEST_REWARD
            ):
                # also if it is NaN
                raise self._failure(index, completion, why, option)
        return list(values)

    def _ask(self, index: int, completions: Sequence[Completion]) -> list[Any]:
        name = self.names[index]
        request = {
            "name": name.name,
            "file": None if name.file is None else str(name.file),
            "source": self._sources[index],
            "calls": [
                [completion.prompt, completion.text, completion.row] for completion in completions
            ],
            "seconds": self._seconds,
            "start_seconds": self._start_seconds,
        }
        seconds = self._start_seconds + self._seconds * len(completions)
        values: list[Any] = self._process.ask(
            request, seconds=seconds, memory=self._memory, wall_seconds=2 * seconds
        )
        return values

    def _failure(self, index: int, completion: Completion, why: str, option: str) -> DataError:
        found = f"{why}, for the completion {completion.text[:60]!r}"
        expected = (
            f"a number from {-_LARGEST_REWARD:g} to {_LARGEST_REWARD:g}, within the limits of time "
            "and memory"
        )
        remedy = (
            "correct row or function and begin anew, or resume with higher --reward-seconds or "
            "--reward-memory"
        )
        return DataError(
            f"reward {self.names[index]}, row on line {completion.line} of --{option}",
            found,
            expected,
            remedy,
        )


def function_source(path: Path, function: str, *, option: str = "reward") -> str:
    """The text of a file, which is not run here, with a function of this name."""
    try:
        with open_regular(path) as file:
            source = str(file.read().decode())
    except (OSError, UnicodeDecodeError) as error:
        found = reason(error) if isinstance(error, OSError) else "bytes that are not UTF-8"
        remedy = system_remedy(error, "check the path")
        raise OptionError(option, f"{path}: {found}", "a readable file", remedy) from error
    try:
        symbols = symtable.symtable(source, str(path), "exec").get_symbols()
    except (SyntaxError, ValueError, RecursionError) as error:
        found = (
            f"{path}, line {error.lineno}: {error.msg}"
            if isinstance(error, SyntaxError)
            else f"{path}: {error}"
        )
        raise OptionError(option, found, "a file of Python", "correct the file") from error
    names = sorted(
        symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()
    )
    if function not in names and "import *" not in source:  # whose names only running it tells
        found = f"{path} without {function}" + (
            f", but with {', '.join(names[:_MOST_NAMES])}" if names else ""
        )
        raise OptionError(option, found, "the name of a function in the file", "check the name")
    return source
