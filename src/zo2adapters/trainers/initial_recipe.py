"""A first recipe for a model and its data: what to choose for each option, and why."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import yaml

from zo2adapters.models.architecture import product_seconds
from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.registry import AUTO, MODEL_LOSS, is_differentiable, names_model_loss
from zo2adapters.tasks.row_options import RowFormat, Survey, survey
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2adapters.trainers.methods import method_of, storage
from zo2adapters.trainers.optimization import Decay, FirstOrder, Optimization
from zo2adapters.trainers.option_table import by_option, setting_text
from zo2adapters.trainers.options import DEFAULT_LENGTH, Batching, TrainOptions
from zo2adapters.trainers.probes import hands_over_tensors, require_packable
from zo2adapters.trainers.run_inputs import RunInputs
from zo2adapters.trainers.run_plan import RunPlan, duration, method_words, plan_of
from zo2adapters.trainers.tuning import Schedule, schedule_of
from zo2core import ZO2Error
from zo2core.errors import MemoryBudgetError, MissingPackageError, UnsupportedModelError
from zo2core.planning.memory import free_memory
from zo2core.ranges import counted, parse_size
from zo2core.types import shown_bytes

_ROW_OPTIONS = ("prompt_template", "columns")
LORA_RANK = 8
_BATCH = 16  # rows
_MICRO_BATCHES = (None, 8, 4, 2, 1)  # rows that run at a time, of which the first that fits is chosen
_ACTIVATIONS = 0.25  # share of the memory that activations may take
_ZEROTH_ORDER_STEPS = 1000
_EPOCHS, _FEWEST_STEPS, _MOST_STEPS = 3, 50, 2000  # of a first-order run
_LONGEST_RUN = 4 * 3600.0  # seconds above which one epoch is enough to begin with
_LONGEST_ROW = 4096  # tokens; longer rows are cut before lengths are measured
_UNCUT = 256  # tokens of rows that are too short to be worth cutting
_TYPICAL = 0.99  # share of the rows that are not cut
_ROUNDED_TO = 16  # tokens
_PADDED = 0.25  # least share of padding for which packed rows are tried: their mask hides more
_FASTER = 0.9  # most share of the padded rows' seconds
_FEWEST_ROWS = 20  # least rows of a file from which rows are held out to evaluate on
_HELD_OUT, _MOST_HELD_OUT = 0.1, 500  # share, and rows
_EVALUATING, _MOST_EVALUATIONS = 0.1, 4  # share of the steps' time, and number after the one before the first step
_MUCH_FASTER = 0.7  # share of another dtype's seconds
_SAMPLES = 2
_LISTED = 6  # columns that are named


class Choice(NamedTuple):
    """An option, its value, and the reason for it."""

    name: str | None  # None: the reason alone, for what is chosen by leaving options out
    value: Any
    reason: str = ""  # one or two plain sentences; empty where the value says all


@dataclass(frozen=True, kw_only=True)
class InitialRecipe:
    """A recipe with its reasons, and what its run is expected to take."""

    choices: Sequence[Choice]
    summary: str  # method, steps, time, memory and disk, in words

    @property
    def rows(self) -> str:
        """What the rows are, and the columns and the template that were chosen for them."""
        [kind] = [choice.reason for choice in self.choices if choice.name == "data"]
        chosen = [f"{choice.name}: {choice.value}" for choice in self.choices if choice.name in _ROW_OPTIONS]
        return f"{kind.removesuffix('.')}; {', '.join(chosen)}." if chosen else kind

    @property
    def left_out(self) -> Sequence[str]:
        """Why what most runs have is left out: an adapter, or rows to evaluate on."""
        return [choice.reason for choice in self.choices if choice.name is None]

    def text(self) -> str:
        """The recipe as YAML, with the reasons as comments."""
        lines: list[str] = []
        for choice in self.choices:
            comment = [f"# {line}" for line in textwrap.wrap(choice.reason, 98)]
            lines += ["", *comment] if comment else []
            if choice.name is not None:
                lines.append(yaml.safe_dump({choice.name: choice.value}, allow_unicode=True, width=1000).rstrip("\n"))
        return "\n".join(lines).lstrip("\n") + "\n"


class _Opened(NamedTuple):
    """The method that was chosen, and the model as it is opened for it."""

    options: TrainOptions
    model: HFBlockModel
    reason: str
    precision: str  # reason for its precision


def initial_recipe(request: TrainOptions) -> InitialRecipe:
    """Choose the options of a run for a model and its data. Nothing is trained; the probes take some seconds."""
    surveyed = survey(request.data, request.rows, takes_labels=request.takes_labels)
    objective = MODEL_LOSS if surveyed.labels and request.objective == AUTO else request.objective
    opened = _opened(replace(request, rows=surveyed.options, objective=objective), surveyed.format)
    options, lengths, rows = _with_lengths(opened)
    inputs = RunInputs.read(_with_held_out_rows(options, rows))
    inputs, plan = _packed(*_fitting(inputs))
    batching = inputs.options.batching
    options = _with_steps(replace(opened.options, eval_split=inputs.options.eval_split, batching=batching), inputs, plan)
    rates, schedule = schedule_of(options)
    plan = replace(plan, steps=options.steps, evaluations=options.evaluations(options.steps))
    choices = [
        *_data_choices(options, surveyed),
        *_method_choices(opened, options, plan),
        *_rate_choices(options, rates, schedule, plan),
        *_batch_choices(options, lengths, inputs, plan),
        *_evaluation_choices(options, inputs, plan, surveyed),
        Choice("seed", options.seed, "The order of rows and the first values of what is trained."),
    ]
    return InitialRecipe(choices=choices, summary=_summary(inputs, options, plan, schedule))


def _opened(request: TrainOptions, rows: RowFormat) -> _Opened:
    """Choose AdamW on a LoRA adapter where objective and model allow it, else zeroth-order steps; and a precision."""
    directory = resolve_directory(request.model)
    lora = replace(request.model_options, lora_rank=LORA_RANK)
    adamw = replace(
        request,
        model_options=lora,
        first_order=FirstOrder(method="adamw", max_grad_norm=1.0),
        optimization=Optimization(lr="auto", decay=Decay.LINEAR),
    )
    why_not = None if is_differentiable(request.objective, rows) else f"the objective {request.objective} has no gradient"
    if why_not is None:
        try:
            model = adamw.opened(directory)
            if not hands_over_tensors(model):
                reason = (
                    "AdamW trains a small LoRA adapter, and the model's weights are only read: the loss of these rows has a "
                    "gradient, which learns in tens of steps what takes hundreds of zeroth-order ones."
                )
                return _with_precision(adamw, model, reason)
            why_not = "this model's blocks hand tensors to later blocks, so that gradients would be lost"
        except MissingPackageError as error:
            why_not = f"adapters need {error.where}: {error.remedy}"
        except ZO2Error as error:
            why_not = f"this model takes no LoRA adapter ({error.found})"
    zeroth_order = replace(request, optimization=Optimization(lr="auto"), steps=_ZEROTH_ORDER_STEPS)
    reason = f"Zeroth-order steps, which need no gradient, train all parameters: {why_not}."
    return _with_precision(zeroth_order, zeroth_order.opened(directory), reason)


def _with_precision(options: TrainOptions, model: HFBlockModel, reason: str) -> _Opened:
    """Choose the dtypes: those of the checkpoint, unless this machine computes much faster in others."""
    specs = [spec for layout in model.layouts if not layout.resident for spec in layout.parameters]
    stored = max(specs, key=lambda spec: spec.numel).stored_dtype
    changed: dict[str, Any] = {}
    trained = "the adapter in float32" if options.model_options.trains_adapter else "and updates them in float32"
    why = f"auto keeps the weights in {_name(stored)}, as in the checkpoint, {trained}."
    if any(spec.encoding is not None for spec in specs):
        why = f"auto keeps the quantised weights as they are, {trained}."
    elif model.autocast is not None:
        why = f"auto keeps weights in float32, so that no small update is lost, and computes in {_name(model.autocast)}."
    elif options.first_order.method is not None and stored in (torch.float16, torch.float32):
        times = product_seconds(stored) / product_seconds(torch.bfloat16)
        if times * _MUCH_FASTER > 1:
            speed = f"this CPU multiplies matrices {times:.1f} times as fast in bfloat16 as in {_name(stored)}"
            if stored is torch.float16:
                changed, why = {"dtype": "bfloat16"}, f"{speed}."
            else:
                changed = {"precision": "mixed"}
                why = f"mixed keeps the weights in float32 and computes in 16 bits: {speed}."
    if changed:
        options = replace(options, model_options=replace(options.model_options, **changed))
        model = options.opened(resolve_directory(options.model))
    return _Opened(options, model, reason, why[0].upper() + why[1:])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_lengths(opened: _Opened) -> tuple[TrainOptions, str, int]:
    """Choose the length of the longest row from all rows, and return the number of rows, too."""
    options, model = opened.options, opened.model
    most = min(_LONGEST_ROW, model.longest_row or _LONGEST_ROW)
    reading = replace(options.rows, too_long="drop" if options.rows.too_long == "auto" else options.rows.too_long)
    config = model.config if options.takes_labels else None
    reader = RowReader(load_tokenizer(resolve_directory(options.model)), most, reading, config)
    try:
        data, _ = reader.read_files(options.data, None, options.eval_split)
    except ZO2Error:  # every row is longer
        data, _ = replace(reader, options=options.rows).read_files(options.data, None, options.eval_split)
    tokens = sorted(length for row in data for length, _ in row.sequences)
    typical = tokens[math.ceil(len(tokens) * _TYPICAL) - 1]
    chosen = tokens[-1] if tokens[-1] <= max(_UNCUT, 1.25 * typical) else typical
    limit = min(max(_ROUNDED_TO * math.ceil(chosen / _ROUNDED_TO), 2), most)
    is_cut = tokens[-1] > limit or data.dropped or data.truncated
    is_whole = data.format in (RowFormat.CANDIDATES, RowFormat.PREFERENCES)  # such rows cannot be cut
    too_long = "drop" if is_cut and is_whole else options.rows.too_long
    longer = sum(length > limit for length in tokens) + data.dropped
    cut = f"{longer} longer ones are shortened or left out." if longer else "No row is longer."
    reason = f"The median row has {tokens[len(tokens) // 2]} tokens, the longest {tokens[-1]}. {cut}"
    if not is_whole or is_cut or limit > DEFAULT_LENGTH:  # else the run's model judges longer rows, too
        options = replace(options, batching=replace(options.batching, sequence_length=limit))
    options = replace(options, rows=replace(options.rows, too_long=too_long))
    return options, reason, len(data)


def _with_held_out_rows(options: TrainOptions, rows: int) -> TrainOptions:
    """Hold out a share of the rows to evaluate on, if the user names none and there are enough."""
    if options.evaluation is not None or options.eval_split is not None or rows < _FEWEST_ROWS:
        return options
    share = min(_HELD_OUT, _MOST_HELD_OUT / rows)
    return replace(options, eval_split=float(f"{share:.2g}"))


def _fitting(inputs: RunInputs) -> tuple[RunInputs, RunPlan]:
    """Choose the number of rows in a batch, and of rows that run at a time, and plan the run."""
    *larger, least = (replace(inputs, options=replace(inputs.options, batching=it)) for it in _batchings(inputs))
    for fitting in larger:
        with contextlib.suppress(MemoryBudgetError):
            return _planned(fitting)
    return _planned(least)


def _batchings(inputs: RunInputs) -> list[Batching]:
    """Numbers of rows, from the most whose activations leave room for blocks to the least."""
    options = inputs.options
    budget = free_memory() if options.storage.memory == "auto" else parse_size(options.storage.memory)
    batching = replace(options.batching, batch_size=min(_BATCH, len(inputs.data)))
    rows = [rows for rows in _MICRO_BATCHES if rows is None or rows < batching.batch_size * inputs.most_sequences]
    choices = [replace(batching, micro_batch_size=micro_rows) for micro_rows in rows]

    def fits(batching: Batching) -> bool:
        run = replace(options, batching=batching)
        return method_of(run).reserved_bytes(inputs.model, replace(inputs, options=run).largest)[0] <= _ACTIVATIONS * budget

    return choices[next((index for index, choice in enumerate(choices) if fits(choice)), len(choices) - 1) :]


def _planned(inputs: RunInputs) -> tuple[RunInputs, RunPlan]:
    """Plan one step and one evaluation. Zeroth-order runs with streamed blocks get low-rank directions: these write none."""
    inputs = replace(inputs, options=replace(inputs.options, steps=1))
    plan = plan_of(inputs)
    if inputs.options.first_order.method is not None or plan.host_plan.buckets is None:
        return inputs, plan
    options = inputs.options
    low_rank = replace(options, optimization=replace(options.optimization, rank=LORA_RANK))
    low_rank = replace(low_rank, model_options=replace(low_rank.model_options, precision="auto", dtype="auto"))
    try:
        reopened = inputs.reopened(low_rank)
        return reopened, plan_of(reopened)
    except ZO2Error:  # a model that takes directions in its weights only
        return inputs, plan


def _packed(inputs: RunInputs, plan: RunPlan) -> tuple[RunInputs, RunPlan]:
    """Concatenate the rows of a batch if that is expected to be faster than to pad them."""
    is_packable = inputs.data.format is RowFormat.TEXT and names_model_loss(inputs.options.objective)
    if is_packable and inputs.options.batching.micro_batch_size is None and _padding(inputs) >= _PADDED:
        packed = _joined(inputs, pack=True)
        with contextlib.suppress(UnsupportedModelError, MemoryBudgetError):
            require_packable(inputs.model)
            faster = plan_of(packed)
            if faster.seconds <= _FASTER * plan.seconds:
                return packed, faster
    return inputs, plan


def _joined(inputs: RunInputs, *, pack: bool) -> RunInputs:
    return replace(inputs, options=replace(inputs.options, batching=replace(inputs.options.batching, pack=pack)))


def _padding(inputs: RunInputs) -> float:
    """The share of padding among the tokens of padded batches."""
    packed, padded = (_joined(inputs, pack=pack).shapes().step for pack in (True, False))
    return 1 - packed.rows * packed.tokens / (padded.rows * padded.tokens)


def _with_steps(options: TrainOptions, inputs: RunInputs, plan: RunPlan) -> TrainOptions:
    """Choose how many steps are taken, and how often to evaluate."""
    steps, rank = options.steps, inputs.options.optimization.rank
    options = replace(options, optimization=replace(options.optimization, rank=rank))
    if options.first_order.method is not None:
        epoch = math.ceil(len(inputs.data) / options.batching.batch_size)
        steps = _EPOCHS * epoch if _EPOCHS * epoch * plan.seconds <= _LONGEST_RUN else epoch
        steps = min(max(steps, _FEWEST_STEPS), _MOST_STEPS)
    options = replace(options, steps=steps)
    if not options.evaluates:
        return options
    affordable = _EVALUATING * steps * plan.seconds / max(plan.evaluation_seconds, 1e-9)
    count = min(_MOST_EVALUATIONS, int(affordable))
    return replace(options, evaluate_every=math.ceil(steps / count) if count > 1 else None, keep_best=True)


def _data_choices(options: TrainOptions, surveyed: Survey) -> Iterator[Choice]:
    yield Choice("model", options.model)
    unused = f"; not used: {', '.join(surveyed.unused[:_LISTED])}" if surveyed.unused else ""
    unused += ", ..." if len(surveyed.unused) > _LISTED else ""
    yield Choice("data", str(options.data), f"The rows are {surveyed.kind}{unused}.")
    named = by_option(vars(options.rows))
    for name in _ROW_OPTIONS:
        if name in named:
            yield Choice(name, named[name])
    if options.rows.labels:
        yield Choice("labels", list(options.rows.labels))
    if options.takes_labels:
        yield Choice("head", options.model_options.head)
    if surveyed.labels and options.objective == MODEL_LOSS:
        reason = "Steps learn the right label alone; evaluations compare all labels and print accuracy."
        yield Choice("objective", MODEL_LOSS, reason)
    elif options.objective != AUTO:
        yield Choice("objective", options.objective)
    yield Choice("output", str(options.output), "The run's directory, which must not exist. Its model/ is the result.")


def _method_choices(opened: _Opened, options: TrainOptions, plan: RunPlan) -> Iterator[Choice]:
    if options.first_order.method is not None:
        yield Choice("method", options.first_order.method, opened.reason)
        yield Choice("lora_rank", options.model_options.lora_rank)
        yield Choice("lora_targets", "auto", "auto is every linear layer but the head; of a mixture, outside its experts.")
        clip = setting_text(None, {"norm": options.first_order.max_grad_norm})
        yield Choice("clip", clip, "Scales down gradients that are unusually large.")
    else:
        yield Choice(None, None, opened.reason)
        if options.optimization.rank is not None:
            reason = "Directions of low rank only read the weights, so that no block is written back to the disk."
            yield Choice("rank", options.optimization.rank, reason)
    if opened.options.model_options.dtype != "auto":
        yield Choice("dtype", options.model_options.dtype, opened.precision)
    else:
        yield Choice("precision", options.model_options.precision, opened.precision)


def _rate_choices(options: TrainOptions, rates: Sequence[float], schedule: Schedule, plan: RunPlan) -> Iterator[Choice]:
    tried = ", ".join(f"{rate:g}" for rate in rates)
    yield Choice(
        "lr",
        "auto",
        f"auto tries {tried} in short runs first, and takes the best: {counted(schedule.steps, 'step')}, about "
        f"{duration(schedule.steps * plan.seconds)}.",
    )
    if options.optimization.decay is not Decay.CONSTANT:
        yield Choice("decay", options.optimization.decay.value, "The rate falls towards 0, so that the last steps settle.")


def _batch_choices(options: TrainOptions, lengths: str, inputs: RunInputs, plan: RunPlan) -> Iterator[Choice]:
    rows, batch_size = len(inputs.data), options.batching.batch_size
    epochs = options.steps * batch_size / rows
    yield Choice(
        "steps",
        options.steps,
        f"{counted(options.steps, 'step')} of {counted(batch_size, 'row')} pass the {rows} rows {epochs:.1f} times, at "
        f"about {duration(plan.seconds)} a step.",
    )
    limit = options.batching.sequence_length
    yield Choice("batch_size", batch_size, "" if limit else lengths)
    if options.batching.micro_batch_size is not None:
        reason = "So many rows run at a time, so that activations leave room for blocks. It changes no result but rounding."
        yield Choice("micro_batch_size", options.batching.micro_batch_size, reason)
    if options.batching.pack:
        reason = f"Rows of a batch are joined: if they were padded, {_padding(inputs):.0%} of the tokens would be padding."
        yield Choice("pack", options.batching.pack, reason)
    if limit:
        yield Choice("sequence_length", limit, lengths)
    if options.rows.too_long != "auto":
        yield Choice("too_long", options.rows.too_long)
    host = plan.host_plan
    given = "are free" if options.storage.memory == "auto" else "are allowed"
    needed = f"{shown_bytes(host.budget)} {given}, and the run takes about {shown_bytes(host.nbytes)}."
    where = "All blocks stay in memory."
    if host.buckets is not None:
        where = f"The model is larger: blocks are streamed from disk, {shown_bytes(plan.read_bytes)} a step."
    yield Choice("memory", options.storage.memory, f"{needed} {where}")


def _evaluation_choices(options: TrainOptions, inputs: RunInputs, plan: RunPlan, surveyed: Survey) -> Iterator[Choice]:
    is_written = inputs.data.format is RowFormat.TEXT and "prompt" in surveyed.kind
    if is_written and plan.host_plan.buckets is None:
        yield Choice("samples", _SAMPLES, "So many prompts are answered before and after training.")
    if inputs.evaluation is None:
        yield Choice(None, None, f"Nothing is held out to evaluate on: there are too few rows, {len(inputs.data)}.")
        return
    count, seconds = len(inputs.evaluation), duration(plan.evaluation_seconds)
    if options.evaluation is not None:
        yield Choice("evaluation", str(options.evaluation), f"An evaluation on {count} rows takes about {seconds}.")
    else:
        reason = f"About {seconds} each time, on {counted(count, 'row')} instead of training on them."
        yield Choice("evaluation", options.eval_split, reason)
    if options.evaluate_every is not None:
        yield Choice("evaluate_every", options.evaluate_every)
    yield Choice("keep_best", options.keep_best, "The result is the model of the best evaluation, not of the last step.")


def _summary(inputs: RunInputs, options: TrainOptions, plan: RunPlan, schedule: Schedule) -> str:
    trials = schedule.steps * plan.seconds
    evaluations = f", {counted(plan.evaluations, 'evaluation')}" if plan.evaluations else ""
    writes = method_of(options).writes(plan.write_back_every, inputs.model, plan.host_plan)
    return (
        f"{method_words(options)}{evaluations}, and {counted(schedule.steps, 'step')} to choose the learning rate: about "
        f"{duration(plan.run_seconds + trials)} in all. " + storage(plan.host_plan, None, options.storage, writes)
    )
