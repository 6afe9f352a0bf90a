"""A first recipe for a model and its data: what to choose for each option, and why."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import yaml

from zo2adapters.models.architecture import product_seconds
from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.option_tree import ZEROTH_ORDER, leaves, plain
from zo2adapters.tasks.registry import AUTO, MODEL_LOSS, is_differentiable, names_model_loss
from zo2adapters.tasks.row_options import RowFormat, Survey, survey
from zo2adapters.tasks.rows import RowReader, Rows
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2adapters.trainers.methods import method_of
from zo2adapters.trainers.optimization import Decay, Optimization
from zo2adapters.trainers.options import DEFAULT_LENGTH, EVERY, LORA_RANK, TrainOptions
from zo2adapters.trainers.probes import hands_over_tensors, require_packable
from zo2adapters.trainers.recipe import OPTIONS
from zo2adapters.trainers.run_inputs import RunInputs, RunStart, dtype_name
from zo2adapters.trainers.run_plan import RunPlan, duration, plan_of, told_line
from zo2adapters.trainers.tuning import schedule_of
from zo2core import ZO2Error
from zo2core.errors import MemoryBudgetError, MissingPackageError, UnsupportedModelError
from zo2core.planning.memory import free_memory
from zo2core.ranges import counted, parse_size
from zo2core.types import shown_bytes

_ROW_OPTIONS = (
    "prompt_template",
    "text_column",
    "prompt_column",
    "completion_column",
    "label_column",
    "messages_column",
)
_BATCH = 16  # rows
# rows that run at a time, of which the first that fits is chosen
_MICRO_BATCHES = (None, 8, 4, 2, 1)
_ACTIVATIONS = 0.25  # share of the memory that activations may take
_ZEROTH_ORDER_STEPS = 1000
# of a first-order run
_EPOCHS = 3
_FEWEST_STEPS = 50
_MOST_STEPS = 2000
_LONGEST_RUN = 4 * 3600.0  # seconds above which one epoch is enough to begin with
_LONGEST_ROW = 4096  # tokens; longer rows are cut before lengths are measured
_UNCUT = 256  # tokens of rows that are too short to be worth cutting
_TYPICAL = 0.99  # share of the rows that are not cut
_ROUNDED_TO = 16  # tokens
_PADDED = 0.25  # least share of padding for which packed rows are tried: their mask hides more
_FASTER = 0.9  # most share of the padded rows' seconds
_FEWEST_ROWS = 20  # least rows of a file from which rows are held out to evaluate on
_HELD_OUT, _MOST_HELD_OUT = 0.1, 500  # share, and rows
# share of the steps' time, and number after the one before the first step
_EVALUATING, _MOST_EVALUATIONS = 0.1, 4
_MUCH_FASTER = 0.7  # share of another dtype's seconds
_SAMPLES = 2
_LISTED = 6  # columns that are named


@dataclass(frozen=True, kw_only=True)
class InitialRecipe:
    """A recipe with its reasons, and what its run is expected to take."""

    values: Mapping[str, Any]  # by option, as a recipe has them
    # one or two plain sentences, also for options that are left out; empty: the value says all
    reasons: Mapping[str, str]
    summary: str  # method, steps, time, memory and disk, in words

    @classmethod
    def of(cls, options: TrainOptions, reasons: Mapping[str, str], summary: str) -> InitialRecipe:
        """The recipe of a run: the options that are no defaults, and those that have a reason."""
        named = {
            name: plain(value)
            for name, value, default in leaves(options)
            if value != default or name in reasons
        }
        return cls(
            values={name: named[name] for name in OPTIONS if named.get(name) is not None},
            reasons=reasons,
            summary=summary,
        )

    @property
    def rows(self) -> str:
        """What the rows are, and the columns and the template that were chosen for them."""
        kind = self.reasons["data"]
        chosen = [f"{name}: {self.values[name]}" for name in _ROW_OPTIONS if name in self.values]
        return f"{kind.removesuffix('.')}; {', '.join(chosen)}." if chosen else kind

    @property
    def left_out(self) -> Sequence[str]:
        """Why what most runs have is left out: an adapter, or rows to evaluate on."""
        told = {"method"} if self.values["method"] in ZEROTH_ORDER else set()
        left_out = self.reasons.keys() - self.values.keys() | told
        return [reason for name, reason in self.reasons.items() if name in left_out]

    def text(self) -> str:
        """The recipe as YAML, with the reasons as comments."""
        lines: list[str] = []
        order = list(OPTIONS)
        for name in sorted({**self.values, **self.reasons}, key=order.index):
            comment = [f"# {line}" for line in textwrap.wrap(self.reasons.get(name, ""), 98)]
            lines += ["", *comment] if comment else []
            if name in self.values:
                lines.append(
                    yaml.safe_dump(
                        {name: self.values[name]}, allow_unicode=True, width=1000
                    ).rstrip("\n")
                )
        return "\n".join(lines).lstrip("\n") + "\n"


def initial_recipe(request: TrainOptions) -> InitialRecipe:
    """Choose the options of a run for a model and its data.

    Nothing is trained; the probes take some seconds.
    """
    surveyed = survey(request.data, request.rows, takes_labels=request.takes_labels)
    objective = MODEL_LOSS if surveyed.labels and request.objective == AUTO else request.objective
    options, model, reasons = _with_method(
        replace(request, rows=surveyed.options, objective=objective), surveyed.format
    )
    options, lengths, rows = _with_lengths(options, model)
    inputs, plan = _packed(*_fitting(RunInputs.read(RunStart(_with_held_out_rows(options, rows)))))
    chosen = inputs.options
    # which a run on this machine has settled
    batching = replace(chosen.batching, loss_chunk=options.batching.loss_chunk)
    options = options.having(
        eval_split=chosen.eval_split, rank=chosen.optimization.rank, **vars(batching)
    )
    options = _with_steps(options, len(inputs.data), plan)
    is_written = inputs.data.format is RowFormat.TEXT and "prompt" in surveyed.kind
    if is_written and plan.host_plan.buckets is None:
        options = replace(options, samples=_SAMPLES)
    plan = replace(plan, steps=options.steps, evaluations=options.evaluations_from(0))
    reasons |= _reasons(options, surveyed, inputs, plan)
    reasons["batch_size" if options.batching.sequence_length is None else "sequence_length"] = (
        lengths
    )
    rates, schedule = schedule_of(options)
    tried = ", ".join(f"{rate:g}" for rate in rates)
    costs = f"{counted(schedule.steps, 'step')}, about {duration(schedule.steps * plan.seconds)}"
    reasons["lr"] = f"auto tries {tried} in short runs first, and takes the best: {costs}."
    return InitialRecipe.of(
        options, reasons, told_line(options, inputs.model, plan, trial_steps=schedule.steps)
    )


# Options with the method that was chosen, the model as it is opened for it, and the reasons by
# option.
_Opened: TypeAlias = tuple[TrainOptions, HFBlockModel, dict[str, str]]


def _with_method(request: TrainOptions, rows: RowFormat) -> _Opened:
    """Choose AdamW on a LoRA adapter where objective and model allow it, else zeroth-order steps;
    and a precision.
    """
    directory = resolve_directory(request.model)
    lora = replace(
        request,
        model_options=replace(request.model_options, lora_rank=LORA_RANK, lora_targets=(EVERY,)),
        optimization=Optimization(lr="auto", decay=Decay.LINEAR, max_grad_norm=1.0),
    )
    why_not = (
        None
        if is_differentiable(request.objective, rows)
        else f"the objective {request.objective} has no gradient"
    )
    if why_not is None:
        try:
            model = lora.opened(directory)
            if not hands_over_tensors(model):
                reasons = {
                    "method": (
                        "AdamW trains a small LoRA adapter, and the model's weights are only "
                        "read: the loss of these "
                        "rows has a gradient, which learns in tens of steps what takes hundreds of "
                        "zeroth-order ones."
                    ),
                    "lora_targets": (
                        "auto is every linear layer but the head; of a mixture, outside its "
                        "experts."
                    ),
                    "max_grad_norm": "Scales down gradients that are unusually large.",
                    "decay": "The rate falls towards 0, so that the last steps settle.",
                }
                return _with_precision(lora, model, reasons)
            why_not = (
                "this model's blocks hand tensors to later blocks, so that gradients would be lost"
            )
        except MissingPackageError as error:
            why_not = f"adapters need {error.where}: {error.remedy}"
        except ZO2Error as error:
            why_not = f"this model takes no LoRA adapter ({error.found})"
    zeroth_order = replace(
        request,
        model_options=request.model_options.without_adapter(),
        optimization=Optimization(method="zeroth-order", lr="auto"),
        steps=_ZEROTH_ORDER_STEPS,
    )
    reasons = {
        "method": f"Zeroth-order steps, which need no gradient, train all parameters: {why_not}."
    }
    return _with_precision(zeroth_order, zeroth_order.opened(directory), reasons)


def _with_precision(options: TrainOptions, model: HFBlockModel, reasons: dict[str, str]) -> _Opened:
    """Choose the dtypes: those of the checkpoint, unless this machine computes much faster in
    others.
    """
    specs = [spec for layout in model.layouts if not layout.resident for spec in layout.parameters]
    stored = max(specs, key=lambda spec: spec.numel).stored_dtype
    changed: dict[str, Any] = {}
    trained = (
        "the adapter in float32"
        if options.model_options.trains_adapter
        else "and updates them in float32"
    )
    why = f"auto keeps the weights in {dtype_name(stored)}, as in the checkpoint, {trained}."
    if any(spec.encoding is not None for spec in specs):
        why = f"auto keeps the quantised weights as they are, {trained}."
    elif model.autocast is not None:
        why = (
            "auto keeps weights in float32, where no small update is lost, and computes in "
            f"{dtype_name(model.autocast)}."
        )
    elif options.optimization.optimizer is not None and stored in (torch.float16, torch.float32):
        times = product_seconds(stored) / product_seconds(torch.bfloat16)
        if times * _MUCH_FASTER > 1:
            why = (
                f"this CPU multiplies matrices {times:.1f} times as fast in bfloat16 as in "
                f"{dtype_name(stored)}."
            )
            changed = {"dtype": "bfloat16"}
            if stored is torch.float32:
                changed = {"precision": "mixed"}
                why = f"mixed keeps the weights in float32 and computes in 16 bits: {why}"
    if changed:
        options = options.having(**changed)
        model = options.opened(resolve_directory(options.model))
    return (
        options,
        model,
        {**reasons, "dtype" if "dtype" in changed else "precision": why[0].upper() + why[1:]},
    )


def _with_lengths(options: TrainOptions, model: HFBlockModel) -> tuple[TrainOptions, str, int]:
    """Choose the length of the longest row from all rows, and return the reason and the number of
    rows, too.
    """
    most = min(_LONGEST_ROW, model.longest_row or _LONGEST_ROW)
    data = _rows_of_lengths(options, model, most)
    tokens = sorted(length for row in data for length, _ in row.sequences)
    chosen = min(DEFAULT_LENGTH, most) if data.divided else _longest_uncut(tokens)
    limit = min(max(_ROUNDED_TO * math.ceil(chosen / _ROUNDED_TO), 2), most)
    is_cut = tokens[-1] > limit or data.dropped or data.truncated
    # such rows cannot be cut
    is_whole = data.format in (RowFormat.CANDIDATES, RowFormat.PREFERENCES)
    too_long = "drop" if is_cut and is_whole else options.rows.too_long
    longer = sum(length > limit for length in tokens) + data.dropped
    cut = f"{longer} longer ones are shortened or left out." if longer else "No row is longer."
    if data.divided:
        cut = "Longer texts become several rows."
    reason = (
        f"The median row has {tokens[len(tokens) // 2]} tokens, the longest {tokens[-1]}. {cut}"
    )
    if not is_whole or is_cut or limit > DEFAULT_LENGTH:
        # else the run's model judges longer rows, too
        options = options.having(sequence_length=limit)
    return options.having(too_long=too_long), reason, len(data)


def _longest_uncut(tokens: Sequence[int]) -> int:
    """The tokens of the longest row that is not cut, of sorted numbers: of all rows, unless a few
    are much longer than the others.
    """
    typical = tokens[math.ceil(len(tokens) * _TYPICAL) - 1]
    return tokens[-1] if tokens[-1] <= max(_UNCUT, 1.25 * typical) else typical


def _rows_of_lengths(options: TrainOptions, model: HFBlockModel, most: int) -> Rows:
    """Read the rows to train on, by default without those that are longer than ``most`` tokens,
    unless all are.
    """
    too_long = options.rows.too_long
    reading = replace(options.rows, too_long="drop" if too_long == "auto" else too_long)
    config = model.config if options.takes_labels else None
    reader = RowReader(load_tokenizer(resolve_directory(options.model)), most, reading, config)
    try:
        data, _ = reader.read_files(options.data, None, options.eval_split)
    except ZO2Error:  # every row is longer
        reader = replace(reader, options=options.rows)
        data, _ = reader.read_files(options.data, None, options.eval_split)
    return data


def _with_held_out_rows(options: TrainOptions, rows: int) -> TrainOptions:
    """Hold out a share of the rows to evaluate on, if the user names none and there are enough."""
    if options.evaluation is not None or options.eval_split is not None or rows < _FEWEST_ROWS:
        return options
    share = min(_HELD_OUT, _MOST_HELD_OUT / rows)
    return replace(options, eval_split=float(f"{share:.2g}"))


def _fitting(inputs: RunInputs) -> tuple[RunInputs, RunPlan]:
    """Choose the number of rows in a batch, and of rows that run at a time, and plan the run.

    The number of rows at a time is the largest whose activations leave room for blocks, and whose
    plan fits.
    """
    storage = inputs.options.storage
    rows = min(_BATCH, len(inputs.data))
    budget = free_memory() if storage.memory == "auto" else parse_size(storage.memory)
    possible = [
        at_once
        for at_once in _MICRO_BATCHES
        if at_once is None or at_once < rows * inputs.most_sequences
    ]
    *larger, least = (
        inputs.having(batch_size=rows, micro_batch_size=at_once) for at_once in possible
    )
    for fitting in larger:
        memory = method_of(RunStart(fitting.options)).reserved_bytes(
            fitting.model, fitting.shapes()
        )
        if memory.nbytes <= _ACTIVATIONS * budget:
            with contextlib.suppress(MemoryBudgetError):
                return _planned(fitting)
    return _planned(least)


def _planned(inputs: RunInputs) -> tuple[RunInputs, RunPlan]:
    """Plan one step and one evaluation.

    Zeroth-order runs with streamed blocks get low-rank directions: these write none.
    """
    inputs = inputs.having(steps=1)
    plan = plan_of(inputs)
    if inputs.options.optimization.optimizer is not None or plan.host_plan.buckets is None:
        return inputs, plan
    options = inputs.options
    try:
        reopened = inputs.reopened(options.having(rank=LORA_RANK, precision="auto", dtype="auto"))
        return reopened, plan_of(reopened)
    except ZO2Error:  # a model that takes directions in its weights only
        return inputs, plan


def _packed(inputs: RunInputs, plan: RunPlan) -> tuple[RunInputs, RunPlan]:
    """Concatenate the rows of a batch if that is expected to be faster than to pad them."""
    is_packable = inputs.data.format is RowFormat.TEXT and names_model_loss(
        inputs.options.objective
    )
    if (
        is_packable
        and inputs.options.batching.micro_batch_size is None
        and _padding(inputs) >= _PADDED
    ):
        packed = inputs.having(pack=True)
        with contextlib.suppress(UnsupportedModelError, MemoryBudgetError):
            require_packable(inputs.model)
            faster = plan_of(packed)
            if faster.seconds <= _FASTER * plan.seconds:
                return packed, faster
    return inputs, plan


def _padding(inputs: RunInputs) -> float:
    """The share of padding among the tokens of padded batches."""
    packed, padded = (inputs.having(pack=pack).shapes().step for pack in (True, False))
    return 1 - packed.rows * packed.tokens / (padded.rows * padded.tokens)


def _with_steps(options: TrainOptions, rows: int, plan: RunPlan) -> TrainOptions:
    """Choose how many steps are taken, and how often to evaluate."""
    steps = options.steps
    if options.optimization.optimizer is not None:
        epoch = math.ceil(rows / options.batching.batch_size)
        steps = _EPOCHS * epoch if _EPOCHS * epoch * plan.seconds <= _LONGEST_RUN else epoch
        steps = min(max(steps, _FEWEST_STEPS), _MOST_STEPS)
    options = replace(options, steps=steps)
    if not options.evaluates:
        return options
    affordable = _EVALUATING * steps * plan.seconds / max(plan.evaluation_seconds, 1e-9)
    count = 1 if math.isnan(affordable) else min(_MOST_EVALUATIONS, int(affordable))
    return replace(
        options, evaluate_every=math.ceil(steps / count) if count > 1 else None, keep_best=True
    )


def _reasons(
    options: TrainOptions, surveyed: Survey, inputs: RunInputs, plan: RunPlan
) -> dict[str, str]:
    """The reasons for what was chosen for the rows and the memory."""
    rows = len(inputs.data)
    batch_size = options.batching.batch_size
    host = plan.host_plan
    unused = f"; not used: {', '.join(surveyed.unused[:_LISTED])}" if surveyed.unused else ""
    unused += ", ..." if len(surveyed.unused) > _LISTED else ""
    limit = "are free" if options.storage.memory == "auto" else "are allowed"
    streamed = (
        f"The model is larger: blocks are streamed from disk, {shown_bytes(plan.read_bytes)} a "
        "step."
    )
    reasons = {
        "data": f"The rows are {surveyed.kind}{unused}.",
        "output": "The run's directory, which must not exist. Its model/ is the result.",
        "steps": (
            f"{counted(options.steps, 'step')} of {counted(batch_size, 'row')} pass the {rows} "
            "rows "
            f"{options.steps * batch_size / rows:.1f} times, at about {duration(plan.seconds)} a "
            "step."
        ),
        "batch_size": "",
        "memory": (
            f"{shown_bytes(host.budget)} {limit}, and the run takes about "
            f"{shown_bytes(host.nbytes)}. "
            f"{'All blocks stay in memory.' if host.buckets is None else streamed}"
        ),
        "seed": "The order of rows and the first values of what is trained.",
    }
    if surveyed.labels and options.objective == MODEL_LOSS:
        reasons["objective"] = (
            "Steps learn the right label alone; evaluations compare all labels and print accuracy."
        )
    if options.optimization.rank is not None:
        reasons["rank"] = (
            "Directions of low rank only read the weights, so that no block is written back to "
            "the disk."
        )
    if options.batching.micro_batch_size is not None:
        reasons["micro_batch_size"] = (
            "So many rows run at a time, so that activations leave room for blocks. It changes no "
            "result but rounding."
        )
    if options.batching.pack:
        reasons["pack"] = (
            f"Rows of a batch are joined: if padded, {_padding(inputs):.0%} of the tokens would "
            "be padding."
        )
    if options.samples:
        reasons["samples"] = "So many prompts are answered before and after training."
    if inputs.evaluation is None:
        reasons["evaluation"] = (
            f"Nothing is held out to evaluate on: there are too few rows, {rows}."
        )
        return reasons
    reasons["keep_best"] = "The result is the model of the best evaluation, not of the last step."
    count = len(inputs.evaluation)
    seconds = duration(plan.evaluation_seconds)
    if options.evaluation is not None:
        reasons["evaluation"] = f"An evaluation on {count} rows takes about {seconds}."
        return reasons
    reasons["eval_split"] = (
        f"About {seconds} each time, on {counted(count, 'row')} instead of training on them."
    )
    return reasons
