"""Tasks whose objective is a function of what the model writes: exact matches, and rewards by ``--reward``.

All evaluations of a step generate together.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.model_directory import end_token_ids
from zo2adapters.tasks.batches import collate, with_completion
from zo2adapters.tasks.generation import Generation, Sampling, sampling_of
from zo2adapters.tasks.objectives import LogLikelihood, in_order, is_own_shard
from zo2adapters.tasks.rewards import Completion, RewardOptions, Rewards
from zo2adapters.tasks.rows import Rows, TokenizedRow
from zo2adapters.tasks.task import Task, TaskOptions
from zo2core import Batch, Engine, Evaluation, StepResult
from zo2core.errors import DivergenceError, OptionError
from zo2core.ranges import counted, parse_size

_KEPT_ROWS = 16  # rows whose continuations by the base are kept, to measure the drift
_DRIFT_EVERY = 10  # steps between two measurements


class Continued(NamedTuple):
    """A row and what the model wrote after its prompt."""

    row: TokenizedRow
    tokens: Sequence[int]  # with the token that ended it, if it has ended


class GeneratedTask(Task):
    """A task for rows with prompts. See ``Task``."""

    def __init__(self, model: HFBlockModel, rows: Rows, options: TaskOptions, *, ends: Sequence[int] = ()) -> None:
        super().__init__(model, rows, options)
        self._ends = ends
        if not all(row.prompt_length for row in rows):
            option = "objective" if options.rewards is None else "reward"
            expected = "rows with a prompt, after which text is generated"
            remedy = f"pass other rows, or leave `{option}` out"
            raise OptionError(option, found="rows without a prompt", expected=expected, remedy=remedy)

    @abstractmethod
    def _new_tokens(self, row: TokenizedRow) -> int:
        """Most tokens of a row's continuation; rows that run together have the largest number."""

    @abstractmethod
    def _losses(self, continued: Sequence[Continued]) -> list[float]:
        """The loss of each row."""

    def _sampling(self, step: int) -> Sampling | None:
        """How the tokens of a step are sampled; None takes the likeliest token, as evaluations do."""
        return None

    def step(self, engine: Engine, rows: Sequence[TokenizedRow], batch: Batch) -> StepResult:
        """Take a step; text is generated at all of its evaluations together."""
        sampling = self._sampling(engine.version)
        evaluations = engine.ask()
        losses = self._losses(
            [c for of_evaluation in self._continued(engine, rows, evaluations, sampling) for c in of_evaluation]
        )
        starts = range(0, len(losses), len(rows))
        return engine.tell([math.fsum(losses[start : start + len(rows)]) / len(rows) for start in starts])

    def _evaluated(self, engine: Engine, rows: Rows) -> list[Continued]:
        """Continue this worker's part of the rows with the present weights."""
        own = [row for number, row in enumerate(rows) if is_own_shard(engine, number)]
        return self._continued(engine, own, [None], None)[0]

    def _continued(
        self,
        engine: Engine,
        rows: Sequence[TokenizedRow],
        evaluations: Sequence[Evaluation | None],
        sampling: Sampling | None,
    ) -> list[list[Continued]]:
        """Continue the prompts of rows at each evaluation."""
        continued: list[list[Continued]] = [[] for _ in evaluations]
        for group in self._groups(rows) if rows and evaluations else ():
            generation = Generation(
                engine,
                self._model,
                max_new_tokens=max(map(self._new_tokens, group)),
                sampling=sampling,
                eos_token_ids=self._ends,
                pad_token_id=self._options.pad,
                evaluations=evaluations,
                allowed=engine.activation_bytes,
            )
            made = generation.continuations([row.input_ids[: row.prompt_length] for row in group])
            for so_far, tokens in zip(continued, made, strict=True):
                so_far += map(Continued, group, tokens)
        return continued

    def _groups(self, rows: Sequence[TokenizedRow]) -> Iterator[list[TokenizedRow]]:
        """Yield rows in order, in groups whose longest prompt and longest continuation together fit the model's length."""
        limit = self._model.longest_row or math.inf
        group: list[TokenizedRow] = []
        for row in rows:
            extended = [*group, row]
            longest = max(member.prompt_length for member in extended) + max(map(self._new_tokens, extended))
            if group and longest > limit:
                yield group
                extended = [row]
            group = extended
        yield group


class ExactMatch(GeneratedTask):
    """A task for prompts and completions: the share of prompts that the model does not continue with their completion."""

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Compute the share of rows that match, and ``loss``, 1 minus that share."""
        mismatches = int(sum(in_order(engine, self._losses(self._evaluated(engine, rows)), rows.rows)))
        return {"loss": mismatches / len(rows), "exact_match": 1 - mismatches / len(rows)}

    def _new_tokens(self, row: TokenizedRow) -> int:
        return len(row.input_ids) - row.prompt_length

    def _losses(self, continued: Sequence[Continued]) -> list[float]:
        """1 for each row that does not match."""
        return [
            float(list(tokens[: self._new_tokens(row)]) != list(row.input_ids[row.prompt_length :]))
            for row, tokens in continued
        ]


class _Kept(NamedTuple):
    """What the base wrote after the prompts of some rows."""

    rows: Sequence[TokenizedRow]
    log_likelihood: float  # of all continuations, by the base
    tokens: int  # of all continuations


class RewardTask(GeneratedTask):
    """A task for rows with prompts, whose loss is minus the mean reward of what the model writes. See ``Task``.

    *Drift* says how far the model has moved from its base: by how many nats a token what the base wrote has become less
    likely, for the first rows to train on. It estimates the divergence of the model from the base.
    """

    def __init__(self, model: HFBlockModel, rows: Rows, options: TaskOptions) -> None:
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

    def _require_room(self, rows: Rows, option: str) -> None:
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
            continued = self._continued(base, self._rows[:_KEPT_ROWS], [None], None)[0]
            kept = [with_completion(row.input_ids[: row.prompt_length], tokens, row.line) for row, tokens in continued]
            tokens = sum(len(row.input_ids) - row.prompt_length for row in kept)
            self._kept = _Kept(kept, self._log_likelihood(base, kept), tokens)

    def drift(self, engine: Engine) -> float:
        """By how many nats a token the base's continuations have become less likely."""
        assert self._kept is not None, "the task is prepared"
        return (self._kept.log_likelihood - self._log_likelihood(engine, self._kept.rows)) / self._kept.tokens

    def _log_likelihood(self, engine: Engine, rows: Sequence[TokenizedRow]) -> float:
        """Of what follows the prompts of all rows, in nats; every worker computes it."""
        batch = collate(rows, pad_token_id=self._options.pad)
        [[sums]] = engine.forwards([batch], LogLikelihood(self._model))
        return math.fsum(sums.tolist())

    def step(self, engine: Engine, rows: Sequence[TokenizedRow], batch: Batch) -> StepResult:
        """Take a step. See ``GeneratedTask``."""
        drift = {"drift": self.drift(engine)} if engine.version % _DRIFT_EVERY == 0 else {}
        most = self._settings.max_drift
        if most is not None and drift.get("drift", 0.0) > most:
            raise DivergenceError(
                f"step {engine.version}",
                found=f"a drift of {drift['drift']:.3g} nats a token from the base",
                expected=f"at most {most:g}, the max_drift of the run's --reward-options",
                remedy="export an earlier step with --at, or branch from one with a lower `lr`; the step was not taken",
                best_step=max(engine.version - _DRIFT_EVERY, 0),
            )
        report = super().step(engine, rows, batch)
        self.measured = {**self.measured, **drift}  # of the completions of this worker
        return report

    def close(self) -> None:
        """End the process of the rewards. See the contract."""
        self._rewards.close()

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Compute the mean reward of greedy completions, of each reward if there are several, their length and the drift."""
        self._require_room(rows, "evaluation")
        continued = self._evaluated(engine, rows)

        def mean(values: Sequence[float]) -> float:
            return math.fsum(in_order(engine, values, rows.rows)) / len(rows)

        each = self._rewards.of(self._completions(continued), option="evaluation")
        total = mean(self._rewards.total(each))
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
        self.measured = {}
        if continued:
            names = zip(self._rewards.names, each, strict=True)
            means = (
                {f"reward_{name.name}": math.fsum(values) / len(values) for name, values in names} if len(each) > 1 else {}
            )
            rewards = {"reward": math.fsum(totals) / len(totals), "best_reward": max(totals), **means}
            self.measured = {**rewards, "completion_tokens": tokens / len(continued), "generated_tokens": tokens}
        return [-total for total in totals]

    def _completions(self, continued: Sequence[Continued]) -> list[Completion]:
        completions = []
        for row, tokens in continued:
            fields = json.loads(row.source)
            text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
            completions.append(Completion(text, fields.get("prompt"), fields, row.line))
        return completions
