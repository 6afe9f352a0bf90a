"""``zo2 journal``: print what happened in a run, step by step; and read a run's journal, whose end
may be missing.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from zo2adapters.commands.options import POSITIONAL, Command
from zo2adapters.trainers.metrics import align_rows
from zo2adapters.trainers.optimization import with_peak_rates
from zo2adapters.trainers.run_directory import JOURNAL, METRICS, OPTIONS, RunDirectory
from zo2core.errors import JournalError
from zo2core.ranges import counted, require_whole

if TYPE_CHECKING:
    from zo2core import Journal


def read_journal(path: Path, *, run: Path | None = None, step: int | None = None) -> Journal:
    """Open a journal for reading, and print a line if its last record is damaged or was not written
    whole.
    """
    from zo2core import Journal

    # before the journal, which a running process writes first
    raw = b"" if run is None else RunDirectory(run).metrics()
    journal = Journal(path)
    journal.close()
    if journal.header is None:
        raise _no_journal(path)
    steps = journal.version
    if step is None or step > steps:
        align_rows(raw, journal).require_whole(journal, METRICS)
        if journal.torn:
            ignored = "the last record is damaged or incomplete and is ignored"
            print(f"{path}: {ignored}; the run has {counted(steps, 'step')}", file=sys.stderr)
    return journal


def require_journal(path: Path) -> None:
    """Refuse the path of no journal, before torch is imported."""
    if not path.exists():
        raise _no_journal(path)


def _no_journal(path: Path) -> JournalError:
    """The error for a journal that is not there, or has no record."""
    found = "no journal"
    expected = "a run's journal.jsonl"
    remedy = "check the path"
    if (path.parent / OPTIONS).exists():
        found, expected = (
            "no record: the process ended before the run's first step",
            "a run that has begun",
        )
        remedy = f"continue it with zo2 train --resume {path.parent}"
    return JournalError(path, found, expected, remedy)


# of a header's keys; others are their own title
_TITLES = {"base": "base fingerprint", "parameters": "parameters sha256"}
_CONFIG = (
    "model_type",
    "num_hidden_layers",
    "n_layer",
    "hidden_size",
    "n_embd",
    "d_model",
    "vocab_size",
    "attention",
)
_WIDTH = 110  # columns of a value


@dataclass(frozen=True, kw_only=True)
class ShowJournal(Command):
    """Print what happened in a run, step by step."""

    run_directory: Annotated[Path, POSITIONAL]
    """Directory of the run."""
    last: int | None = None
    """Number of steps to print, counted from the end; by default all."""

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        if self.last is not None:
            require_whole("last", self.last, 1)
        require_journal(self.run_directory / JOURNAL)

    def run(self) -> None:
        """Print what identifies the run, and its steps."""
        journal = read_journal(self.run_directory / JOURNAL)
        assert journal.header is not None, "read_journal refuses a journal without a header"
        for line in _header_lines(journal.header):
            print(line)
        if not journal.is_replayable:
            self._print_commits(journal)
            return
        self._print_head(len(journal.updates), "projected grad", "  seeds")
        for update in journal.updates[-(self.last or 0) :]:
            grads = " ".join(f"{grad:16.6g}" for grad in update.projected_grads)
            seeds = " ".join(str(seed) for seed in update.seeds)
            print(f"{update.step:8d} {update.losses[0]:12.6f} {grads} {update.lr:10.3g}  {seeds}")

    def _print_head(self, steps: int, scalar: str, more: str = "") -> None:
        """Print the number of steps, and what stands in the columns below."""
        print(
            f"{counted(steps, 'step')}\n{'step':>8s} {'loss':>12s} {scalar:>16s} {'lr':>10s}{more}"
        )

    def _print_commits(self, journal: Journal) -> None:
        """Print the steps of a first-order run, and mark those that have a snapshot."""
        snapshots = set(RunDirectory(self.run_directory).snapshots(journal).steps)
        self._print_head(journal.version, "gradient norm")
        for commit in journal.commits[-(self.last or 0) :]:
            mark = f"  snapshot of step {commit.step + 1}" if commit.step + 1 in snapshots else ""
            print(
                f"{commit.step:8d} {commit.loss:12.6f} {commit.grad_norm:16.6g} "
                f"{commit.lr:10.3g}{mark}"
            )


def _header_lines(header: Mapping[str, Any]) -> Iterator[str]:
    """What a journal's header says of its run: a title and a value, which may take several
    lines.
    """
    rows = {
        printable(title): _words(value) for title, value in _titled(header) if value is not None
    }
    width = max(map(len, rows))
    for title, text in rows.items():
        for line in textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False):
            yield f"{title:{width}s}  {line}"
            title = ""


def _titled(header: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a header that tell a reader something, by title."""
    left = {key: value for key, value in header.items() if key != "format"}
    optimizer = left.pop("method", None)
    estimator = left.pop("estimator", None)
    if optimizer or estimator:
        yield (
            "method",
            f"{'first' if optimizer else 'zeroth'}-order steps, "
            f"{_words(with_peak_rates(optimizer or estimator))}",
        )
    if directions := left.pop("perturbation", None):
        yield (
            "directions",
            f"low rank, {_words({key: directions[key] for key in directions if key != 'kind'})}",
        )
    if config := left.pop("model", None):
        text = config.get("text_config")
        config = {**(text if isinstance(text, dict) else {}), **config}
        yield "model", {key: config[key] for key in _CONFIG if key in config}
    provenance = left.pop("provenance", {})
    for key, value in left.items():
        yield _TITLES.get(key, key), value
    yield from provenance.items()


def _words(value: object) -> str:
    """A JSON value as a reader would write it, without what is null or false."""
    if isinstance(value, dict):
        return ", ".join(
            _named(key, item)
            for key, item in value.items()
            if item is not None and item is not False
        )
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def _named(name: str, value: object) -> str:
    """An entry of an object: its name and its value; the value alone where that is a name
    itself.
    """
    if name == "name":
        return _words(value)
    if value is True:
        return printable(name)
    text = f"({_words(value)})" if isinstance(value, (dict, list)) else _words(value)
    return f"{printable(name)} {text}"


def printable(text: str) -> str:
    """Replace characters that would do something to a terminal or a page, and bytes that are not
    UTF-8.
    """
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


HEAD = "<!doctype html>\n<!-- zo2 report -->\n"  # with which the page of a report begins
