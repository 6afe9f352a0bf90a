"""``zo2 generate``: continue prompts with a model that is never whole in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zo2adapters.commands.at_step import AtStep, names_of, run_together
from zo2adapters.tasks.row_options import with_line_breaks
from zo2adapters.trainers.run_directory import name_of
from zo2core.errors import NonFiniteLossError

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel
    from zo2adapters.tasks.generation import Sampling  # command lines are parsed without importing transformers
    from zo2core import SharedBase


@dataclass(frozen=True, kw_only=True)
class Generate(AtStep):
    """Continue prompts with a model, or a run at any of its steps. Slow: each token takes a pass over all blocks."""

    needs: ClassVar = ("zo2adapters.models.checkpoint", "zo2adapters.tasks.generation", "zo2adapters.trainers.base_check")
    first_options: ClassVar = (
        "run_directory",
        "model",
        "adapter",
        "prompt",
        "at",
        "others",
        "max_new_tokens",
        "temperature",
        "top_p",
        "memory",
    )

    prompt: tuple[str, ...]
    r"""Texts to continue, where \n is a line break and \t a tab; all of them share each pass over the blocks."""
    others: tuple[Path, ...] = ()
    """Further runs, or directories with saved adapters, of the same base, which continue the prompts, too. All share each
    pass over the blocks if they only read the base: adapters, and runs with --rank."""
    max_new_tokens: int = 32
    """Most tokens of a continuation."""
    temperature: float = 0.0
    """Temperature at which tokens are sampled; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Probability mass of the likeliest tokens that are sampled from."""
    seed: int = 0
    """Seed of the sampling."""

    def run(self) -> None:
        """Print each prompt with its continuation."""
        from zo2adapters.tasks.generation import require_lengths, sampling_of
        from zo2adapters.tasks.tokenizer import load_tokenizer

        drawn = sampling_of(self.temperature, self.top_p, self.seed)
        at = self.resolved()
        tokenizer = load_tokenizer(at.base())
        model = at.open_model()
        texts = [with_line_breaks(text) for text in self.prompt]
        prompts: list[list[int]] = [tokenizer(text)["input_ids"] for text in texts]
        require_lengths(model, prompts, self.max_new_tokens)
        others = [(name, at.of_other(path)) for name, path in zip(names_of(self.others), self.others, strict=True)]
        with at.shared_base([other for _, other in others]) as shared:
            runs = {"": partial(self._continued, at, model, tokenizer, prompts, drawn, shared)}
            for name, other in others:
                runs[name] = partial(self._continued, other, other.open_model(), tokenizer, prompts, drawn, shared)
            results = run_together(runs, shared)
        title = name_of(self.run_directory or at.model_options.adapter or Path(str(at.model)))
        for name, continued in results.items():
            if others:
                print(f"{title}:" if not name else f"\n{name}:")
            for text, ids, new in zip(texts, prompts, continued, strict=True):
                whole, prefix = (tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ([*ids, *new], ids))
                print(text + str(whole)[len(str(prefix)) :])

    def _continued(
        self,
        at: AtStep,
        model: HFBlockModel,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        drawn: Sampling | None,
        shared: SharedBase | None,
    ) -> list[list[int]]:
        """The tokens with which one model continues each prompt."""
        from zo2adapters.models.footprint import activation_bytes, cache_bytes
        from zo2adapters.models.model_directory import end_token_ids
        from zo2adapters.tasks.generation import generate
        from zo2adapters.tasks.tokenizer import pad_token_id
        from zo2adapters.trainers.base_check import require_finite_base
        from zo2adapters.trainers.progress_bar import progress_bar, sweep_bars

        tokens = max(map(len, prompts)) + self.max_new_tokens
        held = cache_bytes(model.config, len(prompts), tokens)
        running = activation_bytes(model.config, len(prompts), tokens, streams=1)
        with at.engine(model, activation_bytes=held + running, shared=shared, tokens=len(prompts)) as engine:
            continued: list[list[int]] = [[] for _ in prompts]
            made = generate(
                engine,
                model,
                prompts,
                max_new_tokens=self.max_new_tokens,
                sampling=drawn,
                eos_token_ids=end_token_ids(model, tokenizer),
                pad_token_id=pad_token_id(tokenizer),
            )
            try:
                with progress_bar(total=self.max_new_tokens, unit="token") as bar, sweep_bars(engine):
                    for step in made:
                        for continuation, token in zip(continued, step, strict=True):
                            continuation += [] if token is None else [token]
                        bar.update()
            except NonFiniteLossError:
                require_finite_base(at.open_model(), at.base())  # also experts that were read outside the engine's segments
                raise
        return continued
