"""Generate text with a model that is never whole in memory: one sweep over all blocks for each
token.

This is slow: every token moves the whole model once, for all prompts and all evaluations of a step
together. Keys and values of all blocks stay in Hugging Face's caches, so a sweep runs the newest
tokens only. They are what takes memory, so a ``GenerationPlan`` says how many rows run at a time; a
row that has ended leaves its place to the next.
"""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from transformers import (
    Cache,
    DynamicCache,
    PretrainedConfig,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
    __version__,
)

from zo2adapters.models.footprint import (
    PassBytes,
    cache_bytes,
    expected_held_bytes,
    forward_bytes,
)
from zo2adapters.models.hf import Activations, HFBlockModel
from zo2core import Batch, Engine, Evaluation
from zo2core.errors import BatchError, NonFiniteLossError, OptionError, UnsupportedModelError
from zo2core.ranges import LARGEST_WHOLE, counted, require_number, require_whole

# entry of a batch: number of its stream, which has a cache, for each row
STREAM = "generation_stream"
# entry of a batch: a number from 0 to 1 for each row, with which its next token is drawn
DRAW = "generation_draw"
# by less, logits that are divided overflow; the likeliest token is all but sure anyway
_LEAST_TEMPERATURE = 1e-6
_DRAWN_ROWS = 64  # rows whose probabilities are in memory at a time
# share of a group's rows still running at which the others' keys and values are dropped: a copy of
# all
_SHRINK_AT = 0.75
# share of the places that is free before waiting rows start: each group is a forward of its own
_JOIN_AT = 0.25


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sample tokens instead of taking the likeliest.

    Each token is drawn with a number that follows from the seed, the row and the token's position
    in the continuation, so that neither other rows nor other evaluations change it.

    Args:
        temperature: Divisor of the logits, at least 1e-6.
        top_p: Probability mass of the likeliest tokens that are sampled from, above 0 and at most
            1.
        seed: Seed of the sampling; no global generator is used.

    Raises:
        OptionError: if a number is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_number(
            "temperature", self.temperature, least=_LEAST_TEMPERATURE, remedy="pass a value near 1"
        )
        require_number("top_p", self.top_p, above=0, most=1, remedy="pass 1 for all tokens")

    def number(self, row: int, position: int) -> float:
        """The number from 0 to 1 with which a row's token at this position of its continuation is
        drawn.
        """
        return random.Random(f"{self.seed}/{row}/{position}").random()  # noqa: S311 - no secret

    def tokens(self, logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Draw tokens (rows,) from logits (rows, vocabulary), float32, with numbers (rows,) from 0
        to 1.

        A token is the first one up to which the probabilities, summed in the vocabulary's order,
        exceed the number.
        """
        warper: Any = TemperatureLogitsWarper(self.temperature)
        nucleus: Any = TopPLogitsWarper(self.top_p) if self.top_p < 1 else lambda _, scores: scores
        parts = []
        for part, number in zip(
            torch.split(logits, _DRAWN_ROWS), torch.split(numbers, _DRAWN_ROWS), strict=True
        ):
            sums = nucleus(None, warper(None, part)).softmax(dim=-1).double().cumsum(dim=-1)
            parts.append(torch.searchsorted(sums, number[:, None] * sums[:, -1:], right=True)[:, 0])
        return torch.cat(parts)


def sampling_of(temperature: float, top_p: float, seed: int) -> Sampling | None:
    """How options sample tokens; None takes the likeliest token."""
    require_whole("seed", seed, -LARGEST_WHOLE, LARGEST_WHOLE)
    if temperature:
        return Sampling(temperature=temperature, top_p=top_p, seed=seed)
    if top_p != 1:
        found = f"{top_p} with a temperature of 0, which takes the likeliest token"
        raise OptionError(
            "top_p", found, "a temperature above 0", "set `temperature` to 1, or leave `top_p` out"
        )
    return None


class NextToken:
    """The model's forward over the newest tokens, which returns the next token of each row.

    A batch is a stream. It has the tokens, masks and positions of the model's inputs, and
    ``STREAM``, by which its keys and values are found; to sample it has ``DRAW``. Low-rank
    evaluations run as one batch, and their keys and values are together.
    """

    def __init__(self, model: HFBlockModel, sampling: Sampling | None = None) -> None:
        self._model, self._sampling = model, sampling
        # by the streams of which they have keys and values, in order
        self.caches: dict[tuple[int, ...], Cache] = {}
        self._takes_cache = False  # whether the model's forward was found to take such a cache
        self.block = model.block
        self.forward_bytes = model.forward_bytes
        self.held_bytes = model.held_bytes  # without the caches, which outlive a batch

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch unchanged, after a check that the model takes transformers' cache."""
        if not self._takes_cache:
            self._require_common_cache(batch["input_ids"][:1, :1])
            self._takes_cache = True
        return batch

    @torch.inference_mode()
    def _require_common_cache(self, ids: torch.Tensor) -> None:
        config = self._model.config
        try:
            self._model.prologue({"input_ids": ids}, DynamicCache(config=config))
        except Exception as error:
            # a forward may fail in any way with a cache that it does not expect
            found = (
                "a forward that does not take transformers' DynamicCache "
                f"({type(error).__name__}: {error})"
            )
            raise _unsupported(config, found, "a forward that takes it") from error

    def stacked(self, batches: Sequence[Batch]) -> Batch:
        """Join batches along their rows. See ``StackedForward``."""
        return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}

    def embed(self, batch: Batch) -> Activations:
        """Run HF's forward up to the first layer, with the streams' cache."""
        streams = tuple(dict.fromkeys(batch[STREAM].tolist()))
        if streams not in self.caches:
            self.caches[streams] = self._new_cache()
        inputs = {key: value for key, value in batch.items() if key not in (STREAM, DRAW)}
        return self._model.prologue(inputs, self.caches[streams])

    def _new_cache(self) -> Cache:
        """A cache in which layers of other processes' blocks are those of blocks here: masks follow
        from the number of tokens that the first layer of a kind has.
        """
        cache = DynamicCache(config=self._model.config)
        blocks = self._model.layouts[1:-1]
        here = [layer for layer, block in zip(cache.layers, blocks, strict=False) if block.used]
        first_of_kind = {type(layer): layer for layer in reversed(here)}
        for index, (layer, block) in enumerate(zip(cache.layers, blocks, strict=False)):
            if not block.used:
                cache.layers[index] = first_of_kind.get(type(layer), layer)
        return cache

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Choose each row's next token: (rows,), int64."""
        logits = self._model.logits(self._model.by_token(activations.hidden)[:, -1]).float()
        largest, tokens = logits.max(dim=-1)  # NaN if any logit is
        if not bool(largest.isfinite().all()):
            raise NonFiniteLossError(
                "generation", "logits that are not finite", "finite logits", "check the weights"
            )
        return tokens if self._sampling is None else self._sampling.tokens(logits, batch[DRAW])

    def heads(self, batches: Sequence[Batch], activations: Activations) -> list[torch.Tensor]:
        """Choose the next tokens of all streams. See ``StackedForward``."""
        return list(
            torch.split(self.head(self.stacked(batches), activations), len(batches[0]["input_ids"]))
        )

    def keep(self, streams: Sequence[int], rows: int, kept: Sequence[torch.Tensor]) -> None:
        """Drop the keys and values of all rows but some."""
        indices = dict(zip(streams, kept, strict=True))
        for key, cache in self.caches.items():
            if key[0] in indices:
                kept_rows = torch.cat([place * rows + indices[of] for place, of in enumerate(key)])
                layers: list[Any] = [*cache.layers]
                for layer in {id(layer): layer for layer in layers}.values():
                    layer.batch_select_indices(kept_rows)

    def drop(self, streams: Sequence[int]) -> None:
        """Drop the keys and values of streams that have ended."""
        self.caches = {key: cache for key, cache in self.caches.items() if key[0] not in streams}


class GenerationPlan(NamedTuple):
    """How many rows of each evaluation run at a time."""

    places: int  # rows with keys and values in memory
    starting: int  # rows whose prompts run as one batch
    nbytes: int  # of keys and values, activations and one forward


def plan_generation(
    config: PretrainedConfig,
    *,
    evaluations: int,
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    allowed: int | None,
    measured: PassBytes | None = None,
) -> GenerationPlan:
    """Choose how many rows run at a time: as many as memory takes, and then as many prompts in one
    batch as it takes.
    """
    of_place = evaluations * cache_bytes(config, 1, prompt_tokens + new_tokens)
    of_place += expected_held_bytes(config, evaluations, prompt_tokens)
    plans = []
    starting = rows
    while starting:
        count = evaluations * starting
        # logits of the last tokens
        forward = forward_bytes(config, count, prompt_tokens, loss_chunk=count, measured=measured)
        places = rows if allowed is None else min((allowed - forward) // of_place, rows)
        if places >= starting or starting == 1:
            places = max(places, 1)
            plans.append(GenerationPlan(places, starting, places * of_place + forward))
        starting //= 2
    return max(plans, key=lambda plan: (plan.places, plan.starting))


class Token(NamedTuple):
    """A token that was generated."""

    evaluation: int  # index of the evaluation
    row: int  # index of the prompt
    id: int


@dataclass(eq=False)
class _Group:
    """Rows of all evaluations that started together; each evaluation has as many places, and each
    place one row.
    """

    streams: range  # one for each evaluation
    rows: torch.Tensor  # (evaluations, places): the prompt of each place
    ended: torch.Tensor  # (evaluations, places), bool
    ids: torch.Tensor  # (evaluations, places, tokens): the tokens that run next
    mask: torch.Tensor  # (evaluations, places, tokens so far)
    length: int = 0  # tokens of the continuations so far

    @property
    def places(self) -> int:
        return self.rows.shape[1]


@dataclass(frozen=True)
class Generation:
    """Continues prompts at several evaluations of a step together, or with the present weights.

    All rows of all evaluations advance one token a sweep. Low-rank evaluations run as one batch.
    """

    engine: Engine
    model: HFBlockModel
    _: KW_ONLY
    max_new_tokens: int  # most tokens of a continuation
    sampling: Sampling | None = None  # None: the likeliest token
    eos_token_ids: Collection[int] = ()
    pad_token_id: int = 0
    evaluations: Sequence[Evaluation | None] = (None,)
    # bytes of keys, values and activations; None: all rows run at a time
    allowed: int | None = None

    def __post_init__(self) -> None:
        config = self.model.config
        if self.model.cache_argument is None or not cache_bytes(config, rows=1, tokens=1):
            found = f"a forward without a cache of keys and values, in transformers {__version__}"
            expected = "a forward that takes one, since each sweep runs one token"
            raise _unsupported(config, found, expected)

    @property
    def _arguments(self) -> Collection[str]:
        """Names of the arguments of the model's forward."""
        return inspect.signature(type(self.model.skeleton).forward).parameters

    def sweeps(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[Token]]:
        """Continue prompts, which are padded on the left to the length of those that start with
        them.
        """
        require_lengths(self.model, prompts, self.max_new_tokens)
        plan = plan_generation(
            self.model.config,
            evaluations=len(self.evaluations),
            rows=len(prompts),
            prompt_tokens=max(map(len, prompts)),
            new_tokens=self.max_new_tokens,
            allowed=self.allowed,
            measured=self.model.forward_peaks,
        )
        forward = NextToken(self.model, self.sampling)
        waiting = deque(range(len(prompts)))
        groups = list[_Group]()
        started = 0
        while waiting or groups:
            free = plan.places - sum(group.places for group in groups)
            while waiting and (not groups or free >= _JOIN_AT * plan.places) and free > 0:
                rows = [waiting.popleft() for _ in range(min(free, plan.starting, len(waiting)))]
                groups.append(self._started(started, rows, [prompts[row] for row in rows]))
                started = started + 1
                free = free - len(rows)
            yield self._advance(forward, groups)
            groups = [group for group in groups if self._shrunk(forward, group)]

    def _started(
        self, number: int, rows: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> _Group:
        """Make a group of rows that wait."""
        count = len(self.evaluations)
        ids, mask = _padded_left(prompts, self.pad_token_id)
        return _Group(
            range(number * count, (number + 1) * count),
            torch.tensor(rows).expand(count, -1),
            torch.zeros(count, len(rows), dtype=torch.bool),
            ids.expand(count, -1, -1),
            mask.expand(count, -1, -1),
        )

    def _batch(self, group: _Group, number: int) -> Batch:
        """Inputs of a group's rows at an evaluation."""
        batch = {"input_ids": group.ids[number], "attention_mask": group.mask[number]}
        if "position_ids" in self._arguments:
            positions = (group.mask[number].cumsum(dim=1) - 1).clamp(min=0)
            batch["position_ids"] = positions[:, -group.ids.shape[2] :]
        if self.sampling is not None:
            numbers = [
                self.sampling.number(row, group.length) for row in group.rows[number].tolist()
            ]
            batch[DRAW] = torch.tensor(numbers, dtype=torch.float64)
        return {**batch, STREAM: torch.full((group.places,), group.streams[number])}

    def _advance(self, forward: NextToken, groups: Sequence[_Group]) -> list[Token]:
        """Run a sweep, and return the tokens of the rows that have not ended."""
        swept = [
            (at, [self._batch(group, number) for group in groups])
            for number, at in enumerate(self.evaluations)
        ]
        outputs = self.engine.forwards_at(swept, forward)
        made: list[Token] = []
        for position, group in enumerate(groups):
            tokens = torch.stack([of_evaluation[position] for of_evaluation in outputs]).cpu()
            for number, place in (~group.ended).nonzero().tolist():
                made.append(
                    Token(number, int(group.rows[number, place]), int(tokens[number, place]))
                )
            tokens = tokens.masked_fill(group.ended, self.pad_token_id)
            group.ended = group.ended | torch.isin(
                tokens, torch.tensor(sorted(self.eos_token_ids), dtype=torch.int64)
            )
            group.ids = tokens[:, :, None]
            group.mask = torch.cat([group.mask, torch.ones_like(group.ids)], dim=2)
            group.length += 1
        return made

    def _shrunk(self, forward: NextToken, group: _Group) -> bool:
        """Drop what a group's ended rows have in memory, once it is worth a copy of the rest;
        whether any row goes on.
        """
        most = 0 if group.length == self.max_new_tokens else int((~group.ended).sum(dim=1).max())
        if most == 0:
            forward.drop(group.streams)
        elif most <= _SHRINK_AT * group.places:
            places = group.ended.int().argsort(dim=1, stable=True)[:, :most].sort(dim=1).values
            forward.keep(group.streams, group.places, list(places))
            group.rows = group.rows.gather(1, places)
            group.ended = group.ended.gather(1, places)
            group.ids, group.mask = (
                values.gather(1, places[:, :, None].expand(-1, -1, values.shape[2]))
                for values in (group.ids, group.mask)
            )
        return most > 0

    def continuations(self, prompts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """Continue prompts to their ends. See ``sweeps``."""
        continued: list[list[list[int]]] = [[[] for _ in prompts] for _ in self.evaluations]
        for tokens in self.sweeps(prompts):
            for token in tokens:
                continued[token.evaluation][token.row].append(token.id)
        return continued


def generate(  # noqa: D417 - six arguments share a line
    engine: Engine,
    model: HFBlockModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos_token_ids: Collection[int] = (),
    pad_token_id: int = 0,
    at: Evaluation | None = None,
    allowed: int | None = None,
) -> Iterator[tuple[int | None, ...]]:
    """Continue all prompts together, token by token, as Hugging Face's ``generate`` does.

    Args:
        engine, model, max_new_tokens, sampling, eos_token_ids, pad_token_id: As for ``Generation``.
        prompts: Token ids of each prompt, at least one; they are padded on the left to one length.
        at: Evaluation from the engine's ``ask`` whose perturbed weights are used, for objectives of
            generated text; None uses the weights without a perturbation.
        allowed: Bytes of keys, values and activations, within which prompts may wait for others to
            end; None: all run at a time.

    Yields:
        The next token of each prompt, None for prompts that have ended; iteration stops when all
        have ended.

    Raises:
        UnsupportedModelError, BatchError, OptionError, NonFiniteLossError: As ``Generation`` does.
    """
    for tokens in Generation(
        engine,
        model,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        evaluations=[at],
        allowed=allowed,
    ).sweeps(prompts):
        by_row = {token.row: token.id for token in tokens}
        yield tuple(by_row.get(row) for row in range(len(prompts)))


def _unsupported(config: PretrainedConfig, found: str, expected: str) -> UnsupportedModelError:
    remedy = "export the model and generate with transformers"
    return UnsupportedModelError(f"model type {config.model_type}", found, expected, remedy)


def _padded_left(
    prompts: Sequence[Sequence[int]], pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def require_lengths(
    model: HFBlockModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuse prompts and lengths of continuations that the model does not support."""
    if not prompts:
        raise BatchError("prompts", "none", "at least one prompt", "pass a prompt")
    vocabulary = model.config.get_text_config().vocab_size
    longest = model.longest_row
    for number, prompt in enumerate(prompts):
        where = f"prompts[{number}]"
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocabulary:
            found = f"tokens {min(prompt)} to {max(prompt)}" if prompt else "an empty prompt"
            expected = f"at least one token, with ids from 0 to {vocabulary - 1}"
            raise BatchError(where, found, expected, "use this model's own tokenizer")
        if longest is not None and len(prompt) >= longest:
            expected = f"at most {longest - 1}, one less than the model's longest sequence"
            raise BatchError(where, counted(len(prompt), "token"), expected, "shorten this prompt")
    if longest is None:
        require_whole("max_new_tokens", max_new_tokens, 1)
    else:
        limit = f", with which prompts reach the model's limit of {longest}"
        require_whole(
            "max_new_tokens", max_new_tokens, 1, longest - max(map(len, prompts)), otherwise=limit
        )
