"""``zo2 demo``: a small model is pre-trained, then fine-tuned with zeroth-order steps alone.

Nothing is downloaded. The text is the source of Python's standard library. Part of it pre-trains a
small Llama with first-order steps; held-out files give the task. The two phases are measured
separately. Zeroth-order steps learn little from scratch: pre-training makes the features that tell
a docstring from code, and MeZO only has to connect them with the answer.

The task: is this line text of a docstring, or code? The question has a form that does not occur in
pre-training, and its answers are letters without a prior meaning.
"""

from __future__ import annotations

import ast
import json
import os
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import ByteLevelBPETokenizer, Tokenizer

from zo2adapters.commands.at_step import AtStep
from zo2adapters.commands.options import Command
from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.trainers.metrics import LoggedBar
from zo2adapters.trainers.optimization import Decay, LearningRate, Optimization
from zo2adapters.trainers.options import DEFAULT_LENGTH, Batching, TrainOptions
from zo2adapters.trainers.run_directory import METRICS, MODEL
from zo2core.checkpoint.unused import refuse_used
from zo2core.errors import DataError
from zo2core.io.durable import open_no_follow
from zo2core.ranges import counted

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


PAD = "<pad>"
# docstring text, code; letters without a meaning, so that an untrained model guesses
LABELS = (" a", " b")
QUESTION = "\nKind:"  # follows the line; it does not occur in pre-training

_LENGTHS = range(20, 61)  # characters of a line
_SKIPPED = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "encodings",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and hyperparameters of the demo; with the defaults it takes about two minutes on two
    cores.
    """

    vocabulary: int = 1024  # tokens, at least 257
    hidden: int = 96  # width of the residual stream
    layers: int = 3
    heads: int = 3
    characters: int = 4_000_000  # of pre-training text
    window: int = 64  # tokens of a pre-training row
    windows: int = 32  # pre-training rows per step
    pretraining_steps: int = 600  # first-order steps
    pretraining_lr: float = 5e-3  # AdamW's peak learning rate
    training_rows: int = 1536  # an even number
    evaluation_rows: int = 256  # an even number
    pairs_per_file: int = 8  # most row pairs from one source file, so that no file dominates
    steps: int = 3000  # zeroth-order steps
    batching: Batching = field(default_factory=lambda: Batching(batch_size=16))
    # Twice this learning rate diverges. A zeroth-order step moves every weight, so the limit falls
    # as their number grows.
    optimization: Optimization = field(
        default_factory=lambda: Optimization(
            method="zeroth-order", lr=3e-4, zo_eps=1e-3, decay=Decay.LINEAR
        )
    )


RECIPE = Recipe()


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Pre-train a small model, fine-tune it with zeroth-order steps alone, and print what it
    learned.
    """

    keep: Path | None = None
    """Directory that keeps model, data and run; by default they are removed at the end."""
    seed: int = 0
    """Seed of pre-training and fine-tuning."""

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        if self.keep is not None:
            refuse_used(self.keep)

    def run(self) -> None:
        """Run the demo."""
        with (
            nullcontext(self.keep)
            if self.keep
            else tempfile.TemporaryDirectory(prefix="zo2-demo-") as directory
        ):
            run_demo(Path(directory), seed=self.seed)


class TaskScore(NamedTuple):
    """How well a model answers the task's rows."""

    accuracy: float  # share of rows whose completion is the likeliest label, 0 to 1
    loss: float  # mean loss over the tokens of the right completions, in nats


def run_demo(
    directory: Path, *, seed: int, recipe: Recipe = RECIPE, quiet: bool = False
) -> tuple[TaskScore, TaskScore]:
    """Make a model, fine-tune it with zeroth-order steps alone, and print what it learned."""
    from zo2adapters.trainers.run_inputs import RunStart
    from zo2adapters.trainers.trainer import Display, open_run

    task = prepare(directory, seed=seed, recipe=recipe, quiet=quiet)
    losses = task.pretraining_losses
    output = directory / "run"
    print(
        f"model: Llama, {task.parameters:,} parameters, made from {recipe.characters / 1e6:.1f} "
        "MB of Python's own source\n"
        f"  first-order pre-training: {len(losses)} steps of AdamW, loss {losses[0]:.2f} -> "
        f"{fmean(losses[-20:]):.2f}, "
        f"{task.pretraining_seconds:.0f} s\n"
        "task: is a line docstring text (a) or code (b)? The question is new to the model, and "
        "the lines come from files\n"
        f"  that pre-training did not see: {recipe.training_rows} rows to train on, "
        f"{recipe.evaluation_rows} to evaluate on",
        flush=True,
    )
    options = TrainOptions(
        model=str(task.model),
        data=task.train,
        output=output,
        steps=recipe.steps,
        batching=recipe.batching,
        optimization=recipe.optimization,
        evaluation=task.evaluation,
        evaluate_every=max(recipe.steps // 5, 1),
        seed=seed,
    )
    accuracies = [accuracy(task.model, task.evaluation, task.labels)]
    with open_run(RunStart(options), display=Display(quiet=quiet)) as trainer:
        trainer.run()
    accuracies.append(accuracy(output / MODEL, task.evaluation, task.labels))
    records = read_rows(output / METRICS)
    evaluated = [record["evaluation_loss"] for record in records if "evaluation_loss" in record]
    before, after = (
        TaskScore(*score) for score in zip(accuracies, (evaluated[0], evaluated[-1]), strict=True)
    )
    steps = [record for record in records if "tokens" in record]
    seconds, tokens = (sum(record[key] for record in steps) for key in ("seconds", "tokens"))
    print(
        f"zeroth-order fine-tuning: {len(steps)} steps of two forwards each, no gradient, "
        f"{seconds:.0f} s\n"
        f"  before  accuracy {before.accuracy:6.1%}  loss {before.loss:.3f}\n"
        f"  after   accuracy {after.accuracy:6.1%}  loss {after.loss:.3f}\n"
        f"  speed   {len(steps) / seconds:.1f} steps/s, {tokens / seconds:.0f} tokens/s\n"
        f"  memory  {max(record['rss_bytes'] for record in steps) / 1e6:.0f} MB at most, of the "
        "whole process\n"
        "next, on a model of your own:\n"
        "  zo2 init --model DIR --data FILE\n"
        "  zo2 train recipe.yaml",
        flush=True,
    )
    return before, after


def accuracy(directory: Path, rows: Path, labels: Sequence[str]) -> float:
    """The share of rows of which a model finds the right label the likeliest."""
    from zo2adapters.models.checkpoint import open_checkpoint
    from zo2adapters.tasks.rows import RowReader
    from zo2adapters.tasks.task import TaskOptions, measured
    from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id

    model = open_checkpoint(directory)
    tokenizer = load_tokenizer(directory)
    options = RowOptions(label_column="completion", labels=tuple(labels))
    choices = RowReader(tokenizer, model.longest_row or DEFAULT_LENGTH, options).read(rows)
    with AtStep(model=str(directory)).engine(model) as engine:
        measuring = TaskOptions(tokenizer=tokenizer, pad=pad_token_id(tokenizer), batch_size=16)
        return measured(engine, model, choices, measuring).results["accuracy"]


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """A base model, and a task that was held out from its pre-training."""

    model: Path  # directory in the Hugging Face layout, with a tokenizer
    train: Path  # JSONL file of prompts and completions
    evaluation: Path  # JSONL file of the same form, made from other source files
    labels: tuple[str, ...]  # all possible completions
    parameters: int  # number of the model's parameters
    pretraining_losses: tuple[float, ...]  # loss of each first-order step, in nats per token
    pretraining_seconds: float


def prepare(
    directory: Path, *, seed: int, recipe: Recipe = RECIPE, quiet: bool = False
) -> DemoTask:
    """Make a base model, and a task held out from its pre-training."""
    import torch

    refuse_used(directory)
    files = source_texts(seed=seed)
    texts = pretraining_texts(files, recipe.characters)
    known = "\n".join(texts)
    pairs = recipe.pairs_per_file
    evaluation = question_rows(files, recipe.evaluation_rows, pairs_per_file=pairs, known=known)
    known = "\n".join([known, *(row["prompt"] for row in evaluation)])
    train = question_rows(files, recipe.training_rows, pairs_per_file=pairs, known=known)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(texts, recipe.vocabulary)
    tokenizer.save_pretrained(directory / "base")
    ids = torch.tensor(list(chain.from_iterable(tokenizer(texts, verbose=False)["input_ids"])))
    model = _random_model(len(tokenizer), recipe, seed)
    began = time.perf_counter()
    losses = _pretrain(model, ids, recipe, seed=seed, quiet=quiet)
    model.save_pretrained(directory / "base")
    return DemoTask(
        model=directory / "base",
        train=write_rows(directory / "train.jsonl", train),
        evaluation=write_rows(directory / "evaluation.jsonl", evaluation),
        labels=LABELS,
        parameters=model.num_parameters(),
        pretraining_losses=losses,
        pretraining_seconds=time.perf_counter() - began,
    )


def _train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE without an EOS token: an answer is one token, and the loss of a row is
    that token's.
    """
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts, vocabulary, min_frequency=0, special_tokens=[PAD], show_progress=False
    )
    # transformers does not type this constructor.
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained.to_str()), pad_token=PAD
    )  # type: ignore[no-untyped-call]


def _random_model(vocabulary: int, recipe: Recipe, seed: int) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.hidden * 8 // 3,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        # transformers draws initial weights from the global generator
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            # norms stay at one; the embedding is also the head, where 0.02 gives even odds at first
            scale = 0.02 if name == "model.embed_tokens.weight" else parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, 0.0, scale, generator=generator)
    return model


def _pretrain(
    model: LlamaForCausalLM, ids: torch.Tensor, recipe: Recipe, *, seed: int, quiet: bool
) -> tuple[float, ...]:
    """Take first-order steps on random windows of the tokens, shape (tokens,).

    Returns the loss of each step.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    steps = recipe.pretraining_steps
    lr = LearningRate(
        peak=recipe.pretraining_lr, decay=Decay.COSINE, warmup_steps=steps // 20, steps=steps
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.pretraining_lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    losses: list[float] = []
    for step in LoggedBar("pre-training", iterable=range(steps), disable=quiet):
        optimizer.param_groups[0]["lr"] = lr(step)
        starts = torch.randint(len(ids) - recipe.window, (recipe.windows, 1), generator=generator)
        batch = ids[starts + torch.arange(recipe.window)]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses)


def source_texts(*, seed: int) -> Iterator[str]:
    """Yield the standard library's source files, in an order that depends on the seed, without
    bytes that are not UTF-8.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for directory, children, files in os.walk(root):
        # os.walk then skips the others
        children[:] = [child for child in children if child not in _SKIPPED]
        paths = [
            Path(directory, file)
            for file in files
            if file.endswith(".py") and not file.startswith("_sysconfigdata")
        ]
        # leaves out dangling links
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    order = Random(seed)  # noqa: S311 - the order of files is not a secret
    for name in sorted(sorted(names), key=lambda _: order.random()):
        yield (root / name).read_text(encoding="utf-8", errors="ignore")


def pretraining_texts(files: Iterator[str], characters: int) -> list[str]:
    """Take the text for pre-training from the files, and leave the other files to the task."""
    texts: list[str] = []
    size = 0
    while size < characters:
        text = next(files, None)
        if text is None:
            raise _too_little(f"{size} characters", f"{characters}")
        texts.append(text.replace(QUESTION, "\n")[: characters - size])
        size += len(texts[-1])
    return texts


def question_rows(
    files: Iterator[str], wanted: int, *, pairs_per_file: int, known: str
) -> list[dict[str, str]]:
    """Make rows about lines that are not in a known text, equally many for each label."""
    rows: list[dict[str, str]] = []
    taken: set[str] = set()
    for text in files:
        pairs = zip(
            *(_fresh(lines, taken, known) for lines in docstrings_and_code(text)), strict=False
        )
        for pair in islice(pairs, pairs_per_file):
            rows += [
                {"prompt": line + QUESTION, "completion": label}
                for line, label in zip(pair, LABELS, strict=True)
            ]
            taken.update(pair)
        if len(rows) >= wanted:
            return rows[:wanted]
    raise _too_little(counted(len(rows), "row"), f"{wanted}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    """Write objects as a JSONL file, and return its path."""
    with open(path, "w", encoding="utf-8", opener=open_no_follow) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def _fresh(lines: Sequence[str], taken: set[str], known: str) -> Iterator[str]:
    return (
        line
        for line in dict.fromkeys(lines)
        if len(line) in _LENGTHS and line not in taken and line not in known
    )


def docstrings_and_code(source: str) -> tuple[list[str], list[str]]:
    """The lines of docstrings that start with a letter, and the statements that fill a line."""
    prose: list[str] = []
    code: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # about invalid escapes in strings
            # about the same, before Python 3.12
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template, for example
        return prose, code
    lines = source.split("\n")  # as ast counts them; splitlines would also cut at form feeds
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value if isinstance(node.value.value, str) else ""
            prose += [line.strip() for line in text.splitlines() if line.strip()[:1].isalpha()]
        elif isinstance(node, ast.stmt) and node.lineno == node.end_lineno:
            code.append(
                lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()
            )
    return prose, code


def _too_little(found: str, expected: str) -> DataError:
    remedy = "use a Python installation that includes the source of its standard library"
    return DataError(
        sysconfig.get_path("stdlib"),
        f"{found} in the source files of the standard library",
        expected,
        remedy,
    )
