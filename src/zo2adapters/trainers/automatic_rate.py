"""``--lr auto``: a run's learning rate, chosen by short runs before its first step.

The trials are those of ``zo2 tune``, in a directory within the run's own that is removed once the rate is chosen. They
start from the run's base, with its rows, seed and directions. Their steps are not steps of the run, which is, bit for bit,
the run that is given the chosen rate. If the process is killed, a resumed run continues the trials.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from zo2adapters.trainers.lr_schedules import Decay
from zo2adapters.trainers.methods.choice import method_of
from zo2adapters.trainers.metrics import align_rows
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.planning import first_line, planned
from zo2adapters.trainers.run_directory import (
    CHOICE,
    JOURNAL,
    METRICS,
    TRIALS,
    RunDirectory,
    remove_trials,
    replace_file,
    require_new,
)
from zo2adapters.trainers.run_inputs import RunInputs
from zo2adapters.trainers.run_notices import storage
from zo2adapters.trainers.run_plan import RunPlan, duration
from zo2adapters.trainers.shared_runs import can_share
from zo2adapters.trainers.tuning import Schedule, Trial, least_forwards, planned_rounds, tune
from zo2core import Journal
from zo2core.errors import DivergenceError
from zo2core.io.durable import read_regular
from zo2core.ranges import counted

_SHARE = 0.2  # of the run's forward passes that the trials may take; fewer trials run if all do not fit


def with_chosen_rate(
    options: TrainOptions, *, resume: bool, announce: Callable[[str], object] = lambda line: None, quiet: bool = True
) -> TrainOptions:
    """Choose a run's learning rate, and save the run with it. ``Trainer(..., resume=True)`` then takes its steps."""
    options.require_valid()
    method_of(options)  # checks the options that depend on neither model nor data
    if not resume:
        require_new(options.output)
    inputs = RunInputs.read(options)
    options, plan = inputs.options, planned(inputs)
    with RunDirectory(options, inputs.tokens(), resume=resume) as run:
        if resume:
            run.require_same_base(options, inputs.model)
        inputs.model.weights.close()
        trials = _trials(options)
        try:
            best, ranking = _tuned(
                trials, lambda schedule: [announce(line) for line in _cost(inputs, plan, schedule)], quiet=quiet
            )
        except DivergenceError as error:
            raise _all_diverged(error, options) from error
        except BaseException:
            if not (resume or any(trials.output.glob("*/"))):
                shutil.rmtree(trials.output, ignore_errors=True)
                run.remove()
            raise
        replace_file(options.output / CHOICE, json.dumps({"lr": best.lr, "trials": ranking}, indent=2) + "\n")
        chosen = options.with_rate(best.lr)
        run.save(chosen)
        remove_trials(options.output)
    for line in _choice(best, ranking):
        announce(line)
    return chosen


def _trials(options: TrainOptions) -> TrainOptions:
    """Options of the trials: those of the run at a constant rate, without evaluations, samples and trackers."""
    optimization = replace(options.optimization, lr=type(options.optimization).lr, decay=Decay.CONSTANT, warmup_steps=0)
    trials = replace(
        options,
        evaluation=None,
        evaluate_every=None,
        keep_best=False,
        samples=0,
        report_to="none",
        optimization=optimization,
    )
    digest = zlib.crc32(json.dumps(trials.to_json(), sort_keys=True).encode())
    return replace(trials, output=options.output / f"{TRIALS}{digest:08x}")


def _tuned(
    options: TrainOptions, before: Callable[[Schedule], object], *, quiet: bool
) -> tuple[Trial, list[dict[str, Any]]]:
    """The best trial, and the results of all trials, the best one first."""
    rates, budget, forwards = _search(options)
    ranking: Sequence[Trial] = ()

    def after_round(trials: Sequence[Trial]) -> None:
        nonlocal ranking
        ranking = trials

    best = tune(
        options,
        forwards=budget,
        learning_rates=rates,
        continues=False,
        before=before,
        after_round=after_round,
        quiet=quiet,
    )
    return best, [_result(trial, forwards) for trial in ranking]


def _search(options: TrainOptions) -> tuple[Sequence[float], int, int]:
    """The rates to try, the forward passes of all trials together, and the forward passes of a step."""
    method = method_of(options)
    rates, forwards = method.learning_rates, method.forwards
    budget = round(_SHARE * options.steps * forwards)
    if least_forwards(len(rates), forwards, continues=False) > budget:
        rates = method.few_learning_rates
    return rates, max(budget, least_forwards(len(rates), forwards, continues=False)), forwards


def schedule_of(options: TrainOptions) -> tuple[Sequence[float], Schedule]:
    """The rates that a run with this number of steps tries, and the steps of its trials."""
    rates, budget, forwards = _search(options)
    return rates, Schedule(len(rates), tuple(planned_rounds(len(rates), budget, forwards, continues=False)), forwards)


def _result(trial: Trial, forwards: int) -> dict[str, Any]:
    """A trial's result, with the loss of each step, as JSON values."""
    with closing(Journal(trial.directory / JOURNAL)) as journal:
        try:
            raw = read_regular(trial.directory / METRICS)
        except OSError:
            raw = b""
        rows = [row for row in align_rows(raw, journal).rows if "loss" in row]
    return {
        "lr": trial.lr,
        "steps": len(rows),
        "forwards": len(rows) * forwards,
        "seconds": sum(row.get("seconds", 0.0) for row in rows),
        "loss": trial.row["loss"],
        "losses": [row["loss"] for row in rows],
    }


def _cost(inputs: RunInputs, plan: RunPlan | None, schedule: Schedule) -> list[str]:
    """Lines about the time and memory of the run and its trials."""
    options = inputs.options
    trials = (
        f"Learning rate: {schedule.trials} rates are tried first, in short runs of up to {schedule.rounds[-1]} steps: "
        f"{schedule.steps} steps, {schedule.forwards} forward passes of {counted(options.batching.batch_size, 'row')}"
    )
    together = " They share the model and run together, as far as memory allows." if can_share(options) else ""
    if plan is None:
        return [f"{trials}.{together}"]
    seconds = schedule.steps * plan.seconds
    writes = method_of(options).writes(plan.write_back_every, inputs.model, plan.host_plan)
    memory = storage(plan.host_plan, None, options.storage, writes)
    total = f"about {duration(seconds + plan.run_seconds)} in all"
    return [f"{first_line(options, plan)} {memory}", f"{trials}, about {duration(seconds)}; {total}.{together}"]


def _choice(best: Trial, ranking: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines about the chosen rate and the results of all trials."""
    losses = ", ".join(
        f"{trial['lr']:g}: {'diverged' if trial['loss'] is None else format(trial['loss'], '.4f')}"
        for trial in sorted(ranking, key=lambda trial: trial["lr"])
    )
    lines = [f"Learning rate: {best.lr:g} (mean loss of each trial's last steps: {losses})"]
    if len(ranking) > 1 and best.lr == max(trial["lr"] for trial in ranking):
        lines.append("The largest rate that was tried is the best one; zo2 tune --learning-rates tries larger ones.")
    return lines


def _all_diverged(error: DivergenceError, options: TrainOptions) -> DivergenceError:
    return DivergenceError(
        "lr",
        found=error.found,
        expected=error.expected,
        remedy=f"remove {options.output}, and pass a smaller --lr, or better rows",
        best_step=0,
    )
