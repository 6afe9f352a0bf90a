"""Options of runs that learn from rewards of what the model writes.

The contract of a task: how a run trains on rows of one format, and how it is evaluated on them.

Shard groups of rows over the workers of a run, and gather the results in order.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from zo2adapters.tasks.rewards import RewardName
from zo2core.errors import OptionError
from zo2core.ranges import parse_size, require_number, require_whole

if TYPE_CHECKING:
    from zo2core import Batch, Engine, StepResult


_MOST_SECONDS = 1e6  # of a call; the system's timers end at some number


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """Rewards, and how the completions that they judge are generated."""

    reward: tuple[str, ...] = ()
    """Learn from a number that says how good each completion is that the model writes, instead of from the rows' own
    completions. exact-match, arithmetic, json-schema, regex and length are ready; FILE.py:function is a function of the
    prompt, the completion and the row. Several are added; NAME=0.5 gives one a weight. Use it with --estimator es."""
    max_new_tokens: int = 32
    """With --reward: most tokens of a completion. Each takes a pass over the blocks, for all rows together."""
    temperature: float = 0.0
    """With --reward: temperature at which completions are sampled; 0 takes the likeliest token."""
    top_p: float = 1.0
    """With --reward: probability mass of the likeliest tokens that are sampled from."""
    reward_seconds: float = 5.0
    """With --reward: most seconds that one call of a reward may take."""
    reward_memory: str = "1GiB"
    """With --reward: most memory that the process of the rewards may take."""
    max_drift: float | None = None
    """With --reward: end the run if what the base wrote has become less likely than this, in nats a token, for the first
    rows to train on. Every tenth step and every evaluation say how much less likely it is."""

    @property
    def names(self) -> Sequence[RewardName]:
        """The rewards."""
        return [RewardName.parsed(text) for text in self.reward]

    @property
    def new_tokens(self) -> int | None:
        """Most tokens of a completion; None: nothing is generated."""
        return self.max_new_tokens if self.reward else None

    def require_valid(self) -> None:
        """Check the options."""
        if not self.names:
            for option, value in vars(RewardOptions()).items():
                if getattr(self, option) != value:
                    found = f"{getattr(self, option)} without --reward"
                    raise OptionError(option, found=found, expected="--reward", remedy="pass --reward, or leave it out")
            return
        if len(set(self.reward)) < len(self.reward):
            raise OptionError("reward", found="one twice", expected="different ones", remedy="give it a weight of 2")
        require_whole("max_new_tokens", self.max_new_tokens, 1)
        require_number("reward_seconds", self.reward_seconds, above=0, most=_MOST_SECONDS)
        parse_size(self.reward_memory, option="reward_memory")
        if self.max_drift is not None:
            require_number("max_drift", self.max_drift, above=0)

    def absolute(self) -> RewardOptions:
        """The same options, whose files do not depend on the current directory."""
        return replace(self, reward=tuple(str(name.absolute) for name in self.names))


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The options of a run that concern its task."""

    objective: str  # name of the task or FILE.py:function; "auto" until the registry has chosen a task
    pad: int  # token id at padded positions
    batch_size: int  # number of rows in a batch
    micro_batch_size: int | None = None  # sequences that run at a time; None runs all of a batch
    beta: float | None = None  # strength of DPO's penalty; None is the default
    pack: bool = False  # whether rows of a batch are concatenated instead of padded
    per_row: bool = False  # whether each row of a batch has a loss and a direction of its own
    differentiates: bool = False  # whether steps take the gradient of the objective
    rewards: RewardOptions | None = None  # rewards of what the model writes; None: there are none
    tokenizer: Any = None  # the model's, for rewards of texts
    seed: int = 0  # of the run


class Task(Protocol):
    """How a run trains on rows of one format.

    A task's constructor takes an ``HFBlockModel``, the rows to train on, and ``TaskOptions``.
    """

    provenance: Mapping[str, Any] = MappingProxyType({})
    """Values that the steps depend on and the options do not determine, as JSON values for the journal's header."""

    def prepare(
        self, open_base: Callable[[], AbstractContextManager[Engine]], rows_to_come: Callable[[], Sequence[Any]]
    ) -> None:
        """Compute what the task needs from the base model, before the first step of a new or resumed run.

        The default needs nothing, and calls neither argument.
        """

    def measured(self) -> Mapping[str, float]:
        """Return what the last step has measured beside its losses, by name. By default nothing."""
        return {}

    def close(self) -> None:
        """End what the task has started. May be called twice. By default there is nothing."""

    @abstractmethod
    def batch(self, rows: Sequence[Any]) -> Batch:
        """Make a batch from the rows of one step."""

    @abstractmethod
    def step(self, engine: Engine, rows: Sequence[Any], batch: Batch) -> StepResult:
        """Take one step."""

    @abstractmethod
    def evaluate(self, engine: Engine, rows: Any) -> dict[str, float]:
        """Evaluate the current weights."""


def is_own_shard(engine: Engine, number: int) -> bool:
    """Whether a group of rows belongs to this worker."""
    return number % engine.workers.size == engine.workers.rank


def gather_in_order(engine: Engine, values: Sequence[float], counts: Sequence[int], rows: object) -> list[float]:
    """Gather the results of all workers' groups, in the order of the groups."""
    engine.workers.require_same("rows", zlib.crc32(repr(rows).encode()))
    remaining = iter(values)
    own = [[next(remaining) for _ in range(count)] for number, count in enumerate(counts) if is_own_shard(engine, number)]
    return [value for group in engine.workers.in_order(own) for value in group]
