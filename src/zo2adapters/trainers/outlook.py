"""The expected time and memory of a run, and of the same run by the other method, for the lines before the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from zo2adapters.tasks.registry import is_differentiable
from zo2adapters.trainers.adapter_options import AdapterOptions
from zo2adapters.trainers.first_order import FirstOrder
from zo2adapters.trainers.first_order_plan import plan_first_order_run
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Storage
from zo2adapters.trainers.run_inputs import RunInputs
from zo2adapters.trainers.run_plan import RunPlan, duration, plan_run, release_probe
from zo2core import WriteBackPolicy, ZO2Error
from zo2core.errors import MemoryBudgetError
from zo2core.optimizers import OPTIMIZERS, OptimizerName
from zo2core.types import shown_bytes

LORA_RANK = 8  # of the adapter that a run of first-order steps is planned with
_COMPARED_FROM = 10.0  # seconds of a run; shorter ones need no advice on their cost
_CLEARLY_LESS = 0.8  # share of a first-order run's memory below which zeroth-order steps are worth a line


class Outlook(NamedTuple):
    """The expected time and memory of a run. All numbers are those of plans."""

    plan: RunPlan
    summary: str  # method, steps and time
    alternative: str | None  # time and memory of the other method, in words; None: the comparison does not help

    def lines(self, storage: str) -> list[str]:
        """Lines to print before the run.

        Args:
            storage: What the run uses of memory and disk, in words.
        """
        return [f"{self.summary} {storage}", *([] if self.alternative is None else [self.alternative])]


def plan_of(inputs: RunInputs) -> RunPlan:
    """Plan a run on the CPU. Nothing is loaded; the probes take a few seconds.

    Raises:
        ZO2Error: of the kind that fits, if no plan fits.
    """
    options = inputs.options
    given: Any = {
        "memory": options.storage.memory,
        "steps": options.steps,
        "evaluations": options.evaluations(options.steps),
    }
    chosen = options.first_order
    if chosen.method is not None:
        update = None
        if not options.model_options.trains_adapter:
            update = chosen.block_update(weight_decay=options.optimization.weight_decay)
            given["measures"] = chosen.measures_gradients
        given |= {"update": update, "scratch": options.output, "streams": chosen.stream_blocks}
        given["commit_every"] = options.storage.snapshot_every or 1
        given["write_limit_tb"] = options.storage.write_limit_tb
        return plan_first_order_run(inputs.model, inputs.shapes(), **given)
    return plan_run(
        inputs.model,
        inputs.shapes(),
        replace(options.optimization, lr=Optimization().lr, warmup_steps=0),  # which no cost depends on
        write_back=WriteBackPolicy(directory=options.output, terabytes_per_1000_steps=options.storage.write_limit_tb),
        **given,
    )


def outlook_of(inputs: RunInputs) -> Outlook | None:
    """Plan a run, and the same run by the other method.

    Args:
        inputs: Model and rows of the run. The model must not have an open engine.

    Returns:
        The outlook; None for a run on a GPU, whose time is not predicted, and if no plan fits, which the engine reports.
    """
    options = inputs.options
    if options.storage.device != "cpu":
        return None
    try:
        plan = plan_of(inputs)
    except ZO2Error:
        return None
    finally:
        release_probe(inputs.model)
    evaluations = f", {plan.evaluations} evaluations" if plan.evaluations else ""
    rows = options.batching.batch_size
    method = method_words(options.model_options, options.first_order.method)
    summary = f"{method}: {options.steps} steps of {rows} rows{evaluations}, about {duration(plan.run_seconds)}."
    return Outlook(plan, summary, _alternative(inputs, plan) if plan.run_seconds >= _COMPARED_FROM else None)


def method_words(options: AdapterOptions, method: OptimizerName | None) -> str:
    """The method and what it trains, as the beginning of a sentence."""
    adapter = options.adapter_name
    trained = "all parameters" if adapter is None else f"the adapter {adapter}" if options.adapter else adapter
    if method is not None:
        return f"{OPTIMIZERS[method].title} trains {trained}"
    return f"Zeroth-order steps train {trained}"


def _alternative(inputs: RunInputs, plan: RunPlan) -> str | None:
    return _with_gradients(inputs, plan) if inputs.options.first_order.method is None else _without_gradients(inputs, plan)


def _with_gradients(inputs: RunInputs, plan: RunPlan) -> str | None:
    """Time and memory of a first-order run instead of this one, in words; None if model or objective do not allow one."""
    options = inputs.options
    if not is_differentiable(options.objective, inputs.data.format):
        return None
    command = "--method adamw"
    if not options.model_options.trains_adapter:
        model_options = replace(options.model_options, lora_rank=LORA_RANK, precision="auto", dtype="auto")
        options = replace(options, model_options=model_options)
        command = f"{command} --lora-rank {LORA_RANK}"
    options = replace(
        options,
        first_order=FirstOrder(method="adamw"),
        optimization=Optimization(lr="auto"),
        storage=Storage(memory=options.storage.memory),
    )
    try:
        other = plan_of(inputs.reopened(options))
    except MemoryBudgetError:
        return f"Steps by gradients ({command}) would not fit in memory."
    except ZO2Error:  # no peft, or a model that it has no adapter for
        return None
    return (
        f"By gradients ({command} --lr auto) a step would take about {duration(other.seconds)} instead of "
        f"{duration(plan.seconds)}, and the run {shown_bytes(other.host_plan.nbytes)} instead of "
        f"{shown_bytes(plan.host_plan.nbytes)} of memory; it usually needs far fewer steps."
    )


def _without_gradients(inputs: RunInputs, plan: RunPlan) -> str | None:
    """Time and memory of zeroth-order steps instead of these, in words; None if they need about as much memory."""
    options = replace(inputs.options, first_order=FirstOrder(), optimization=Optimization())
    try:
        other = plan_of(inputs.reopened(options))
    except ZO2Error:
        return None
    if other.host_plan.nbytes > _CLEARLY_LESS * plan.host_plan.nbytes:
        return None
    return (
        f"Zeroth-order steps (without --method) would take {shown_bytes(other.host_plan.nbytes)} instead of "
        f"{shown_bytes(plan.host_plan.nbytes)} of memory and about {duration(other.seconds)} instead of "
        f"{duration(plan.seconds)} each, but usually hundreds of them are needed."
    )
