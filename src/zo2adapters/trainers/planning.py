"""The plan of a run from its rows, and the line that says it before the run."""

from __future__ import annotations

from contextlib import closing

from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.trainers.batch_shapes import RowShapes
from zo2adapters.trainers.methods.choice import method_of
from zo2adapters.trainers.options import RunOptions, TrainOptions
from zo2adapters.trainers.probes import release_probe
from zo2adapters.trainers.run_inputs import RunInputs
from zo2adapters.trainers.run_plan import RunPlan, duration, plan_run
from zo2core import ZO2Error
from zo2core.optimizers import OPTIMIZERS
from zo2core.ranges import counted


def plan_of(inputs: RunInputs) -> RunPlan:
    """The plan of a run from its rows. See ``plan_run``."""
    return plan_run(inputs.options, inputs.model, inputs.shapes())


def plan_of_options(options: TrainOptions, *, has_rows: bool, runs: int | None = None) -> RunPlan:
    """The plan of a run that is not to begin."""
    options.require_valid()
    method_of(options)  # checks the options that depend on neither model nor data
    if has_rows:
        inputs = RunInputs.read(options)
        options, model, shapes = inputs.options, inputs.model, inputs.shapes()
    else:
        model, batching = options.opened(resolve_directory(options.model)), options.batching
        shapes = RowShapes.of_length(batching, batching.length_for(model))._replace(new_tokens=options.rewards.new_tokens)
    with closing(model.weights):
        return plan_run(options, model, shapes, runs=runs)


def planned(inputs: RunInputs) -> RunPlan | None:
    """The plan of a run, whose model must not have an open engine."""
    if inputs.options.storage.device != "cpu":
        return None
    try:
        return plan_of(inputs)
    except ZO2Error:
        return None
    finally:
        release_probe(inputs.model)


def first_line(options: RunOptions, plan: RunPlan) -> str:
    """Method, steps and time of a run."""
    evaluations = f", {counted(plan.evaluations, 'evaluation')}" if plan.evaluations else ""
    return f"{method_words(options)}{evaluations}, about {duration(plan.run_seconds)}."


def method_words(options: RunOptions) -> str:
    """The method, what it trains, and its steps."""
    model, method = options.model_options, options.first_order.method
    adapter = model.adapter_name
    trained = "all parameters" if adapter is None else f"the adapter {adapter}" if model.adapter else adapter
    steps = f"Zeroth-order steps train {trained}" if method is None else f"{OPTIMIZERS[method].title} trains {trained}"
    return f"{steps}: {counted(options.steps, 'step')} of {counted(options.batching.batch_size, 'row')}"
