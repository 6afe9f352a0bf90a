"""Options of a fine-tuning run, and their JSON form in the run's directory."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from zo2adapters.tasks.registry import AUTO, MODEL_LOSS, REWARD, function_file, names_model_loss
from zo2adapters.tasks.reward_options import RewardOptions
from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.tasks.row_source import saved_path
from zo2adapters.trainers.batching import MOST_ROWS, Batching
from zo2adapters.trainers.field_types import require_field_types
from zo2adapters.trainers.first_order import FirstOrder
from zo2adapters.trainers.live_metrics import TrackerName
from zo2adapters.trainers.lr_schedules import Decay, LearningRate
from zo2adapters.trainers.model_options import DtypeName, PrecisionName, RunModelOptions, precision_of_run
from zo2adapters.trainers.optimization import Noise, Optimization
from zo2core import BlockUpdate, ZOEstimator
from zo2core.errors import OptionError
from zo2core.estimators import EstimatorName, Fitness
from zo2core.planning.host_budget import parse_size
from zo2core.planning.low_bit import Replay
from zo2core.ranges import LARGEST, require_number, require_whole

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # a command line is read without transformers
    from zo2adapters.tasks.row_files import DataFiles


def evaluations_due(steps: int, every: int | None, *, version: int = 0) -> int:
    """Number of evaluations still due: before the first step, after every ``every`` steps, and after the last step.

    Args:
        steps: Steps of the run.
        every: Steps between two evaluations; None: only the first and the last one.
        version: Steps taken so far; an evaluation due at this step is counted.
    """
    if version > steps:
        return 0
    between = 0 if every is None else (steps - 1) // every - max(version - 1, 0) // every
    return between + (version == 0) + 1


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Limits on what a process uses of this machine."""

    memory: str = "auto"
    """Host memory the process may use in total, such as 6GiB; auto uses what is free. Blocks that do not fit are streamed
    from disk."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda or cuda:N. A resumed run keeps its device, since a GPU rounds differently."""
    device_memory: str = "auto"
    """Device memory the run may use, such as 8GiB; auto uses what is free. Blocks that fit stay on the device; activations
    that do not fit are offloaded to host memory."""


@dataclass(frozen=True, kw_only=True)
class Storage(Resources):
    """Where the weights are kept, and how often they are written."""

    write_back_every: int | Literal["auto", "never"] = "auto"
    """Steps between two writes of a block to the run's scratch file; in between, updates are replayed. auto measures noise
    and disk and chooses the longest interval whose replays cost at most a tenth of a step. With --rank blocks are never
    written; auto writes the factors of each finished period, never does not."""
    write_limit_tb: float | None = None
    """Terabytes that 1,000 steps may write, since writing wears disks out. auto obeys this limit; a run with --rank whose
    finished periods need more writes none of them. With --method and no adapter it limits snapshots."""
    snapshot_every: int | None = None
    """Largest number of steps that a resumed run has to replay, plus one or two after a crash. With --method: steps between
    two snapshots; by default one a minute is taken, or fewer if they took more than 2 % of the time."""
    activation_memory: str | None = None
    """Memory reserved for activations, such as 1GiB, in host memory on the CPU and in device memory on a GPU. Evaluations
    process as many batches in a pass over the blocks as fit in it. By default it is what a step needs."""

    def require_valid(self) -> None:
        """Check numbers of steps and sizes of memory."""
        if isinstance(self.write_back_every, int):
            require_whole("write_back_every", self.write_back_every, 1, otherwise=", or auto or never")
        if self.snapshot_every is not None:
            require_whole("snapshot_every", self.snapshot_every, 1)
        for option in ("memory", "device_memory", "activation_memory"):
            value = getattr(self, option)
            if value is not None and (value != "auto" or option == "activation_memory"):
                parse_size(value, option=option)


class Order(Enum):
    """Order of transfers and compute."""

    OVERLAPPED = "overlapped"
    SERIAL = "serial"


class TrainedState(Enum):
    """Where a run keeps what it trains."""

    JOURNAL = "the updates of zeroth-order steps, which give the weights of every step"
    ADAPTER = "an adapter in memory, with snapshots"
    MEMORY = "all parameters in memory, with snapshots"
    DISK = "all parameters in blocks on disk, which change there"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How this process executes a run. The result has the same bits, so a resumed run may change these."""

    trace: Path | None = None
    """New file for a timeline of every pass over the blocks, for ui.perfetto.dev: when the run read, transferred, computed
    and wrote, and how many bytes."""
    verify_base: bool = False
    """Read the whole base checkpoint before the first step, and compare it with the digests in the journal."""
    replay: Replay = "auto"
    """Where updates are replayed for a GPU: on the GPU, or on the host, which needs no transfers back. auto uses the GPU
    where it can."""
    scheduler: Order = Order.OVERLAPPED
    """Order of transfers and compute. serial overlaps nothing and keeps no block on the device; use it to compare."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """The rows that a run is evaluated on, and when."""

    evaluation: Path | None = None
    """File to evaluate on, before the first step and after the last one."""
    eval_split: float | None = None
    """Share of the training rows, such as 0.1, that is evaluated on instead of trained on, if there is no --evaluation."""
    eval_seed: int = 0
    """Seed with which --eval-split chooses the rows."""
    evaluate_every: int | None = None
    """Steps between two evaluations."""

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to evaluate on."""
        return self.evaluation is not None or self.eval_split is not None

    def evaluations(self, steps: int) -> int:
        """Number of evaluations of a run of so many steps."""
        return evaluations_due(steps, self.evaluate_every) if self.evaluates else 0

    def require_valid(self) -> None:
        """Check the options that do not depend on the data.

        Raises:
            OptionError: naming the option.
        """
        if self.eval_split is not None:
            if self.evaluation is not None:
                raise _conflict("eval_split", "--evaluation", "one source of rows to evaluate on")
            require_number("eval_split", self.eval_split, above=0, below=1, remedy="pass a share such as 0.1")
        require_whole("eval_seed", self.eval_seed, -LARGEST, LARGEST)
        if self.evaluate_every is not None:
            require_whole("evaluate_every", self.evaluate_every, 1)
            if not self.evaluates:
                found, remedy = f"{self.evaluate_every} without the rows", "pass the rows, or leave it out"
                raise OptionError("evaluate_every", found=found, expected="--evaluation or --eval-split", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class RunOptions(EvaluationOptions):
    """Optional settings of a fine-tuning run."""

    samples: int = 0
    """Number of rows whose prompts the model answers before and after training: the first rows to evaluate on or, without
    these, to train on. The answers are in samples.jsonl, and zo2 report shows them; each token takes a pass over the
    blocks."""
    objective: str = AUTO
    """Objective to minimize. loss is the model's own loss, for rows with candidates that of the right one. For these, too:
    choice-loss is MeZO's loss over the candidates, accuracy and f1 have no gradient. For rows with chosen and rejected
    completions: dpo, with the base model as reference. exact-match is the share of completions that the model does not
    generate. FILE.py:function is a function of the model and a batch. auto is choice-loss for rows with candidates, dpo for
    preferences, and loss otherwise."""
    beta: float | None = None
    """Strength of the penalty for moving away from the base, in dpo; by default 0.1."""
    keep_best: bool = False
    """Export the model of the step with the best evaluation instead of the last step's."""
    report_to: TrackerName = "none"
    """Tracker that also gets the rows of metrics.jsonl: tensorboard or wandb, if installed."""
    steps: int = 1000
    """Training steps. Each takes two forward passes per query; with --method the time of three, four for all parameters."""
    seed: int = 0
    """Seed of the order of rows, of random directions, and of the first values of a new adapter."""
    rows: RowOptions = field(default_factory=RowOptions)
    rewards: RewardOptions = field(default_factory=RewardOptions)
    model_options: RunModelOptions = field(default_factory=RunModelOptions)
    first_order: FirstOrder = field(default_factory=FirstOrder)
    optimization: Optimization = field(default_factory=Optimization)
    batching: Batching = field(default_factory=Batching)
    storage: Storage = field(default_factory=Storage)

    def of_run(self, *, model: str, data: Path, output: Path) -> TrainOptions:
        """These options, for a run of this model on these rows in this directory."""
        given = {option.name: getattr(self, option.name) for option in dataclasses.fields(RunOptions)}
        return TrainOptions(model=model, data=data, output=output, **given)

    @property
    def takes_labels(self) -> bool:
        """Whether rows are texts with labels."""
        return self.model_options.head != "causal-lm"

    @property
    def state(self) -> TrainedState:
        """Where the run keeps what it trains."""
        if self.first_order.method is None:
            return TrainedState.JOURNAL
        if self.model_options.trains_adapter:
            return TrainedState.ADAPTER
        return TrainedState.DISK if self.first_order.stream_blocks else TrainedState.MEMORY

    @property
    def commit_every(self) -> int:
        """Steps between two commits of blocks that change on disk."""
        return self.storage.snapshot_every or 1

    def update(self) -> BlockUpdate:
        """A new optimizer of all parameters."""
        weight_decay, seed = self.optimization.weight_decay, self.seed % (1 << 62)
        return self.first_order.block_update(weight_decay=weight_decay, seed=seed)

    def with_rate(self, lr: float | Literal["auto"]) -> Self:
        """The same run with another peak learning rate."""
        return replace(self, optimization=replace(self.optimization, lr=lr))

    @property
    def own_functions(self) -> tuple[str, str] | None:
        """The option that names functions of the user's own, and its value; None: there are none."""
        if any(name.file is not None for name in self.rewards.names):
            return "reward", " ".join(self.rewards.reward)
        return None if function_file(self.objective) is None else ("objective", self.objective)

    def require_valid(self) -> None:
        """Check the options that depend on neither model nor data."""
        super().require_valid()
        require_whole("steps", self.steps, 1)
        if self.beta is not None:
            require_number("beta", self.beta, above=0)
        if self.keep_best and not self.evaluates:
            raise OptionError(
                "keep_best",
                found="True without rows to evaluate on",
                expected="--evaluation or --eval-split",
                remedy="pass --evaluation or --eval-split, or leave it out",
            )
        require_whole("samples", self.samples, 0, MOST_ROWS)
        if self.samples and self.takes_labels:
            raise _conflict("samples", f"--head {self.model_options.head}", "a causal language model")
        self.rewards.require_valid()
        if self.rewards.reward:
            self._require_rewards()
        elif self.objective == REWARD:
            raise OptionError(
                "objective", found=REWARD, expected="--reward, which names the rewards", remedy="pass --reward instead"
            )
        self.rows.require_valid(takes_labels=self.takes_labels)
        if self.optimization.per_row and not names_model_loss(self.objective):
            raise _conflict("per_row", f"--objective {self.objective}", "loss, which each row has separately")
        if self.takes_labels:
            if not names_model_loss(self.objective):
                raise _conflict(
                    "objective", f"{self.objective} with --head {self.model_options.head}", "the model's own loss"
                )
            if self.beta is not None:
                raise _conflict("beta", f"{self.beta} with --head {self.model_options.head}", "the model's own loss")
            if self.batching.pack:
                raise _conflict("pack", f"--head {self.model_options.head}", "a causal language model")
            if self.optimization.per_row:
                raise _conflict("per_row", f"--head {self.model_options.head}", "a causal language model")
        if self.optimization.per_row and self.batching.pack:
            raise _conflict("per_row", "--pack", "padded rows, whose losses can be told apart")
        if self.optimization.per_row and self.batching.micro_batch_size is not None:
            raise _conflict("per_row", "--micro-batch-size", "whole batches")
        if self.optimization.rank is not None and self.storage.snapshot_every is not None:
            raise _conflict("rank", "--snapshot-every", "no snapshots, because no weights change")
        self.first_order.require_valid(self)
        has_snapshots = not self.model_options.trains_adapter or self.first_order.method is not None
        if self.storage.snapshot_every is not None and not has_snapshots:
            raise _conflict(
                self.model_options.adapter_option,
                "--snapshot-every",
                "no snapshots, because only parameters in memory change",
            )
        self.model_options.require_valid()
        require_whole("seed", self.seed, -LARGEST, LARGEST)
        self.batching.require_valid()
        self.storage.require_valid()

    def _require_rewards(self) -> None:
        """Refuse options that a run with rewards cannot have."""
        if self.objective not in (AUTO, REWARD):
            raise _conflict("reward", f"--objective {self.objective}", "one objective")
        if self.takes_labels:
            raise _conflict("reward", f"--head {self.model_options.head}", "a causal language model")
        if self.batching.micro_batch_size is not None:
            raise _conflict("micro_batch_size", "--reward", "rows that run at a time as memory allows")
        if self.first_order.method is not None:
            raise _conflict("reward", f"--method {self.first_order.method}", "zeroth-order steps; GRPO needs TRL's trainer")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """All options of a fine-tuning run."""

    model: str
    """Model directory with safetensors weights, a GGUF file, or a hub id."""
    data: Path
    """File of rows, each of which has text, or prompt and completion (loss on the completion only), or messages."""
    output: Path
    """Directory for the run: journal.jsonl, metrics.jsonl and, at the end, model/. It must be new or empty."""
    schedule_steps: int | None = None
    """Steps over which the learning rate was scheduled; None: ``steps``. A run that was lengthened has more ``steps``."""

    @property
    def resume_command(self) -> str:
        """The command that continues the run. The run's own functions are named in it: a directory does not start code."""
        own = self.own_functions
        return f"zo2 train --resume {self.output}" + ("" if own is None else f" --{own[0]} {own[1]}")

    def precision_asked(self) -> PrecisionName:
        """Precision to open the model in."""
        model_options, on_cpu = self.model_options, self.storage.device == "cpu"
        # Factors and adapters are float32 in either precision.
        exact = self.optimization.exact_mezo or self.optimization.rank is not None or model_options.trains_adapter
        return precision_of_run(model_options.precision, exact_mezo=exact, on_cpu=on_cpu)

    def files(self) -> DataFiles:
        """The files of rows, and how they are read."""
        from zo2adapters.tasks.row_files import DataFiles  # a command line is read without transformers

        return DataFiles(self.data, self.evaluation, self.rows, self.eval_split, self.eval_seed, bool(self.rewards.reward))

    def opened(self, directory: Path) -> HFBlockModel:
        """Open the run's model from its directory."""
        model_options = replace(self.model_options, precision=self.precision_asked())
        return model_options.opened(directory, seed=self.seed, base=self.model, loss_chunk=self.batching.loss_chunk)

    def settled(self, model: HFBlockModel) -> TrainOptions:
        """Replace what was chosen for this machine, or left out, by its value, so that a resumed run computes the same."""
        named = self._with_defaults()
        if model.autocast is None:
            return replace(named, model_options=replace(named.model_options, precision="exact"))
        computed = cast("DtypeName", str(model.autocast).removeprefix("torch."))
        return replace(
            named,
            model_options=replace(named.model_options, precision="mixed", dtype=computed),
            batching=replace(self.batching, loss_chunk=model.loss_chunk),
        )

    def settled_as(self, saved: TrainOptions) -> TrainOptions:
        """Replace what was left out by its value in a run, as it was settled when the run began."""
        named, kept = self._with_defaults(), saved.model_options
        model_options, batching = named.model_options, named.batching
        if model_options.precision == "auto":
            model_options = replace(model_options, precision=kept.precision)
        if model_options.dtype == "auto":
            model_options = replace(model_options, dtype=kept.dtype)
        if batching.loss_chunk is None:
            batching = replace(batching, loss_chunk=saved.batching.loss_chunk)
        return replace(named, model_options=model_options, batching=batching)

    def _with_defaults(self) -> TrainOptions:
        """Replace what was left out by its value, where this depends on neither model nor machine."""
        objective = REWARD if self.rewards.reward else self.objective
        model_options = self.model_options.with_lora_defaults()
        return replace(self, objective=objective, rewards=self.rewards.absolute(), model_options=model_options)

    def require_valid(self) -> None:
        """Check the options as above, and refuse to lengthen a run whose learning rate decays."""
        super().require_valid()
        scheduled = self.schedule_steps
        if scheduled not in (None, self.steps) and self.optimization.decay is not Decay.CONSTANT:
            raise OptionError(
                "steps",
                found=str(self.steps),
                expected=f"{scheduled}, the steps of this run's {self.optimization.decay.value} schedule",
                remedy="leave it out, or start a new run, with --adapter RUN/model if this one trains an adapter; only a "
                "run with constant lr can be lengthened",
            )

    def estimator(self) -> ZOEstimator:
        """The estimator of the run, with its clipping and guard.

        Raises:
            OptionError: if a number is out of range, or options cannot be combined.
        """
        return self.optimization.guarded(self.optimization.estimator_of(self.scheduled_steps, self.batching.batch_size))

    def learning_rate(self) -> LearningRate:
        """The learning rate of each step.

        Raises:
            OptionError: if the warm-up is not shorter than the run.
        """
        return self.optimization.learning_rate(self.scheduled_steps)

    @property
    def scheduled_steps(self) -> int:
        """Steps over which the learning rate is scheduled."""
        return self.steps if self.schedule_steps is None else self.schedule_steps

    def with_steps(self, steps: int) -> TrainOptions:
        """The same run with another number of steps and an unchanged learning-rate schedule."""
        return self if steps == self.steps else replace(self, steps=steps, schedule_steps=self.scheduled_steps)

    def to_json(self) -> dict[str, Any]:
        """The options as JSON values, without the run's own directory and with other paths made absolute."""
        values = dataclasses.asdict(self)
        del values["output"]
        values |= values.pop("model_options")  # on the top level, as in the first version
        if Path(self.model).exists():
            values["model"] = str(Path(self.model).resolve())
        for key in ("data", "evaluation"):
            values[key] = None if values[key] is None else saved_path(Path(values[key]))
        for key in ("architecture", "adapter"):
            values[key] = None if values[key] is None else str(Path(values[key]).resolve())
        values["rewards"] = dataclasses.asdict(self.rewards.absolute())
        if (path := function_file(self.objective)) is not None:
            values["objective"] = f"{path.resolve()}:{self.objective.rpartition(':')[2]}"
        return dict(json.loads(json.dumps(values, default=lambda value: value.value if isinstance(value, Enum) else value)))

    @classmethod
    def from_json(cls, values: dict[str, Any], output: Path) -> TrainOptions:
        """Convert the values of ``to_json`` back to options.

        Raises:
            OptionError, TypeError, ValueError, KeyError: if the values are not the options of a run.
        """
        if _EARLIER_TRANSFER_DTYPE in values:
            values = {**values, "transfer_dtype": values[_EARLIER_TRANSFER_DTYPE]}
            del values[_EARLIER_TRANSFER_DTYPE]
        model_names = {option.name for option in dataclasses.fields(RunModelOptions)}
        values = {**values, "model_options": {name: values[name] for name in model_names & values.keys()}}
        for kind, group in ((cls, values), *((kind, values[name]) for name, kind in _GROUPS.items())):
            # The run may have begun with another value than the default.
            if missing := {option.name for option in dataclasses.fields(kind)} - group.keys() - _LATER - {"output"}:
                raise KeyError(f"no {', '.join(sorted(missing))}")
        values = {name: value for name, value in values.items() if name not in model_names}
        optimization, model_options = dict(values.pop("optimization")), dict(values.pop("model_options"))
        first_order = FirstOrder.from_json(values.pop("first_order", {}))
        rows = dict(values.pop("rows", {"train_on": "all"}))  # runs of earlier versions learned all tokens of messages
        rows["labels"] = tuple(rows.get("labels", ()))
        rewards = dict(values.pop("rewards", {}))
        rewards["reward"] = tuple(rewards.get("reward", ()))
        optimization["decay"] = Decay(optimization["decay"])
        optimization["noise"] = Noise(optimization["noise"])
        # What runs of earlier versions did where they saved no option.
        model_options.setdefault("precision", "exact")
        values.setdefault("objective", MODEL_LOSS)
        optimization["estimator"] = EstimatorName(optimization.get("estimator", "mezo"))
        optimization.setdefault("guard", False)
        optimization["fitness"] = Fitness(optimization.get("fitness", "scaled"))
        for group, name in ((values, "evaluation"), (model_options, "architecture"), (model_options, "adapter")):
            group[name] = None if group.get(name) is None else Path(group[name])
        for name in ("adapter_frozen", "lora_targets"):
            model_options[name] = tuple(model_options.get(name, ()))
        options = cls(
            output=output,
            data=Path(values.pop("data")),
            rows=RowOptions(**rows),
            rewards=RewardOptions(**rewards),
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
    *("adapter", "adapter_frozen", "lora_rank", "lora_targets", "lora_alpha", "pack", "first_order"),
    *("rows", "eval_split", "eval_seed", "samples", "rewards", "fitness"),
}
"""Options that runs of earlier versions did not save."""


def _conflict(option: str, found: str, expected: str) -> OptionError:
    return OptionError(option, found=found, expected=expected, remedy="leave one of the two out")
