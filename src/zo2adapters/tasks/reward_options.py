"""Options of runs that learn from rewards of what the model writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zo2adapters.tasks.rewards import RewardName
from zo2core.errors import OptionError
from zo2core.planning.host_budget import parse_size
from zo2core.ranges import require_number, require_whole

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
