"""A benchmark's rows for training, for choosing the best step, and for testing, sampled as in MeZO's experiments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from zo2adapters.optional_package import optional_package
from zo2adapters.tasks.benchmarks import BENCHMARKS, Benchmark
from zo2adapters.tasks.row_source import parsed_rows
from zo2core.errors import DataError, OptionError

Rows = list[dict[str, Any]]

_HELD_OUT = ("validation", "val", "dev", "valid")  # names of the file of labelled rows that are not trained on
_SEPARATOR = "\n\n"  # between demonstrations


class Sizes(NamedTuple):
    """Most rows of each part; the defaults are MeZO's."""

    train: int = 1000
    dev: int = 500
    test: int = 1000


class Parts(NamedTuple):
    """A benchmark's rows."""

    train: Rows
    dev: Rows  # other rows of the training file
    test: Rows  # rows of the held-out file


def benchmark_of(name: str) -> Benchmark:
    """Look up a benchmark by name."""
    if name not in BENCHMARKS:
        raise OptionError("task", found=repr(name), expected=f"one of {', '.join(BENCHMARKS)}", remedy="pass one of these")
    return BENCHMARKS[name]


def benchmark_rows(benchmark: Benchmark, directory: Path | None, sizes: Sizes, *, seed: int) -> Parts:
    """Read a benchmark and sample its parts."""
    training = _questions(benchmark, directory, ("train",))
    held_out = _questions(benchmark, directory, _HELD_OUT)
    count = len(training)
    dev = sizes.dev if sizes.train + sizes.dev <= count else min(sizes.dev, max(count // 4, count - sizes.train))
    order = _sampled(count, f"train {seed}")
    train = order[: min(sizes.train, count - dev)]
    others = order[len(train) : len(train) + dev]
    test = sorted(_sampled(len(held_out), f"test {seed}")[: sizes.test])
    return Parts(
        [training[index] for index in train], [training[index] for index in others], [held_out[index] for index in test]
    )


def with_demonstrations(rows: Sequence[dict[str, Any]], train: Sequence[dict[str, Any]], shots: int) -> Rows:
    """Prefix the prompts of rows with the first training rows and their answers, for in-context learning."""
    if not 1 <= shots <= len(train):
        raise OptionError("shots", found=str(shots), expected=f"1 to {len(train)}", remedy="pass a value in this range")
    demonstrations = "".join(row["prompt"] + _answer(row) + _SEPARATOR for row in train[:shots])
    return [{**row, "prompt": demonstrations + row["prompt"]} for row in rows]


def _answer(row: dict[str, Any]) -> str:
    if "completion" in row:
        return str(row["completion"]).rstrip("\n")
    answer = row["answer"]
    return str(row["candidates"][answer[0] if isinstance(answer, list) else answer])


def _questions(benchmark: Benchmark, directory: Path | None, names: Sequence[str]) -> Rows:
    questions: Rows = []
    for where, row in _rows(benchmark, directory, names):
        try:
            questions += benchmark.questions(row)
        except DataError as error:
            raise DataError(where, found=error.found, expected=error.expected, remedy=error.remedy) from error
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise DataError(
                where,
                found=f"a row that cannot be read ({type(error).__name__}: {error})"[:200],
                expected=f"a row of {benchmark.name}, in the benchmark's own format or that of datasets",
                remedy="download the file again, or pass another task",
            ) from error
    return questions


def _rows(benchmark: Benchmark, directory: Path | None, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each row is, for messages, and the row."""
    if directory is None:
        yield from _rows_of_the_hub(benchmark, names[0])
        return
    paths = [path for name in names if (path := directory / f"{name}.jsonl").exists()]
    if not paths:
        raise DataError(
            directory,
            found=f"no {names[0]}.jsonl",
            expected=f"{benchmark.name} as JSONL, in one of {', '.join(f'{name}.jsonl' for name in names)}",
            remedy="check the directory, or leave it out to download the rows from the hub",
        )
    yield from ((f"{paths[0]}, line {line}", row) for line, row in parsed_rows(paths[0]))


def _rows_of_the_hub(benchmark: Benchmark, split: str) -> Iterable[tuple[str, dict[str, Any]]]:
    path, configuration = benchmark.hub
    load = optional_package("datasets", install="zo2core[data]").load_dataset
    try:
        rows = load(path, configuration, split=split)
    except Exception as error:  # errors of the network, the hub or the data set's own code
        raise DataError(
            f"{path} on the hub",
            found=f"{type(error).__name__}: {error}".splitlines()[0][:200],
            expected=f"its {split} rows",
            remedy="check the network, or pass a directory with the rows as JSONL",
        ) from error
    return ((f"{path}, {split}, row {index}", dict(row)) for index, row in enumerate(rows))


def _sampled(count: int, seed: str) -> list[int]:
    """All indices below a count, in an order that depends on the seed alone."""
    generator = Random(seed)  # noqa: S311 - the order of rows is not a secret
    # Python promises the sequence of random() across its versions.
    return sorted(range(count), key=lambda _: generator.random())
