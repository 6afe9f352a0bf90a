"""The commands that use a model as it stands at some step: evaluate, generate, export."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from zo2adapters.models.checkpoint import open_checkpoint, resolve_directory
from zo2adapters.models.footprint import activation_bytes, cache_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.candidates import Choice, holds_choices, read_choices
from zo2adapters.tasks.generation import Sampling, generate
from zo2adapters.tasks.rows import pad_token_id, read_dataset
from zo2adapters.tasks.scoring import score
from zo2adapters.trainers.options import Batching, DtypeName
from zo2adapters.trainers.run_directory import JOURNAL, RunDirectory
from zo2adapters.trainers.trainer import evaluate_dataset, load_tokenizer, perplexity
from zo2core import Journal, JournalError, MemoryPolicy, OptionError, Replayer
from zo2core.checkpoint import require_unused
from zo2core.planning.host_budget import parse_size

STREAMS = 8  # of the longest batches, that an evaluation takes at a time by default


@dataclass(frozen=True, kw_only=True)
class AtStep:
    """A base model, or a run at any of its steps."""

    model: str | None = None
    """Base model directory with safetensors weights, or a hub id."""
    journal: Path | None = None
    """Journal of a run on that base: the weights are those after its last step. Without one: the base itself."""
    run_directory: Annotated[Path | None, tyro.conf.arg(name="run")] = None
    """Directory of a run: its base, dtype and journal."""
    at: int | None = None
    """Step of the journal to stop after; by default its last."""
    dtype: DtypeName = "auto"
    """Of the weights; with a journal, the one the run was made with."""
    memory: str = "auto"
    """Host memory the process may have in all, such as 6GiB; auto takes what is free."""
    device: str = "cpu"
    """Where to compute: cpu, cuda or cuda:N."""
    device_memory: str = "auto"
    """Of a GPU, that may be used, such as 8GiB; auto takes what is free."""

    def resolved(self) -> AtStep:
        """The same with base, dtype and journal of the run filled in.

        Raises:
            OptionError: if neither or both are named.
        """
        if (self.model is None) == (self.run_directory is None) or (self.run_directory and self.journal):
            raise OptionError(
                "--model", found="neither or both", expected="either --model or --run", remedy="name one of the two"
            )
        if self.run_directory is None:
            return self
        options = RunDirectory.options(self.run_directory)
        return replace(
            self, model=options.model, dtype=options.dtype, journal=self.run_directory / JOURNAL, run_directory=None
        )

    def base(self) -> Path:
        """The base model's directory."""
        assert self.model is not None, "resolved"
        return resolve_directory(self.model)

    def engine(
        self,
        model: HFBlockModel,
        *,
        activation_bytes: int = 256 << 20,
        micro_batch_size: int | None = None,
        trace: Path | None = None,
    ) -> Replayer:
        """An engine at the step."""
        journal = Journal(self.journal)
        if self.journal is not None and journal.header is None:
            raise JournalError(self.journal, found="no journal", expected="a run's journal.jsonl", remedy="check the path")
        return Replayer(
            model,
            journal if self.at is None else journal.until(self.at),
            memory=MemoryPolicy(host=self.memory, device=self.device_memory, activations=activation_bytes),
            device=self.device,
            micro_batch_size=micro_batch_size,
            trace=trace,
        )


@dataclass(frozen=True, kw_only=True)
class Evaluate(AtStep):
    """Evaluate a model, or a run at any of its steps, on a JSONL file."""

    data: Path
    """JSONL file, as for training."""
    batching: Batching = field(default_factory=Batching)
    activation_memory: str | None = None
    """Of the memory, set aside for activations, such as 1GiB: as many batches as fit in there share one pass over the
    blocks. By default what eight of the longest take."""
    trace: Path | None = None
    """File to write each sweep to, for ui.perfetto.dev and zo2 timeline. Must not exist."""

    def run(self) -> None:
        """Print loss and perplexity; of rows with candidates, how often the likeliest one is the answer."""
        at = self.resolved()
        tokenizer = load_tokenizer(at.base())
        model = open_checkpoint(at.base(), dtype=at.dtype, loss_chunk=self.batching.loss_chunk)
        length = self.batching.length_for(model)
        if holds_choices(self.data):
            self._choose(at, model, read_choices(self.data, tokenizer, sequence_length=length), pad_token_id(tokenizer))
            return
        dataset = read_dataset(self.data, tokenizer, sequence_length=length)
        longest = max(len(row.input_ids) for row in dataset)
        with self._engine(at, model, longest) as engine, tqdm(total=len(dataset), unit="row", file=sys.stderr) as bar:
            result = evaluate_dataset(
                engine, dataset, batch_size=self.batching.batch_size, pad=pad_token_id(tokenizer), progress=bar.update
            )
        print(
            f"loss {result.loss:.6f}, perplexity {perplexity(result.loss):.4f}, {result.tokens} tokens, "
            f"{len(dataset)} rows, {result.sweeps} sweeps"
        )

    def _choose(self, at: AtStep, model: HFBlockModel, choices: Sequence[Choice], pad: int) -> None:
        longest = max(len(each.prompt) + len(candidate) for each in choices for candidate in each.candidates)
        total = sum(len(each.candidates) for each in choices)
        with self._engine(at, model, longest) as engine, tqdm(total=total, unit="candidate", file=sys.stderr) as bar:
            scored = score(
                engine,
                model,
                [each.prompt for each in choices],
                [each.candidates for each in choices],
                batch_size=self.batching.batch_size,
                pad_token_id=pad,
                progress=bar.update,
            )
        shares = []
        for by_length in (False, True):
            chosen = scored.choices(by_length=by_length)
            shares.append(sum(mine == each.answer for mine, each in zip(chosen, choices, strict=True)) / len(choices))
        print(
            f"accuracy {shares[0]:.1%}, by mean log-likelihood {shares[1]:.1%}, "
            f"{len(choices)} rows, {total} candidates, {scored.sweeps} sweeps"
        )

    def _engine(self, at: AtStep, model: HFBlockModel, longest: int) -> Replayer:
        rows, micro_rows = self.batching.batch_size, self.batching.micro_batch_size
        nbytes = (
            activation_bytes(model.config, rows, longest, streams=STREAMS, micro_rows=micro_rows)
            if self.activation_memory is None
            else parse_size(self.activation_memory)
        )
        return at.engine(model, activation_bytes=nbytes, micro_batch_size=micro_rows, trace=self.trace)


@dataclass(frozen=True, kw_only=True)
class Generate(AtStep):
    """Continue prompts with a model, or a run at any of its steps. Slow: each token takes a pass over all blocks."""

    prompt: tuple[str, ...]
    """Texts to continue, all in the same passes."""
    max_new_tokens: int = 32
    """Most tokens of a continuation."""
    temperature: float = 0.0
    """Tokens are drawn at this temperature; 0 takes the likeliest."""
    top_p: float = 1.0
    """Draw only from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Of the draws."""

    def run(self) -> None:
        """Print each prompt with its continuation."""
        at = self.resolved()
        tokenizer = load_tokenizer(at.base())
        model = open_checkpoint(at.base(), dtype=at.dtype)
        prompts: list[list[int]] = [tokenizer(text)["input_ids"] for text in self.prompt]
        tokens = max(map(len, prompts)) + self.max_new_tokens
        held = cache_bytes(model.config, len(prompts), tokens)
        with at.engine(
            model, activation_bytes=held + activation_bytes(model.config, len(prompts), tokens, streams=1)
        ) as engine:
            sampling = Sampling(temperature=self.temperature, top_p=self.top_p, seed=self.seed) if self.temperature else None
            continued: list[list[int]] = [[] for _ in prompts]
            made = generate(
                engine,
                model,
                prompts,
                max_new_tokens=self.max_new_tokens,
                sampling=sampling,
                eos_token_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
                pad_token_id=pad_token_id(tokenizer),
            )
            for step in tqdm(made, total=self.max_new_tokens, unit="token", file=sys.stderr):
                for one, token in zip(continued, step, strict=True):
                    one += [] if token is None else [token]
        for text, ids, new in zip(self.prompt, prompts, continued, strict=True):
            whole, prefix = (tokenizer.decode(each, skip_special_tokens=True) for each in ([*ids, *new], ids))
            print(text + str(whole)[len(str(prefix)) :])


@dataclass(frozen=True, kw_only=True)
class Export(AtStep):
    """Write the model of any step of a run, or of a base and a journal, in the Hugging Face layout."""

    output: Path
    """Directory to write; must not exist or be empty."""

    def run(self) -> None:
        """Replay and write."""
        require_unused(self.output)
        at = self.resolved()
        with at.engine(open_checkpoint(at.base(), dtype=at.dtype)) as engine:
            engine.export(self.output)
            print(f"{self.output}: the model after {engine.version} steps")
