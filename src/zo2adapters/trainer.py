"""Fine-tune a checkpoint on a JSONL file: the main job, as a library call and behind ``zo2 train``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import psutil
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from zo2adapters.checkpoint import open_checkpoint, resolve_directory
from zo2adapters.data import Dataset, collate, evaluation_batches, pad_token_id, read_dataset, training_batches
from zo2adapters.hf import HFBlockModel
from zo2adapters.schedules import Decay, LearningRate
from zo2core import DataError, EvaluationResult, Journal, MeZOSGD, OptionError, StepResult, ZOEngine
from zo2core.checkpoint import require_unused
from zo2core.types import Batch

DEFAULT_LENGTH = 1024  # tokens, where the model takes as many

DtypeName: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """How the weights are moved."""

    lr: float = 1e-6
    """Peak learning rate. MeZO's range for full fine-tuning of OPT is 1e-7 to 1e-6; small models take more."""
    zo_eps: float = 1e-3
    """Perturbation scale: evaluations are made at the weights plus and minus zo_eps times a random direction."""
    weight_decay: float = 0.0
    """Weight decay of MeZO's update; biases and layer norms do not decay."""
    perturb_in_place: bool = True
    """MeZO's arithmetic bit for bit. Off: evaluations start from the weights and leave no rounding behind."""
    decay: Decay = Decay.CONSTANT
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""

    def estimator(self, steps: int) -> MeZOSGD:
        """The estimator of a run of so many steps.

        Raises:
            OptionError: if a number is out of its range.
        """
        MeZOSGD(lr=self.lr, zo_eps=self.zo_eps, weight_decay=self.weight_decay)  # refuses a bad peak before it is scheduled
        lr = LearningRate(peak=self.lr, decay=self.decay, warmup_steps=self.warmup_steps, steps=steps)
        return MeZOSGD(lr=lr, zo_eps=self.zo_eps, weight_decay=self.weight_decay, perturb_in_place=self.perturb_in_place)


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How rows become batches."""

    batch_size: int = 16
    """Rows a batch."""
    sequence_length: int | None = None
    """Longest row in tokens; longer ones are cut at the end. By default 1024, or what the model takes if that is less."""

    def length_for(self, model: HFBlockModel) -> int:
        """The longest row for a model.

        Raises:
            OptionError: if more was asked for than the model takes.
        """
        longest = getattr(model.config, "max_position_embeddings", None)
        if self.sequence_length is None:
            return min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
        if longest is not None and self.sequence_length > longest:
            raise OptionError(
                "sequence_length",
                found=repr(self.sequence_length),
                expected=f"at most {longest}, the longest sequence the model takes",
                remedy="choose a shorter length",
            )
        return self.sequence_length


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """A fine-tuning run."""

    model: str
    """Model directory with safetensors weights, or a hub id."""
    data: Path
    """JSONL file; each row has text, or prompt and completion (loss on the completion only), or messages."""
    output: Path
    """Directory for the run: journal.jsonl, metrics.jsonl and, at the end, model/. Must not exist or be empty."""
    evaluation: Path | None = None
    """JSONL file to evaluate on, before the first step and after the last."""
    evaluate_every: int | None = None
    """Also evaluate every so many steps."""
    steps: int = 1000
    """Zeroth-order steps, each two forwards of one batch."""
    seed: int = 0
    """Of the order of rows and of the directions."""
    dtype: DtypeName = "auto"
    """Of the weights; auto is the checkpoint's own."""
    optimization: Optimization = field(default_factory=Optimization)
    batching: Batching = field(default_factory=Batching)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load a model directory's tokenizer, without running remote code.

    Raises:
        DataError: if there is none.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            directory,
            found=f"no usable tokenizer ({str(error).splitlines()[0]})",
            expected="tokenizer files beside the model",
            remedy="copy the tokenizer files of the base model into the directory",
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


class Trainer:
    """One run: opens model and data, steps, evaluates, exports.

    Args:
        options: Of the run.
        quiet: No progress bar.

    Raises:
        ZO2Error: of the kind that fits, for whatever of the options cannot be used; the output directory is not created.
    """

    def __init__(self, options: TrainOptions, *, quiet: bool = False) -> None:
        _require_at_least("steps", options.steps, 1)
        if options.evaluate_every is not None:
            _require_at_least("evaluate_every", options.evaluate_every, 1)
        require_unused(options.output)
        self.options = options
        self._quiet = quiet
        estimator = options.optimization.estimator(options.steps)
        directory = resolve_directory(options.model)
        model = open_checkpoint(directory, dtype=options.dtype)
        tokenizer = load_tokenizer(directory)
        length = options.batching.length_for(model)
        self._pad = pad_token_id(tokenizer)
        self._data = read_dataset(options.data, tokenizer, sequence_length=length)
        self._evaluation = (
            None if options.evaluation is None else read_dataset(options.evaluation, tokenizer, sequence_length=length)
        )
        self._rows = training_batches(self._data, batch_size=options.batching.batch_size, seed=options.seed)
        self.engine = ZOEngine(model, estimator, journal=Journal(options.output / "journal.jsonl"), seed=options.seed)

    @property
    def truncated(self) -> int:
        """Training rows that were cut to the sequence length."""
        return self._data.truncated

    def run(self) -> Path:
        """Train, evaluate and export.

        Returns:
            The exported model's directory.
        """
        options = self.options
        with (
            (options.output / "metrics.jsonl").open("w") as metrics,
            tqdm(total=options.steps, unit="step", disable=self._quiet, file=sys.stderr, dynamic_ncols=True) as bar,
        ):
            self._evaluate(metrics, bar)
            for step in range(options.steps):
                batch = collate(next(self._rows), pad_token_id=self._pad)
                result = self.engine.step(batch)
                record = step_record(result, batch)
                _write(metrics, record)
                speed, memory = record["tokens_per_second"], record["rss_bytes"] / 1e9
                bar.set_postfix_str(f"loss {result.loss:.4f}, {speed:.0f} tokens/s, {memory:.2f} GB", refresh=False)
                bar.update()
                every = options.evaluate_every
                if step + 1 == options.steps or (every is not None and (step + 1) % every == 0):
                    self._evaluate(metrics, bar)
        self.engine.export(options.output / "model")
        return options.output / "model"

    def close(self) -> None:
        """Close the engine. May be called twice."""
        self.engine.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _evaluate(self, metrics: IO[str], bar: tqdm[Any]) -> None:
        if self._evaluation is None:
            return
        result = evaluate_dataset(self.engine, self._evaluation, batch_size=self.options.batching.batch_size, pad=self._pad)
        _write(metrics, {"step": self.engine.version, "evaluation_loss": result.loss, "evaluation_seconds": result.seconds})
        bar.write(f"step {self.engine.version}: evaluation loss {result.loss:.4f}", file=sys.stderr)


def evaluate_dataset(
    engine: ZOEngine, dataset: Dataset, *, batch_size: int, pad: int, progress: Callable[[int], object] | None = None
) -> EvaluationResult:
    """Evaluate the present weights on a whole data set, in file order.

    Args:
        engine: Whose weights.
        dataset: On what.
        batch_size: Rows a batch.
        pad: Token id for padding.
        progress: Told how many rows are being taken up, batch by batch.
    """

    def batches() -> Iterator[Batch]:
        for rows in evaluation_batches(dataset, batch_size=batch_size):
            if progress is not None:
                progress(len(rows))
            yield collate(rows, pad_token_id=pad)

    return engine.evaluate(batches())


def step_record(result: StepResult, batch: Batch) -> dict[str, Any]:
    """What ``metrics.jsonl`` says about a step: JSON values."""
    tokens = int(batch["attention_mask"].sum())
    return {
        "step": result.step,
        "loss": result.loss,
        "losses": list(result.losses),
        "projected_grads": list(result.projected_grads),
        "lr": result.lr,
        "tokens": tokens,
        "tokens_per_second": tokens / result.seconds,
        "seconds": result.seconds,
        "bytes_moved": result.bytes_moved,
        "rss_bytes": psutil.Process().memory_info().rss,
    }


def perplexity(loss: float) -> float:
    """The exponential of a mean loss, infinite where it overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def _write(file: IO[str], record: dict[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")
    file.flush()


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise OptionError(name, found=repr(value), expected=f"at least {least}", remedy=f"raise {name}")
