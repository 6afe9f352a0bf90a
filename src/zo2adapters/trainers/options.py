"""Options of a fine-tuning run, and how they are kept in its directory."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from zo2adapters.ranges import LARGEST, require_at_least, require_between
from zo2adapters.tasks.registry import AUTO, MODEL_LOSS, function_file, names_model_loss
from zo2adapters.trainers.batching import Batching
from zo2adapters.trainers.field_types import require_field_types
from zo2adapters.trainers.first_order import FirstOrder
from zo2adapters.trainers.live_metrics import TrackerName
from zo2adapters.trainers.lr_schedules import Decay
from zo2adapters.trainers.model_options import DtypeName, PrecisionName, RunModelOptions, precision_of_run
from zo2adapters.trainers.optimization import Noise, Optimization
from zo2core import OptionError, ZOEstimator
from zo2core.estimators import EstimatorName
from zo2core.estimators.inputs import require_positive
from zo2core.planning.host_budget import parse_size
from zo2core.planning.low_bit import Replay

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # a command line is read without transformers


def evaluations_due(steps: int, every: int | None, *, version: int = 0) -> int:
    """Evaluations of a run that are due from a version on: before the first step, after every so many, after the last one.

    Args:
        steps: Steps of the run.
        every: Steps after which to evaluate again; None: there are none in between.
        version: Steps that were taken; an evaluation that is due there is counted.
    """
    if version > steps:
        return 0
    between = 0 if every is None else (steps - 1) // every - max(version - 1, 0) // every
    return between + (version == 0) + 1


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a process may use of this machine."""

    memory: str = "auto"
    """Host memory the process may take in all, such as 6GiB; auto takes what is free. Blocks stream from disk if need be."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda or cuda:N. A resumed run stays where it began, since a GPU rounds otherwise."""
    device_memory: str = "auto"
    """Device memory the run may use, such as 8GiB; auto takes what is free. As many blocks as fit stay there;
    activations for which there is no room wait in host memory."""


@dataclass(frozen=True, kw_only=True)
class Storage(Resources):
    """Where the weights live."""

    write_back_every: int | Literal["auto", "never"] = "auto"
    """Steps that a block may be ahead of its bytes on disk before it is written to the run's scratch file; until then it is
    replayed. auto measures noise and disk, and writes as seldom as costs at most a tenth of a step. With --rank no block is
    written; auto keeps what ended periods come to, and never does not."""
    write_limit_tb: float | None = None
    """Terabytes that 1,000 steps may write, by which disks wear out. auto keeps to it; a run with --rank whose ended periods
    take more keeps none of them."""
    snapshot_every: int | None = None
    """Most steps that a resumed run has to replay; after a crash there may be one or two more. With --method: steps from one
    snapshot to the next; by default as many as make snapshots cost 2 % of the time."""
    activation_memory: str | None = None
    """Memory reserved for activations, such as 1GiB, in host memory on the CPU and in device memory on a GPU. An evaluation
    takes as many batches a sweep as fit in it. By default it is what a step takes."""

    def require_valid(self) -> None:
        """Refuse numbers and sizes that are none.

        Raises:
            OptionError: naming the option.
        """
        for option, word in (("write_back_every", "auto or never"), ("snapshot_every", None)):
            value = getattr(self, option)
            if isinstance(value, int) and not 1 <= value <= LARGEST:
                expected = "a number of steps, at least 1" + (f", or {word}" if word else "")
                remedy = f"pass {word.split()[-1]} to write nothing" if word else "leave it out for no bound"
                raise OptionError(option, found=repr(value)[:40], expected=expected, remedy=remedy)
        for option in ("memory", "device_memory", "activation_memory"):
            value = getattr(self, option)
            if value is not None and (value != "auto" or option == "activation_memory"):
                parse_size(value, option=option)


class Order(Enum):
    """How transfers and compute follow each other."""

    OVERLAPPED = "overlapped"
    SERIAL = "serial"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How this process works on a run. No bit of the result depends on it, so a resumed run may choose anew."""

    trace: Path | None = None
    """File to write each sweep to, for ui.perfetto.dev: what every lane did when, and how many bytes
    it moved. It must not exist."""
    verify_base: bool = False
    """Read every byte of the base before the first step, and compare it with what the journal keeps of it."""
    replay: Replay = "auto"
    """Who replays for a GPU: itself, or the host, and then no block comes back. auto leaves it to the GPU where it can."""
    scheduler: Order = Order.OVERLAPPED
    """Order of transfers and compute. serial does one thing after the other, keeps no block on the device, and is there to
    compare with."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a fine-tuning run can be told, apart from what it needs."""

    evaluation: Path | None = None
    """JSONL file to evaluate on, before the first step and after the last one."""
    evaluate_every: int | None = None
    """Steps after which to evaluate again."""
    objective: str = AUTO
    """What steps make smaller. loss: the model's own. Of rows with candidates: choice-loss, MeZO's loss over them, or
    accuracy or f1, which have no gradient. Of rows with chosen and rejected completions: dpo, against the base. exact-match:
    the share of completions that the model does not write by itself. FILE.py:function: a function of the model and a batch.
    auto is loss, choice-loss of rows with candidates, or dpo of rows with preferences."""
    beta: float | None = None
    """Strength of the penalty for moving away from the base, in dpo; by default 0.1."""
    keep_best: bool = False
    """Export the model of the step whose evaluation was best, not the last one."""
    report_to: TrackerName = "none"
    """Where each step's numbers go beside metrics.jsonl: to tensorboard or wandb, where these packages are installed."""
    steps: int = 1000
    """Zeroth-order steps to take; each runs two forwards of one batch a query, or with fzoo one and one more. With --method:
    steps by gradients, each of which is about three forwards of one batch."""
    seed: int = 0
    """Seed of the order of rows and of the directions."""
    model_options: RunModelOptions = field(default_factory=RunModelOptions)
    first_order: FirstOrder = field(default_factory=FirstOrder)
    optimization: Optimization = field(default_factory=Optimization)
    batching: Batching = field(default_factory=Batching)
    storage: Storage = field(default_factory=Storage)

    @property
    def takes_labels(self) -> bool:
        """Whether rows are texts with labels."""
        return self.model_options.head != "causal-lm"

    def require_valid(self) -> None:
        """Refuse what no model and no data could make right.

        Raises:
            OptionError: naming the option.
        """
        require_at_least("steps", self.steps, 1)
        if self.evaluate_every is not None:
            require_at_least("evaluate_every", self.evaluate_every, 1)
        if self.beta is not None:
            require_positive("beta", self.beta)
        if self.keep_best and self.evaluation is None:
            raise OptionError(
                "keep_best",
                found="True without rows to evaluate on",
                expected="--evaluation",
                remedy="name them, or leave it out",
            )
        if self.optimization.per_row and not names_model_loss(self.objective):
            raise _unused("per_row", f"--objective {self.objective}", "loss, which is each row's own")
        if self.takes_labels:
            if not names_model_loss(self.objective):
                raise _unused("objective", f"{self.objective} with --head {self.model_options.head}", "the model's own loss")
            if self.beta is not None:
                raise _unused("beta", f"{self.beta} with --head {self.model_options.head}", "the model's own loss")
            if self.batching.pack:
                raise _unused("pack", f"--head {self.model_options.head}", "a causal language model")
            if self.optimization.per_row:
                raise _unused("per_row", f"--head {self.model_options.head}", "a causal language model")
        if self.optimization.per_row and self.batching.pack:
            raise _unused("per_row", "--pack", "rows whose losses stay apart")
        if self.optimization.per_row and self.batching.micro_batch_size is not None:
            raise _unused("per_row", "--micro-batch-size", "whole rows of one batch")
        if self.optimization.rank is not None and self.storage.snapshot_every is not None:
            raise _unused("rank", "--snapshot-every", "no snapshot: no weight changes")
        self.first_order.require_valid(self)
        has_snapshots = self.model_options.adapter is None or self.first_order.method is not None
        if self.storage.snapshot_every is not None and not has_snapshots:
            raise _unused("adapter", "--snapshot-every", "no snapshot: a few parameters change, which are in memory")
        self.model_options.require_valid()
        require_between("seed", self.seed, -LARGEST, LARGEST)
        self.batching.require_valid()
        self.storage.require_valid()


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """A fine-tuning run."""

    model: str
    """Model directory with safetensors weights, or a hub id."""
    data: Path
    """JSONL file; each row has text, or prompt and completion (loss on the completion only), or messages."""
    output: Path
    """Directory for the run: journal.jsonl, metrics.jsonl and, at the end, model/. It must not exist, or be empty."""
    schedule_steps: int | None = None
    """Steps for which the run's learning rate was scheduled; None: ``steps``. A run that was lengthened has more steps."""

    def precision_asked(self) -> PrecisionName:
        """The precision to open the model in."""
        asked, on_cpu = self.model_options, self.storage.device == "cpu"
        # Factors and adapters are float32 anyway.
        exact = self.optimization.exact_mezo or self.optimization.rank is not None or asked.adapter is not None
        return precision_of_run(asked.precision, exact_mezo=exact, on_cpu=on_cpu)

    def opened(self, directory: Path) -> HFBlockModel:
        """Open the model of the run from its directory."""
        model_options = replace(self.model_options, precision=self.precision_asked())
        return model_options.opened(directory, seed=self.seed, loss_chunk=self.batching.loss_chunk)

    def settled(self, model: HFBlockModel) -> TrainOptions:
        """The same options with what was chosen for this machine written down: a resumed run has to do the same."""
        if model.autocast is None:
            return replace(self, model_options=replace(self.model_options, precision="exact"))
        computed = cast("DtypeName", str(model.autocast).removeprefix("torch."))
        return replace(
            self,
            model_options=replace(self.model_options, precision="mixed", dtype=computed),
            batching=replace(self.batching, loss_chunk=model.loss_chunk),
        )

    def require_valid(self) -> None:
        """As above; and a run with a schedule can be lengthened only where the schedule does not end.

        Raises:
            OptionError: naming the option.
        """
        super().require_valid()
        scheduled = self.schedule_steps
        if scheduled not in (None, self.steps) and self.optimization.decay is not Decay.CONSTANT:
            raise OptionError(
                "steps",
                found=str(self.steps),
                expected=f"{scheduled}, over which the {self.optimization.decay.value} schedule of this run lowers lr",
                remedy="leave it out, or begin a new run; a run of constant lr can be lengthened",
            )

    def estimator(self) -> ZOEstimator:
        """The estimator of the run, with its clipping and guard.

        Raises:
            OptionError: if a number is out of its range, or options do not go together.
        """
        steps = self.steps if self.schedule_steps is None else self.schedule_steps
        return self.optimization.guarded(self.optimization.estimator_of(steps, self.batching.batch_size))

    def with_steps(self, steps: int) -> TrainOptions:
        """The same run with another number of steps, on the learning rate that it was begun with."""
        if steps == self.steps:
            return self
        scheduled = self.steps if self.schedule_steps is None else self.schedule_steps
        return replace(self, steps=steps, schedule_steps=scheduled)

    def to_json(self) -> dict[str, Any]:
        """Give the options as JSON values; the run's own directory is left out, other paths are made absolute."""
        values = dataclasses.asdict(self)
        del values["output"]
        values |= values.pop("model_options")  # which have stood beside the others since the first runs
        if Path(self.model).is_dir():
            values["model"] = str(Path(self.model).resolve())
        for key in ("data", "evaluation", "architecture", "adapter"):
            values[key] = None if values[key] is None else str(Path(values[key]).resolve())
        if (path := function_file(self.objective)) is not None:
            values["objective"] = f"{path.resolve()}:{self.objective.rpartition(':')[2]}"
        return dict(json.loads(json.dumps(values, default=lambda value: value.value if isinstance(value, Enum) else value)))

    @classmethod
    def from_json(cls, values: dict[str, Any], output: Path) -> TrainOptions:
        """Undo ``to_json``.

        Raises:
            OptionError, TypeError, ValueError, KeyError: if the values are not those of a run.
        """
        if _EARLIER_TRANSFER_DTYPE in values:
            values = {**values, "transfer_dtype": values[_EARLIER_TRANSFER_DTYPE]}
            del values[_EARLIER_TRANSFER_DTYPE]
        beside = {own.name for own in dataclasses.fields(RunModelOptions)}
        values = {**values, "model_options": {name: values[name] for name in beside & values.keys()}}
        for kind, kept in ((cls, values), *((kind, values[name]) for name, kind in _GROUPS.items())):
            if missing := {own.name for own in dataclasses.fields(kind)} - kept.keys() - _LATER - {"output"}:
                raise KeyError(f"no {', '.join(sorted(missing))}")  # a default is not what the run was begun with
        values = {name: value for name, value in values.items() if name not in beside}
        optimization, model_options = dict(values.pop("optimization")), dict(values.pop("model_options"))
        first_order = FirstOrder(**values.pop("first_order", {}))
        optimization["decay"] = Decay(optimization["decay"])
        optimization["noise"] = Noise(optimization["noise"])
        model_options.setdefault("precision", "exact")  # that of runs of earlier versions
        values.setdefault("objective", MODEL_LOSS)
        optimization["estimator"] = EstimatorName(optimization.get("estimator", "mezo"))  # earlier runs had no other one
        optimization.setdefault("guard", False)  # runs of earlier versions have none
        for kept, name in ((values, "evaluation"), (model_options, "architecture"), (model_options, "adapter")):
            kept[name] = None if kept.get(name) is None else Path(kept[name])
        model_options["adapter_frozen"] = tuple(model_options.get("adapter_frozen", ()))
        options = cls(
            output=output,
            data=Path(values.pop("data")),
            model_options=RunModelOptions(**model_options),
            first_order=first_order,
            optimization=Optimization(**optimization),
            batching=Batching(**values.pop("batching")),
            storage=Storage(**values.pop("storage")),
            **values,
        )
        require_field_types(options)
        options.require_valid()
        return options


_GROUPS: dict[str, Any] = {
    "model_options": RunModelOptions,
    "optimization": Optimization,
    "batching": Batching,
    "storage": Storage,
}
_EARLIER_TRANSFER_DTYPE = "carried"  # in runs of earlier versions
_LATER = {
    *("architecture", "precision", "transfer_dtype", "schedule_steps", "estimator", "guard", "objective", "keep_best"),
    *("beta", "head", "report_to"),
    *("clip_grad", "clip_median", "write_limit_tb", "rank", "period", "stack", "per_row"),
    *("adapter", "adapter_frozen", "pack", "first_order"),
}
"""Options that runs of earlier versions have not written down."""


def _unused(option: str, found: str, expected: str) -> OptionError:
    return OptionError(option, found=found, expected=expected, remedy="leave one of the two out")
