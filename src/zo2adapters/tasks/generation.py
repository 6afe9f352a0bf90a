"""Generate text with a model that is never whole in memory: one sweep over all blocks for each token.

This is slow: every token moves the whole model once, for all prompts together. Keys and values of all blocks stay in Hugging
Face's cache, so a sweep runs the newest token only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import Cache, DynamicCache, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from zo2adapters.models.hf import Activations, HFBlockModel
from zo2core import (
    Batch,
    BatchError,
    Evaluation,
    NonFiniteLossError,
    OptionError,
    Runner,
    UnsupportedModelError,
    ZOEngine,
)
from zo2core.ranges import require_number


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sample tokens instead of taking the likeliest.

    Args:
        temperature: Divisor of the logits, above 0.
        top_p: Probability mass of the likeliest tokens that are sampled from, above 0 and at most 1.
        seed: Seed of the sampling; no global generator is used.

    Raises:
        OptionError: if a number is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, above=0, remedy="pass a value near 1")
        require_number("top_p", self.top_p, above=0, most=1, remedy="pass 1 for all tokens")

    def processors(self) -> LogitsProcessorList:
        """Make Hugging Face's logits warpers for these options."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


class NextToken:
    """The model's forward over the newest tokens, which returns the logits of the next token.

    Args:
        model: The model that runs.
        cache: Keys and values of the tokens so far; each layer appends to it.
    """

    def __init__(self, model: HFBlockModel, cache: Cache) -> None:
        self._model = model
        self._cache = cache
        self._cache_is_checked = False  # whether the model's forward was found to take such a cache
        self.block = model.block
        self.forward_bytes = model.forward_bytes
        self.held_bytes = model.held_bytes  # without the cache, which outlives a batch

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch of ``generate`` unchanged, after a check that the model takes transformers' cache.

        Raises:
            UnsupportedModelError: if the model's forward needs a cache of another class.
        """
        if not self._cache_is_checked:
            self._require_common_cache(batch["input_ids"][:1, :1])
            self._cache_is_checked = True
        return batch

    @torch.inference_mode()
    def _require_common_cache(self, ids: torch.Tensor) -> None:
        config = self._model.config
        try:
            self._model.prologue(input_ids=ids, past_key_values=DynamicCache(config=config), use_cache=True)
        except Exception as error:  # a forward may fail in any way with a cache that it does not expect
            raise UnsupportedModelError(
                f"model type {config.model_type}",
                found=f"a forward that does not take transformers' DynamicCache ({type(error).__name__}: {error})",
                expected="a forward that takes it",
                remedy="export the model and generate with transformers",
            ) from error

    def embed(self, batch: Batch) -> Activations:
        """Run HF's forward up to the first layer, with the cache."""
        return self._model.prologue(**batch, past_key_values=self._cache, use_cache=True)

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Logits after each row's last token: (rows, vocabulary), float32."""
        return self._model.logits(self._model.by_token(activations.hidden)[:, -1]).float()


def generate(
    engine: Runner,
    model: HFBlockModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos_token_ids: Collection[int] = (),
    pad_token_id: int = 0,
    at: Evaluation | None = None,
) -> Iterator[tuple[int | None, ...]]:
    """Continue all prompts together, token by token, as Hugging Face's ``generate`` does.

    Args:
        engine: The engine whose current weights are used.
        model: The model that the engine was made with.
        prompts: Token ids of each prompt, at least one; they are padded on the left to one length.
        max_new_tokens: Most tokens of a continuation.
        sampling: How tokens are sampled; None takes the likeliest token.
        eos_token_ids: Token ids that end a continuation.
        pad_token_id: Token id at padded positions.
        at: Evaluation from the engine's ``ask`` whose perturbed weights are used, for objectives of generated text; None
            uses the weights without a perturbation.

    Yields:
        The next token of each prompt, None for prompts that have ended; iteration stops when all have ended.

    Raises:
        UnsupportedModelError: if the model's forward takes no cache.
        BatchError: if a prompt is empty, or has a token that is not in the model's vocabulary.
        OptionError: if ``max_new_tokens`` is out of its range, or prompt and continuation exceed the model's longest
            sequence.
    """
    require_lengths(model, prompts, max_new_tokens)
    ids, mask = _padded_left(prompts, pad_token_id)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    arguments = inspect.signature(model.skeleton.forward).parameters
    if "past_key_values" not in arguments:
        raise UnsupportedModelError(
            f"model type {model.config.model_type}",
            found="a forward without a cache of keys and values",
            expected="a forward that takes past_key_values, since each sweep runs one token",
            remedy="export the model and generate with transformers",
        )
    takes_positions = "position_ids" in arguments
    forward = NextToken(model, DynamicCache(config=model.config))
    ended = torch.zeros(len(ids), dtype=torch.bool)
    ends = torch.tensor(sorted(eos_token_ids), dtype=torch.int64)
    context, draw = ids, _token_choice(sampling)
    run = engine.forwards if at is None else partial(_trained(engine).forwards, at=at)
    for _ in range(max_new_tokens):
        batch = {"input_ids": ids, "attention_mask": mask, **({"position_ids": positions} if takes_positions else {})}
        [[logits]] = run([batch], forward)
        if not bool(logits.isfinite().all()):
            raise NonFiniteLossError(
                "generation", found="logits that are not finite", expected="finite logits", remedy="check the weights"
            )
        tokens = draw(context, logits.cpu())
        yield tuple(None if is_ended else int(token) for is_ended, token in zip(ended, tokens, strict=True))
        tokens = tokens.masked_fill(ended, pad_token_id)
        ended = ended | torch.isin(tokens, ends)
        if ended.all():
            return
        ids, context = tokens[:, None], torch.cat([context, tokens[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = positions[:, -1:] + 1


def _trained(engine: Runner) -> ZOEngine:
    if isinstance(engine, ZOEngine):
        return engine
    raise OptionError("at", found="a replayer, which has no evaluations", expected="a ZOEngine", remedy="leave it out")


def _token_choice(sampling: Sampling | None) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Make a function that chooses tokens (rows,) from all token ids (rows, tokens) and logits (rows, vocabulary)."""
    if sampling is None:
        return lambda ids, logits: logits.argmax(dim=-1)
    warp: Any = sampling.processors()  # its annotations ask for tensor types that no tensor has
    generator = torch.Generator().manual_seed(sampling.seed)

    def draw(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(warp(ids, logits).softmax(dim=-1), 1, generator=generator)[:, 0]

    return draw


def _padded_left(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def require_lengths(model: HFBlockModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse prompts and lengths of continuations that the model does not support.

    Raises:
        BatchError, OptionError: as ``generate`` does.
    """
    if not prompts:
        raise BatchError("prompts", found="none", expected="at least one prompt", remedy="pass a prompt")
    vocabulary = model.config.get_text_config().vocab_size
    for number, prompt in enumerate(prompts):
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocabulary:
            found = f"tokens {min(prompt)} to {max(prompt)}" if prompt else "an empty prompt"
            expected = f"at least one token, with ids from 0 to {vocabulary - 1}"
            raise BatchError(f"prompts[{number}]", found=found, expected=expected, remedy="use this model's own tokenizer")
    longest = model.longest_row
    for number, prompt in enumerate(prompts):
        if longest is not None and len(prompt) >= longest:
            raise BatchError(
                f"prompts[{number}]",
                found=f"{len(prompt)} tokens",
                expected=f"at most {longest - 1}, one less than the model's longest sequence",
                remedy="shorten this prompt",
            )
    most = None if longest is None else longest - max(map(len, prompts))
    if max_new_tokens < 1 or (most is not None and max_new_tokens > most):
        expected = "at least 1" if most is None else f"1 to {most}, with which prompts reach the model's limit of {longest}"
        raise OptionError(
            "max_new_tokens", found=repr(max_new_tokens), expected=expected, remedy="pass a value in this range"
        )
