"""The tables of accuracy: ZO2's of MeZO and this engine (arXiv 2503.12668), and P-RGE's Tables 1
and 2 (arXiv 2409.15520).

A line of a table is a set of options of ``zo2 train`` and a grid of learning rates. The figures of
the papers are in ``accuracy.csv``.
"""

import csv
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from measuring import zo2

from zo2adapters.tasks.benchmarks import BENCHMARKS
from zo2adapters.trainers.metrics import best_step
from zo2core import Journal
from zo2core.errors import OptionError

RESULT = "result.json"  # of a line on a task
PARTS = ("train", "dev", "test")
EFFECTIVE_ROWS = 16  # of a zeroth-order step of P-RGE, q times the batch size
F1_TASKS = {"squad", "drop"}


class Line(NamedTuple):
    """A line of a table: what is trained, and over which grid the best is chosen."""

    options: str  # of zo2 train
    lrs: Sequence[float]  # learning rates
    steps: int
    every: int  # steps between two evaluations
    lrs_of: Mapping[str, Sequence[float]] = {}  # those of some tasks
    queries: Sequence[int] = (1,)  # directions; each shares the rows of a step

    def grid(self, task: str) -> list[tuple[float, int]]:
        """Learning rates and queries that are tried on a task."""
        return [(lr, q) for q in self.queries for lr in self.lrs_of.get(task, self.lrs)]


class Accuracies(NamedTuple):
    """A table of accuracies."""

    title: str
    model: str  # on the hub
    lines: Mapping[str, Line]


# The paper does not name the layers that get an adapter: these are the usual ones.
_LORA_FA = "--lora-rank 16 --lora-alpha 16 --lora-targets q_proj v_proj --adapter-frozen lora_A"
_ZEROTH = "--method zeroth-order --noise gaussian --no-guard"


def _of_prge(full: Mapping[str, Sequence[float]], fa: Line) -> dict[str, Line]:
    """The lines of P-RGE, with the learning rates of some tasks and the zeroth-order LoRA-FA."""
    first = "--batch-size 8"
    zeroth = f"{_ZEROTH} --zo-eps 1e-3 --batch-size {EFFECTIVE_ROWS}"
    return {
        "FO-Full": Line(f"--method adamw {first}", (1e-5, 5e-5, 8e-5), 1000, 100, full),
        "FO-LoRA-FA": Line(f"--method lora {first} {_LORA_FA}", (1e-4, 3e-4, 5e-4), 1000, 100),
        "ZO-Full (q=1)": Line(zeroth, (1e-7, 5e-7, 1e-6), 20_000, 100),
        "ZO-LoRA-FA (q=1)": fa,
        "ZO-LoRA-FA (q>1)": fa._replace(queries=(2, 4, 8, 16)),
    }


def _lora_fa(lrs: Sequence[float], tasks: str, of_tasks: Sequence[float]) -> Line:
    options = f"{_ZEROTH} --zo-eps 1e-2 {_LORA_FA}"
    return Line(options, lrs, 20_000, 100, dict.fromkeys(tasks.split(), of_tasks))


# MeZO's program gives no grid for ZO2; this one is MeZO's (arXiv 2305.17333, Table 16).
_MEZO = "--method mezo --zo-eps 1e-3 --batch-size 16 --no-guard"
TABLES: Mapping[str, Accuracies] = {
    "zo2": Accuracies(
        "ZO2, accuracy of OPT-13B",
        "facebook/opt-13b",
        {"ZO2": Line(_MEZO, (1e-6, 1e-7), 20_000, 4000)},
    ),
    "p-rge-1": Accuracies(
        "P-RGE, Table 1: TinyLlama-1.1B",
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        _of_prge({}, _lora_fa((1e-5, 5e-5, 1e-4, 5e-4), "sst2", (1e-3, 5e-3, 1e-4, 5e-4))),
    ),
    "p-rge-2": Accuracies(
        "P-RGE, Table 2: Llama2-7B",
        "meta-llama/Llama-2-7b-hf",
        _of_prge(
            {"squad": (1e-7, 5e-7, 8e-7)},
            _lora_fa((1e-4, 5e-4, 1e-3, 5e-3), "rte multirc winogrande", (1e-5, 5e-5, 1e-4, 5e-4)),
        ),
    ),
}


def _printed() -> dict[str, dict[str, dict[str, float]]]:
    """The papers' figures, by table, line and task."""
    printed: dict[str, dict[str, dict[str, float]]] = {}
    with Path(__file__).with_name("accuracy.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            cells = {task: float(row[task]) for task in BENCHMARKS if row.get(task)}
            printed.setdefault(row["table"], {})[row["line"]] = cells
    return printed


PRINTED = _printed()


def accuracy(
    table: Annotated[str, list(TABLES)],
    runs: Annotated[Path, "folder of the runs: what is missing in it is run, or goes on"],
    *,
    model: Annotated[str | None, "by default the paper's, from the hub"] = None,
    data: Annotated[
        Path | None, "directory with one of each task's name and files; by default from the hub"
    ] = None,
    tasks: Annotated[Sequence[str] | None, list(BENCHMARKS), "by default the table's"] = None,
    lines: Annotated[Sequence[str] | None, "by default all of the table"] = None,
    rates: Annotated[Sequence[float], "learning rates instead of the papers' grids"] = (),
    queries: Annotated[Sequence[int], "directions instead of the papers' for q>1"] = (),
    steps: Annotated[int | None, "steps of each run; by default the paper's"] = None,
    rows: Annotated[Sequence[int], "rows to train on, to choose with and to test on"] = (
        *(1000, 500, 1000),
    ),
    seed: int = 0,
    more: Annotated[str, "options for each run, such as '--device cuda --dtype float16'"] = "",
) -> dict[str, Any]:
    """Run a table of accuracies, and print it beside the paper's figures.

        python tools/bench.py accuracy p-rge-1 runs --more "--device cuda"
        python tools/bench.py accuracy zo2 runs --more "--device cuda --dtype float16"

    For each line and task each learning rate of the paper's grid is tried. The one with the best
    accuracy on the rows to choose with is scored on those to test on, at its best step. A run that
    was stopped goes on, and finished ones are kept, so the program can be started again. The line
    *MeZO* of ZO2's table is not run: `zo2 verify --model MODEL` shows that the bits are this
    engine's. What was not run is null in the JSON, and '-' in the table.
    """
    chosen = TABLES[table]
    printed = PRINTED[table]
    of_table = [task for task in BENCHMARKS if any(task in cells for cells in printed.values())]
    wanted = list(chosen.lines) if lines is None else list(lines)
    if unknown := [name for name in wanted if name not in chosen.lines]:
        raise OptionError("lines", unknown[0], ", ".join(chosen.lines), "pass one of these")
    runner = _Runner(model or chosen.model, data, runs, seed, tuple(rows), more)
    measured: dict[str, dict[str, Any]] = {name: {} for name in ("Zero-shot", *chosen.lines)}
    for task in of_table if tasks is None else tasks:
        for name in wanted:
            line = chosen.lines[name]
            line = line._replace(
                steps=steps or line.steps,
                every=min(line.every, steps or line.every),
                lrs=rates or line.lrs,
                lrs_of={} if rates else line.lrs_of,
                queries=(queries or line.queries) if len(line.queries) > 1 else line.queries,
            )
            result = runner.best(task, name, line)
            measured[name][task] = result
            measured["Zero-shot"][task] = {"score": result["zero_shot"]}
    return {
        "table": table,
        "model": runner.model,
        "not run": _not_run(table, of_table, measured),
        "results": measured,
        chosen.title: dict(_cells(of_table, measured, printed)),
    }


class _Runner(NamedTuple):
    """Runs lines on tasks."""

    model: str
    data: Path | None
    folder: Path
    seed: int
    rows: tuple[int, ...]  # to train on, to choose with, to test on
    more: str

    def best(self, task: str, name: str, line: Line) -> dict[str, Any]:
        """The score of a line on a task, with the rate that was best."""
        folder = self.folder / task / re.sub(r"\W+", "-", name).strip("-").lower()
        result = folder / RESULT
        key = {"grid": line.grid(task), "options": line.options, "steps": line.steps}
        key |= {"seed": self.seed, "rows": self.rows, "more": self.more, "model": self.model}
        key = json.loads(json.dumps(key))
        if result.exists():
            known: dict[str, Any] = json.loads(result.read_text())
            if known["key"] == key:
                return known
        rows = self._written_rows(task)
        tried = [(self._trained(folder, rows, line, lr, q), lr, q) for lr, q in line.grid(task)]
        run, lr, q = max(tried, key=lambda one: _score_of_choice(one[0], task))
        zero_shot, score = _scores(zo2("evaluate", "--run", run, "--data", rows / "test.jsonl"))
        found = {"score": score, "zero_shot": zero_shot, "lr": lr, "queries": q, "run": str(run)}
        result.write_text(json.dumps({**found, "key": key}))
        return {**found, "key": key}

    def _written_rows(self, task: str) -> Path:
        """The task's rows, which are written once."""
        folder = self.folder / task / "rows"
        if not folder.exists():
            of_data = () if self.data is None else ("--data", self.data / task)
            sizes = [
                word
                for part, size in zip(PARTS, self.rows, strict=True)
                for word in (f"--{part}-rows", size)
            ]
            zo2("rows", "--task", task, *of_data, "--output", folder, "--seed", self.seed, *sizes)
        return folder

    def _trained(self, folder: Path, rows: Path, line: Line, lr: float, q: int) -> Path:
        """A finished run: begun, or gone on with where it was stopped."""
        run = folder / f"lr{lr:g}-q{q}"
        if (run / "model").exists():
            return run
        if (run / "options.json").exists():
            zo2("train", "--resume", run)
            return run
        of_queries = [] if q == 1 else ["--queries", q]
        if "--batch-size" not in line.options:
            of_queries += ["--batch-size", max(EFFECTIVE_ROWS // q, 1)]
        zo2(
            *("train", "--model", self.model, "--output", run, "--lr", lr, "--seed", self.seed),
            *("--data", rows / "train.jsonl", "--evaluation", rows / "dev.jsonl", "--keep-best"),
            *("--steps", line.steps, "--evaluate-every", line.every),
            *(*shlex.split(line.options), *of_queries, *shlex.split(self.more)),
        )
        return run


def _score_of_choice(run: Path, task: str) -> float:
    """The best result of a run on the rows to choose with."""
    with closing(Journal(run / "journal.jsonl")) as journal:
        evaluations = journal.evaluations
    best = best_step(evaluations)
    assert best is not None, "each run is evaluated"
    results = evaluations[best]
    name = "f1" if task in F1_TASKS else "accuracy"
    return float(results.get(name, -results["loss"]))


def _scores(printed: str) -> tuple[float, float]:
    """Percent before and after training, from what ``zo2 evaluate`` prints of a run."""
    for name in ("f1", "accuracy"):
        found = re.search(rf"^{name}\s+([\d.]+)%.*?\s([\d.]+)%", printed, re.MULTILINE | re.I)
        if found is not None:
            return float(found[1]), float(found[2])
    raise SystemExit(f"no accuracy in what zo2 evaluate printed:\n{printed}")


def _not_run(
    table: str, tasks: Sequence[str], measured: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """The cells of the paper that were not run, as text."""
    return [
        f"{line}, {task}"
        for line, cells in PRINTED[table].items()
        for task in tasks
        if task in cells and task not in measured.get(line, {})
    ]


def _cells(
    tasks: Sequence[str],
    measured: Mapping[str, Mapping[str, Any]],
    printed: Mapping[str, Mapping[str, float]],
) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield the lines of the table: each with its measured and its printed figures."""
    for line in dict.fromkeys([*printed, *measured]):
        cells: dict[str, Any] = {}
        for task in tasks:
            cells[task] = measured.get(line, {}).get(task, {}).get("score")
            cells[f"paper's {task}"] = printed.get(line, {}).get(task)
        yield line, cells
