"""The forward of generation: the newest tokens of all rows, from their keys and values to the tokens that follow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from zo2adapters.models.hf import Activations, HFBlockModel
from zo2core import Batch
from zo2core.errors import NonFiniteLossError, OptionError, UnsupportedModelError
from zo2core.ranges import LARGEST, require_number, require_whole

STREAM = "generation_stream"  # entry of a batch: number of its stream, which has a cache, for each row
DRAW = "generation_draw"  # entry of a batch: a number from 0 to 1 for each row, with which its next token is drawn
_LEAST_TEMPERATURE = 1e-6  # by less, logits that are divided overflow; the likeliest token is all but sure anyway
_DRAWN_ROWS = 64  # rows whose probabilities are in memory at a time


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sample tokens instead of taking the likeliest.

    Each token is drawn with a number that follows from the seed, the row and the token's position in the continuation, so
    that neither other rows nor other evaluations change it.

    Args:
        temperature: Divisor of the logits, at least 1e-6.
        top_p: Probability mass of the likeliest tokens that are sampled from, above 0 and at most 1.
        seed: Seed of the sampling; no global generator is used.

    Raises:
        OptionError: if a number is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, least=_LEAST_TEMPERATURE, remedy="pass a value near 1")
        require_number("top_p", self.top_p, above=0, most=1, remedy="pass 1 for all tokens")

    def number(self, row: int, position: int) -> float:
        """The number from 0 to 1 with which a row's token at this position of its continuation is drawn."""
        return random.Random(f"{self.seed}/{row}/{position}").random()  # noqa: S311 - no secret

    def tokens(self, logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Draw tokens (rows,) from logits (rows, vocabulary), float32, with numbers (rows,) from 0 to 1.

        A token is the first one up to which the probabilities, summed in the vocabulary's order, exceed the number.
        """
        warp: Any = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_p < 1:
            warp.append(TopPLogitsWarper(self.top_p))
        parts = []
        for part, number in zip(torch.split(logits, _DRAWN_ROWS), torch.split(numbers, _DRAWN_ROWS), strict=True):
            sums = warp(None, part).softmax(dim=-1).double().cumsum(dim=-1)
            parts.append(torch.searchsorted(sums, number[:, None] * sums[:, -1:], right=True)[:, 0])
        return torch.cat(parts)


def sampling_of(temperature: float, top_p: float, seed: int) -> Sampling | None:
    """How options sample tokens; None takes the likeliest token."""
    require_whole("seed", seed, -LARGEST, LARGEST)
    if temperature:
        return Sampling(temperature=temperature, top_p=top_p, seed=seed)
    if top_p != 1:
        raise OptionError(
            "top_p",
            found=f"{top_p} with a temperature of 0, which takes the likeliest token",
            expected="a temperature above 0",
            remedy="pass --temperature 1, or leave --top-p out",
        )
    return None


class NextToken:
    """The model's forward over the newest tokens, which returns the next token of each row.

    A batch is a stream. It has the tokens, masks and positions of the model's inputs, and ``STREAM``, by which its keys and
    values are found; to sample it has ``DRAW``. Low-rank evaluations run as one batch, and their keys and values are
    together.
    """

    def __init__(self, model: HFBlockModel, sampling: Sampling | None = None) -> None:
        self._model, self._sampling = model, sampling
        self.caches: dict[tuple[int, ...], Cache] = {}  # by the streams of which they have keys and values, in order
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
            self._model.prologue(input_ids=ids, past_key_values=DynamicCache(config=config), use_cache=True)
        except Exception as error:  # a forward may fail in any way with a cache that it does not expect
            raise UnsupportedModelError(
                f"model type {config.model_type}",
                found=f"a forward that does not take transformers' DynamicCache ({type(error).__name__}: {error})",
                expected="a forward that takes it",
                remedy="export the model and generate with transformers",
            ) from error

    def stacked(self, batches: Sequence[Batch]) -> Batch:
        """Join batches along their rows. See ``StackedForward``."""
        return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}

    def embed(self, batch: Batch) -> Activations:
        """Run HF's forward up to the first layer, with the streams' cache."""
        streams = tuple(dict.fromkeys(batch[STREAM].tolist()))
        if streams not in self.caches:
            self.caches[streams] = DynamicCache(config=self._model.config)
        inputs = {key: value for key, value in batch.items() if key not in (STREAM, DRAW)}
        return self._model.prologue(**inputs, past_key_values=self.caches[streams], use_cache=True)

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Choose each row's next token: (rows,), int64."""
        logits = self._model.logits(self._model.by_token(activations.hidden)[:, -1]).float()
        largest, tokens = logits.max(dim=-1)  # NaN if any logit is
        if not bool(largest.isfinite().all()):
            raise NonFiniteLossError(
                "generation", found="logits that are not finite", expected="finite logits", remedy="check the weights"
            )
        return tokens if self._sampling is None else self._sampling.tokens(logits, batch[DRAW])

    def heads(self, batches: Sequence[Batch], activations: Activations) -> list[torch.Tensor]:
        """Choose the next tokens of all streams. See ``StackedForward``."""
        return list(torch.split(self.head(self.stacked(batches), activations), len(batches[0]["input_ids"])))

    def keep(self, streams: Sequence[int], rows: int, kept: Sequence[torch.Tensor]) -> None:
        """Drop the keys and values of all rows but some."""
        indices = dict(zip(streams, kept, strict=True))
        for key, cache in self.caches.items():
            if key[0] in indices:
                cache.batch_select_indices(torch.cat([place * rows + indices[of] for place, of in enumerate(key)]))

    def drop(self, streams: Sequence[int]) -> None:
        """Drop the keys and values of streams that have ended."""
        self.caches = {key: cache for key, cache in self.caches.items() if key[0] not in streams}
