"""A task that learns from rewards of what the model writes: ``--reward``."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.model_directory import end_token_ids
from zo2adapters.tasks.batches import collate
from zo2adapters.tasks.generated_task import Continued, GeneratedTask
from zo2adapters.tasks.next_token import Sampling, sampling_of
from zo2adapters.tasks.rewards import Completion, Rewards
from zo2adapters.tasks.rows import Dataset, TokenizedRow
from zo2adapters.tasks.scoring import LogLikelihood
from zo2adapters.tasks.task import RewardOptions, TaskOptions, gather_in_order
from zo2core import Batch, Engine, StepResult
from zo2core.errors import DivergenceError, OptionError
from zo2core.ranges import counted, parse_size

_KEPT_ROWS = 16  # rows whose continuations by the base are kept, to measure the drift
_DRIFT_EVERY = 10  # steps between two measurements


class _Kept(NamedTuple):
    """What the base wrote after the prompts of some rows."""

    rows: Sequence[TokenizedRow]
    log_likelihoods: Sequence[float]  # of each row, by the base
    tokens: int  # of all continuations


class RewardTask(GeneratedTask):
    """A task for rows with prompts, whose loss is minus the mean reward of what the model writes. See ``Task``.

    *Drift* says how far the model has moved from its base: by how many nats a token what the base wrote has become less
    likely, for the first rows to train on. It estimates the divergence of the model from the base.
    """

    def __init__(self, model: HFBlockModel, rows: Dataset, options: TaskOptions) -> None:
        assert options.rewards is not None, "the registry needs --reward for this task"
        assert options.tokenizer is not None
        self._tokenizer: PreTrainedTokenizerBase = options.tokenizer
        self._settings: RewardOptions = options.rewards
        super().__init__(model, rows, options, ends=end_token_ids(model, self._tokenizer))
        self._seed, self._rows = options.seed, rows
        self._require_room(rows, "data")
        self._sampling(0)  # refuses numbers out of range
        names, settings = self._settings.names, self._settings
        self._rewards = Rewards(
            names, seconds=settings.reward_seconds, memory=parse_size(settings.reward_memory, option="reward_memory")
        )
        sampled = {name: getattr(settings, name) for name in ("max_new_tokens", "temperature", "top_p")}
        if further := [token for token in self._ends if token != self._tokenizer.eos_token_id]:
            sampled["further end tokens"] = further
        self.provenance = {"rewards": self._rewards.provenance, "generation": sampled}
        self._kept: _Kept | None = None
        self._seen: dict[str, float] = {}  # of the last step

    def _require_room(self, rows: Dataset, option: str) -> None:
        """Refuse rows of an option's file whose prompt leaves no room for a completion."""
        longest, limit = max(rows, key=lambda row: row.prompt_length), self._model.longest_row
        if limit is not None and longest.prompt_length + self._settings.max_new_tokens > limit:
            prompt = (
                f"a prompt of {counted(longest.prompt_length, 'token')}, in the row on line {longest.line} of --{option}"
            )
            raise OptionError(
                "max_new_tokens",
                found=f"{self._settings.max_new_tokens} after {prompt}",
                expected=f"at most {limit - longest.prompt_length}, with which it reaches the model's limit of {limit}",
                remedy="lower it, or shorten the prompt",
            )

    def prepare(
        self, open_base: Callable[[], AbstractContextManager[Engine]], rows_to_come: Callable[[], Sequence[Any]]
    ) -> None:
        """Let the base continue a few prompts, whose likelihood says later how far the model has moved. See the contract."""
        self._rewards.start()
        with open_base() as base:
            first = [self._rows[index] for index in range(min(_KEPT_ROWS, len(self._rows)))]
            continued = self._continued(base, first, [None], None)[0]
            kept = [
                TokenizedRow(array("i", [*row.input_ids[: row.prompt_length], *tokens]), row.prompt_length, row.line)
                for row, tokens in continued
            ]
            tokens = sum(len(row.input_ids) - row.prompt_length for row in kept)
            self._kept = _Kept(kept, self._log_likelihoods(base, kept), tokens)

    def drift(self, engine: Engine) -> float:
        """By how many nats a token the base's continuations have become less likely."""
        assert self._kept is not None, "the task is prepared"
        now = self._log_likelihoods(engine, self._kept.rows)
        return (math.fsum(self._kept.log_likelihoods) - math.fsum(now)) / self._kept.tokens

    def _log_likelihoods(self, engine: Engine, rows: Sequence[TokenizedRow]) -> list[float]:
        """Of what follows the prompts, in nats; every worker computes all of them."""
        batch = collate(rows, pad_token_id=self._options.pad)
        [[sums]] = engine.forwards([batch], LogLikelihood(self._model))
        return list(sums.tolist())

    def step(self, engine: Engine, rows: Sequence[TokenizedRow], batch: Batch) -> StepResult:
        """Take a step. See ``GeneratedTask``."""
        drift = {"drift": self.drift(engine)} if engine.version % _DRIFT_EVERY == 0 else {}
        most = self._settings.max_drift
        if most is not None and drift.get("drift", 0.0) > most:
            raise DivergenceError(
                f"step {engine.version}",
                found=f"a drift of {drift['drift']:.3g} nats a token from the base",
                expected=f"at most {most:g}, the --max-drift of the run",
                remedy="export an earlier step with --at, or branch from one with a lower `lr`; the step was not taken",
                best_step=max(engine.version - _DRIFT_EVERY, 0),
            )
        report = super().step(engine, rows, batch)
        self._seen |= drift
        return report

    def close(self) -> None:
        """End the process of the rewards. See the contract."""
        self._rewards.close()

    def measured(self) -> Mapping[str, float]:
        """Mean reward and length of the completions of the last step, by this worker, and the drift. See the contract."""
        return self._seen

    def evaluate(self, engine: Engine, rows: Dataset) -> dict[str, float]:
        """Compute the mean reward of greedy completions, of each reward if there are several, their length and the drift."""
        self._require_room(rows, "evaluation")
        parts, continued = self._evaluated(engine, rows)
        counts = list(map(len, parts))

        def mean(values: Sequence[float]) -> float:
            return math.fsum(gather_in_order(engine, values, counts, rows.rows)) / len(rows)

        each = self._rewards.of(self._completions(continued), option="evaluation")
        total = mean(self._rewards.total(each) if continued else [])
        results = {"loss": 0.0 - total, "reward": total}
        for name, values in zip(self._rewards.names, each, strict=True):
            if len(each) > 1:
                results[f"reward_{name.name}"] = mean(values)
        results["completion_tokens"] = mean([float(len(tokens)) for _, tokens in continued])
        return {**results, "drift": self.drift(engine)}

    def _new_tokens(self, row: TokenizedRow) -> int:
        return self._settings.max_new_tokens

    def _sampling(self, step: int) -> Sampling | None:
        return sampling_of(self._settings.temperature, self._settings.top_p, self._seed + step)

    def _losses(self, continued: Sequence[Continued]) -> list[float]:
        """Minus the weighted sum of the rewards of each completion."""
        each = self._rewards.of(self._completions(continued))
        totals = self._rewards.total(each)
        tokens = sum(len(tokens) for _, tokens in continued)
        self._seen = {}
        if continued:
            names = zip(self._rewards.names, each, strict=True)
            means = (
                {f"reward_{name.name}": math.fsum(values) / len(values) for name, values in names} if len(each) > 1 else {}
            )
            rewards = {"reward": math.fsum(totals) / len(totals), "best_reward": max(totals), **means}
            self._seen = {**rewards, "completion_tokens": tokens / len(continued), "generated_tokens": tokens}
        return [-total for total in totals]

    def _completions(self, continued: Sequence[Continued]) -> list[Completion]:
        completions = []
        for row, tokens in continued:
            fields = json.loads(row.source)
            text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
            completions.append(Completion(text, fields.get("prompt"), fields, row.line))
        return completions
