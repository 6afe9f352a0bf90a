"""``zo2 journal``: print what happened in a run, step by step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from zo2adapters.commands.run_journal import read_journal
from zo2adapters.trainers.run_directory import JOURNAL
from zo2core import Journal
from zo2core.checkpoint import Snapshots
from zo2core.ranges import require_whole


@dataclass(frozen=True, kw_only=True)
class ShowJournal:
    """Print what happened in a run, step by step."""

    run_directory: tyro.conf.Positional[Path]
    """Directory of the run."""
    last: int | None = None
    """Number of steps to print, counted from the end; by default all."""

    def run(self) -> None:
        """Print the journal's header and steps."""
        if self.last is not None:
            require_whole("last", self.last, 1)
        journal = read_journal(self.run_directory / JOURNAL)
        assert journal.header is not None, "read_journal refuses a journal without a header"
        for key, value in journal.header.items():
            print(f"{key:12s} {json.dumps(value)}")
        if not journal.is_replayable:
            self._print_commits(journal)
            return
        updates = journal.updates if self.last is None else journal.updates[-self.last :]
        print(f"{len(journal.updates)} steps\n{'step':>8s} {'loss':>12s} {'projected grad':>16s} {'lr':>10s}  seeds")
        for update in updates:
            grads = " ".join(f"{grad:16.6g}" for grad in update.projected_grads)
            seeds = " ".join(str(seed) for seed in update.seeds)
            print(f"{update.step:8d} {update.losses[0]:12.6f} {grads} {update.lr:10.3g}  {seeds}")

    def _print_commits(self, journal: Journal) -> None:
        """Print the steps of a first-order run, and mark those that have a snapshot."""
        snapshots = set(Snapshots(self.run_directory, journal.chain, journal.require_version).steps)
        commits = journal.commits if self.last is None else journal.commits[-self.last :]
        print(f"{journal.version} steps\n{'step':>8s} {'loss':>12s} {'gradient norm':>16s} {'lr':>10s}")
        for commit in commits:
            mark = f"  snapshot of step {commit.step + 1}" if commit.step + 1 in snapshots else ""
            print(f"{commit.step:8d} {commit.loss:12.6f} {commit.grad_norm:16.6g} {commit.lr:10.3g}{mark}")
