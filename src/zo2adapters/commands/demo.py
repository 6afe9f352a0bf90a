"""The demo behind ``zo2 demo``: a model made on the spot, then fine-tuned with zeroth-order steps alone.

Nothing is downloaded. The text is what every Python carries, the source of its standard library. Part of it pre-trains a
small Llama with first-order steps; files held out from that give the task: is this line text of a docstring, or code?
MeZO needs such a start: pre-training makes the features that tell the two apart, and zeroth-order steps, which learn little
from scratch, only have to tie them to the answer. What each of the two did is measured apart.
"""

from __future__ import annotations

import ast
import json
import math
import os
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.tasks.rows import collate, pad_token_id, read_dataset
from zo2adapters.trainers.lr_schedules import Decay, LearningRate
from zo2adapters.trainers.options import Batching, Optimization, TrainOptions
from zo2adapters.trainers.trainer import Trainer, load_tokenizer
from zo2core import DataError, ZOEngine
from zo2core.checkpoint import require_unused
from zo2core.sweep.microbatch import labelled_tokens

LABELS = (" a", " b")  # docstring text, code: letters mean nothing yet, so that an untrained answer is a guess
QUESTION = "\nKind:"  # follows the line in question; pre-training never reads it
PAD = "<pad>"

_LENGTHS = range(20, 61)  # characters of a line in question
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "encodings"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and hyperparameters of a demo; the defaults take about two minutes on two cores."""

    vocabulary: int = 1024  # tokens, at least 257
    hidden: int = 96  # width of the residual stream
    layers: int = 3
    heads: int = 3
    characters: int = 4_000_000  # of pre-training text
    window: int = 64  # tokens of a pre-training row
    windows: int = 32  # pre-training rows a step
    pretraining_steps: int = 600  # first-order steps
    pretraining_lr: float = 5e-3  # peak, of AdamW
    training_rows: int = 1536  # even
    evaluation_rows: int = 256  # even
    pairs_per_file: int = 8  # most that one source file gives, so that no file dominates
    steps: int = 3000  # zeroth-order steps
    batching: Batching = field(default_factory=lambda: Batching(batch_size=16))
    # Twice this learning rate diverges: a zeroth-order step moves every weight, so its limit falls as their number grows.
    optimization: Optimization = field(default_factory=lambda: Optimization(lr=3e-4, zo_eps=1e-3, decay=Decay.LINEAR))


RECIPE = Recipe()


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """A base model, and a task that its pre-training has not seen."""

    model: Path  # directory in the Hugging Face layout, with a tokenizer
    train: Path  # JSONL file of prompts and completions
    evaluation: Path  # the same, from other source files
    labels: tuple[str, ...]  # every completion there is
    parameters: int  # of the model
    pretraining_losses: tuple[float, ...]  # of each first-order step, nats a token
    pretraining_seconds: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model answers."""

    accuracy: float  # share of rows whose completion is the likeliest label, 0 to 1
    loss: float  # of the right completions, nats a token


def run_demo(directory: Path, *, seed: int, recipe: Recipe = RECIPE, quiet: bool = False) -> tuple[Score, Score]:
    """Make a model, fine-tune it with zeroth-order steps alone, and print what it learned.

    Args:
        directory: Gets base/, train.jsonl, evaluation.jsonl and run/. Must not exist or be empty.
        seed: Of preparation and training.
        recipe: Sizes and hyperparameters.
        quiet: No progress bars.

    Returns:
        The scores before and after the zeroth-order steps.

    Raises:
        OutputError: if the directory is in use.
        DataError: if this Python lacks the sources of its standard library.
    """
    task = prepare(directory, seed=seed, recipe=recipe, quiet=quiet)
    losses, output = task.pretraining_losses, directory / "run"
    print(
        f"model: Llama, {task.parameters:,} parameters, made from {recipe.characters / 1e6:.1f} MB of Python's own source\n"
        f"  first-order pre-training: {len(losses)} steps of AdamW, loss {losses[0]:.2f} -> {fmean(losses[-20:]):.2f}, "
        f"{task.pretraining_seconds:.0f} s\n"
        "task: is a line docstring text (a) or code (b)? The question is new to the model, and the lines come from files\n"
        f"  that pre-training did not see: {recipe.training_rows} rows to train on, {recipe.evaluation_rows} to evaluate on",
        flush=True,
    )
    options = TrainOptions(
        model=str(task.model),
        data=task.train,
        output=output,
        evaluation=task.evaluation,
        evaluate_every=max(recipe.steps // 5, 1),
        steps=recipe.steps,
        seed=seed,
        batching=recipe.batching,
        optimization=recipe.optimization,
    )
    before = _score(task, recipe, model=task.model)
    with Trainer(options, quiet=quiet) as trainer:
        trainer.run()
    after = _score(task, recipe, model=output / "model")
    steps = [record for record in read_rows(output / "metrics.jsonl") if "tokens" in record]
    seconds, tokens = (sum(record[key] for record in steps) for key in ("seconds", "tokens"))
    print(
        f"zeroth-order fine-tuning: {len(steps)} steps of two forwards each, no gradient, {seconds:.0f} s\n"
        f"  before  accuracy {before.accuracy:6.1%}  loss {before.loss:.3f}\n"
        f"  after   accuracy {after.accuracy:6.1%}  loss {after.loss:.3f}\n"
        f"  speed   {len(steps) / seconds:.1f} steps/s, {tokens / seconds:.0f} tokens/s\n"
        f"  memory  {max(record['rss_bytes'] for record in steps) / 1e6:.0f} MB at most, of the whole process\n"
        "next, on a model of your own:\n"
        "  zo2 verify --model DIR\n"
        "  zo2 train --model DIR --data FILE.jsonl --output DIR",
        flush=True,
    )
    return before, after


def prepare(directory: Path, *, seed: int, recipe: Recipe = RECIPE, quiet: bool = False) -> DemoTask:
    """Make a base model, and a task held out from its pre-training.

    Args:
        directory: Gets base/, train.jsonl and evaluation.jsonl. Must not exist or be empty.
        seed: Of the split into files, the initial weights and the order of the text; global generators are left alone.
        recipe: Sizes and hyperparameters.
        quiet: No progress bar.

    Returns:
        Where model and rows are.

    Raises:
        OutputError: if the directory is in use.
        DataError: if this Python lacks the sources of its standard library.
    """
    require_unused(directory)
    files = source_texts(seed=seed)
    texts = pretraining_texts(files, recipe)
    known = "\n".join(texts)
    evaluation = _rows(files, recipe.evaluation_rows, recipe, known=known)
    train = _rows(files, recipe.training_rows, recipe, known="\n".join([known, *(row["prompt"] for row in evaluation)]))
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
        train=_write_rows(directory / "train.jsonl", train),
        evaluation=_write_rows(directory / "evaluation.jsonl", evaluation),
        labels=LABELS,
        parameters=model.num_parameters(),
        pretraining_losses=losses,
        pretraining_seconds=time.perf_counter() - began,
    )


def source_texts(*, seed: int) -> Iterator[str]:
    """Yield the source files of the standard library, in an order that depends on the seed; bytes not UTF-8 are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for directory, children, files in os.walk(root):
        children[:] = [child for child in children if child not in _SKIPPED]  # prunes the walk
        paths = [Path(directory, file) for file in files if file.endswith(".py") and not file.startswith("_sysconfigdata")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]  # not a link to nowhere
    order = Random(seed)  # noqa: S311 - an order of files is no secret
    for name in sorted(sorted(names), key=lambda _: order.random()):
        yield (root / name).read_text(encoding="utf-8", errors="ignore")


def pretraining_texts(files: Iterator[str], recipe: Recipe) -> list[str]:
    """Take what pre-training reads from the files, and leave the rest to the task."""
    texts: list[str] = []
    size = 0
    while size < recipe.characters:
        text = next(files, None)
        if text is None:
            raise _too_little(f"{size} characters", f"{recipe.characters}")
        texts.append(text.replace(QUESTION, "\n")[: recipe.characters - size])
        size += len(texts[-1])
    return texts


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def accuracy(
    engine: ZOEngine,
    rows: Sequence[Mapping[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    labels: Sequence[str] = LABELS,
    sequence_length: int = 256,
) -> Score:
    """Let the present weights choose a label for each row: the one with the lowest summed loss; a tie counts as wrong.

    Args:
        engine: Whose weights. Every row and label is a batch of its own, so many batches a sweep make this fast.
        rows: Prompts and completions; each completion is one of the labels.
        tokenizer: Of the model.
        labels: The completions to choose from.
        sequence_length: Longest row in tokens.
    """
    candidates = [{"prompt": row["prompt"], "completion": label} for row in rows for label in labels]
    with tempfile.TemporaryDirectory(prefix="zo2-demo-") as scratch:  # read as training rows are, so tokens agree
        path = _write_rows(Path(scratch) / "candidates.jsonl", candidates)
        dataset = read_dataset(path, tokenizer, sequence_length=sequence_length)
    batches = [collate([row], pad_token_id=pad_token_id(tokenizer)) for row in dataset]
    counts = [labelled_tokens(batch) for batch in batches]
    sums = [mean * count for mean, count in zip(engine.evaluate(batches).losses, counts, strict=True)]
    own = [index * len(labels) + list(labels).index(row["completion"]) for index, row in enumerate(rows)]
    right = 0
    for index, mine in enumerate(own):
        others = set(range(index * len(labels), (index + 1) * len(labels))) - {mine}
        right += all(sums[mine] < sums[other] for other in others)
    return Score(accuracy=right / len(rows), loss=math.fsum(sums[i] for i in own) / sum(counts[i] for i in own))


def _score(task: DemoTask, recipe: Recipe, *, model: Path) -> Score:
    rows = read_rows(task.evaluation)
    with ZOEngine(open_checkpoint(model), recipe.optimization.estimator(recipe.steps)) as engine:
        return accuracy(engine, rows, load_tokenizer(task.model), labels=task.labels)


def _rows(files: Iterator[str], wanted: int, recipe: Recipe, *, known: str) -> list[dict[str, str]]:
    """Rows of lines that are not in the known text, as many of each label, from as many files as it takes."""
    rows: list[dict[str, str]] = []
    taken: set[str] = set()
    for text in files:
        pairs = zip(*(_fresh(lines, taken, known) for lines in _lines(text)), strict=False)
        for pair in islice(pairs, recipe.pairs_per_file):
            rows += [{"prompt": line + QUESTION, "completion": label} for line, label in zip(pair, LABELS, strict=True)]
            taken.update(pair)
        if len(rows) >= wanted:
            return rows[:wanted]
    raise _too_little(f"{len(rows)} rows", f"{wanted}")


def _fresh(lines: Sequence[str], taken: set[str], known: str) -> Iterator[str]:
    return (line for line in dict.fromkeys(lines) if len(line) in _LENGTHS and line not in taken and line not in known)


def _lines(source: str) -> tuple[list[str], list[str]]:
    """Lines of docstrings that start with a letter, and statements that fill a line."""
    prose: list[str] = []
    code: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # about the escapes in somebody else's strings
            warnings.simplefilter("ignore", DeprecationWarning)  # the same, before Python 3.12
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # templates and the like
        return prose, code
    lines = source.split("\n")  # as ast counts them; splitlines would also cut at form feeds
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value if isinstance(node.value.value, str) else ""
            prose += [line.strip() for line in text.splitlines() if line.strip()[:1].isalpha()]
        elif isinstance(node, ast.stmt) and node.lineno == node.end_lineno:
            code.append(lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode())
    return prose, code


def _train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE. It has no EOS: an answer is one token, and all of a row's loss is about it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # transformers leaves this constructor untyped
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD)  # type: ignore[no-untyped-call]


def _random_model(vocabulary: int, recipe: Recipe, seed: int) -> LlamaForCausalLM:
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
    with torch.random.fork_rng(devices=[]):  # transformers draws initial weights from the global generator
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:  # norms stay at one; the embedding is the head, too, where 0.02 starts at even odds
            scale = 0.02 if name == "model.embed_tokens.weight" else parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, 0.0, scale, generator=generator)
    return model


def _pretrain(model: LlamaForCausalLM, ids: torch.Tensor, recipe: Recipe, *, seed: int, quiet: bool) -> tuple[float, ...]:
    """First-order steps on random windows of the tokens, (tokens,); returns each step's loss."""
    generator, steps = torch.Generator().manual_seed(seed), recipe.pretraining_steps
    lr = LearningRate(peak=recipe.pretraining_lr, decay=Decay.COSINE, warmup_steps=steps // 20, steps=steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.pretraining_lr, betas=(0.9, 0.95), weight_decay=0.01)
    losses: list[float] = []
    for step in tqdm(range(steps), desc="pre-training", unit="step", disable=quiet, file=sys.stderr, dynamic_ncols=True):
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


def _write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _too_little(found: str, expected: str) -> DataError:
    return DataError(
        sysconfig.get_path("stdlib"),
        found=f"{found} in the source files of the standard library",
        expected=f"{expected}, for the demo to use",
        remedy="use a Python that carries the sources of its standard library",
    )
