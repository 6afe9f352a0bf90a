"""``zo2 plan``: print what a run would take in memory, disk and time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zo2adapters.commands.option_fields import option_names
from zo2adapters.commands.parsing import parse_options
from zo2adapters.commands.train import Train, arguments_of_recipe
from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.trainers.adapter_options import AdapterOptions
from zo2adapters.trainers.batching import Batching
from zo2adapters.trainers.first_order import FirstOrder, require_method, require_state_bits
from zo2adapters.trainers.model_options import ModelOptions, TransferName, precision_of_run
from zo2adapters.trainers.optimization import MOST_QUERIES, Directions, Optimization
from zo2adapters.trainers.option_table import require_effect
from zo2adapters.trainers.options import EvaluationOptions
from zo2core import BlockUpdate, SequentialNoise, WriteBackPolicy
from zo2core.errors import OptionError
from zo2core.optimizers import OptimizerName
from zo2core.perturbation import require_perturbation
from zo2core.planning.low_bit import Replay, choose_low_bit_transfer
from zo2core.planning.shared_runs import MOST_RUNS
from zo2core.ranges import require_whole

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # command lines are parsed without importing transformers
    from zo2adapters.trainers.batch_shapes import RowShapes
    from zo2adapters.trainers.device_run_plan import DeviceRunPlan
    from zo2adapters.trainers.run_plan import RunPlan
    from zo2adapters.trainers.shared_plan import SharedRunsPlan

MOST_WORKERS = 1024  # on one host
_PLANNED_OBJECTIVES = ("auto", "loss", "choice-loss", "accuracy", "f1", "dpo", "reward")  # which the rows determine


@dataclass(frozen=True, kw_only=True)
class Plan(EvaluationOptions):
    """Print what a run would take in memory, disk and time, without loading the model."""

    first_options: ClassVar = (
        "model",
        "data",
        "method",
        "lora_rank",
        "rank",
        "steps",
        "batch_size",
        "memory",
        "device_memory",
        "json",
    )

    model: str
    """Model directory with safetensors weights, a GGUF file, or a hub id."""
    model_options: ModelOptions = field(default_factory=ModelOptions)
    transfer_dtype: TransferName = "stored"
    """Dtype in which blocks are transferred to a GPU, as in zo2 train."""
    replay: Replay = "auto"
    """Where updates are replayed for a GPU, as in zo2 train."""
    memory: str = "auto"
    """Host memory that the whole run may take, such as 6GiB; auto is the free memory."""
    scratch: Path = Path()
    """Directory on the disk that the run would write to."""
    write_limit_tb: float | None = None
    """Terabytes that 1,000 steps may write to that disk, as in zo2 train."""
    device_memory: str | None = None
    """Memory of a GPU to plan for, such as 24GB. The GPU need not be in this machine."""
    bus: str = "25GB"
    """Bytes a second between host and GPU in each direction at the same time. The value is assumed, not measured."""
    json: bool = False
    """Print JSON instead of a table."""
    method: OptimizerName | None = None
    """Plan a run that trains an adapter, or all parameters, by gradients with this optimizer. By default, steps are
    zeroth-order."""
    stream_blocks: bool = False
    """With --method and no adapter: plan a run whose blocks stream from disk and change there, as in zo2 train."""
    snapshot_every: int | None = None
    """With --stream-blocks: steps between two commits, as in zo2 train."""
    switch_every: int | None = None
    """With --method badam: steps for which one block is trained, as in zo2 train."""
    delayed_update: bool = False
    """With --method adamw and no adapter: plan a run whose updates are one step late, as in zo2 train."""
    state_bits: int = 32
    """With --method adamw and no adapter: bits of the moments, as in zo2 train."""
    adapter_options: AdapterOptions = field(default_factory=AdapterOptions)
    directions: Directions = field(default_factory=Directions)
    data: Path | None = None
    """File to train on, as in zo2 train, whose rows are tokenised for their lengths. Without it every row is as long as
    --sequence-length."""
    rows: RowOptions = field(default_factory=RowOptions)
    runs: int | None = None
    """Number of equal runs that share their base, as with zo2 train --runs, for a plan of all: how many fit, what one more
    costs, and from how many on compute is the limit. They train an adapter, or take steps with --rank."""
    max_new_tokens: int | None = None
    """Plan a run with --reward, which generates so many tokens after each row's prompt."""
    steps: int = 1000
    """Steps of the run whose total time is printed."""
    workers: int = 1
    """Workers that torchrun starts on this host, which divide its free memory. The plan shows the memory of one of them, and
    times as without other workers."""
    batching: Batching = field(default_factory=Batching)

    @classmethod
    def with_recipe(cls, arguments: Sequence[str]) -> list[str]:
        """Keep those options that a plan depends on, of a recipe of zo2 train at the start and of other options of it.

        A line names what a run of the recipe takes beside the plan.

        Raises:
            OptionError: if the recipe cannot be read, or a plan does not know an option that changes what the run takes.
        """
        recipe = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else None
        later, of_train = list(arguments if recipe is None else arguments[1:]), {*option_names(Train)}
        given = [] if recipe is None else arguments_of_recipe(recipe)
        of_both = _of_options(later, of_train - {"runs"})  # which is a file there, and a number here
        later = _of_options(later, of_train - {*option_names(cls)}, is_kept=False)
        if recipe is None and len(later) == len(arguments):
            return later
        run: Train = parse_options("train", Train, [*given, *of_both])
        on_device = run.storage.device != "cpu"
        names_memory = run.storage.device_memory != "auto" or any(text.startswith("--device-memory") for text in later)
        for option, value, fits, expected in _unplanned(run, names_device=not on_device or names_memory):
            if not fits:
                where, remedy = f"{recipe}: {option}", "leave it out, or plan with options in place of the recipe"
                where, remedy = (f"--{option.replace('_', '-')}", "leave it out") if recipe is None else (where, remedy)
                raise OptionError(where, found=str(value), expected=expected, remedy=remedy)
        if beside := ", ".join(_beside_plan(run)):
            print(f"not in the plan: {beside}", file=sys.stderr)
        left_out = {"max_new_tokens", *(() if on_device and run.storage.device_memory != "auto" else ("device_memory",))}
        kept = _of_options(given, {*option_names(cls)} - left_out)
        kept += [f"--max-new-tokens={run.rewards.max_new_tokens}"] if run.rewards.reward else []
        if run.output is not None:
            parents = (run.output.absolute(), *run.output.absolute().parents)
            kept.append(f"--scratch={next(path for path in parents if path.is_dir())}")
        return [*kept, *later]

    def run(self) -> None:
        """Print the plan."""
        from zo2adapters.trainers.outlook import method_words

        write_back = WriteBackPolicy(directory=self.scratch, terabytes_per_1000_steps=self.write_limit_tb)
        self._require_consistent()
        planned: Any = self._zeroth_order(write_back) if self.method is None else self._first_order(self.method)
        if self.runs is not None:
            planned = self._shared(planned, self.runs)
        method = f"{method_words(self.adapter_options, self.method)}: {self.steps} steps of {self.batching.batch_size} rows"
        print(planned.to_json() if self.json else "\n".join([method, *planned.summary(), "", planned.table()]))

    def _shared(self, run: RunPlan, runs: int) -> SharedRunsPlan:
        """The plan of several runs that share their base."""
        from zo2adapters.trainers.first_order_plan import measured_graph_bytes
        from zo2adapters.trainers.methods.first_order_run import reserved_bytes
        from zo2adapters.trainers.run_plan import step_memory
        from zo2adapters.trainers.shared_plan import needs_of, plan_shared_runs

        optimization, is_first_order, graph_bytes = Optimization(**vars(self.directions)), self.method is not None, 0
        model, directory = self._opened(precision="exact")
        shapes = self._shapes(model, directory)
        if is_first_order:
            activations, least = reserved_bytes(model, shapes.longest.rows, round(shapes.longest.tokens), shapes.micro_rows)
            graph_bytes = measured_graph_bytes(model, shapes.step)
        else:
            given: Any = {"new_tokens": self.max_new_tokens}
            activations = least = step_memory(model, shapes.longest, optimization, shapes.micro_rows, **given).nbytes
        needs = needs_of(model, activations, least, None if is_first_order else optimization.perturbation)
        base = self if not self.adapter_options.trains_adapter else replace(self, adapter_options=AdapterOptions())
        base_model, _ = base._opened(precision="exact")
        given = {"runs": runs, "memory": self.memory, "passes": 2 if is_first_order else 1, "graph_bytes": graph_bytes}
        return plan_shared_runs(base_model, run, needs, **given)

    def _require_consistent(self) -> None:
        """Refuse options that are out of range, or have no effect together."""
        require_whole("queries", self.directions.queries, 1, MOST_QUERIES)
        require_whole("workers", self.workers, 1, MOST_WORKERS)
        if self.workers > 1 and self.device_memory is not None:
            raise OptionError(
                "workers",
                found=f"{self.workers} with --device-memory",
                expected="1, since each worker has its own GPU",
                remedy="leave one of the two out",
            )
        if self.runs is not None:
            require_whole("runs", self.runs, 1, MOST_RUNS)
            reads_only = self.directions.rank is not None or self.adapter_options.trains_adapter
            if self.workers > 1 or self.device_memory is not None or not reads_only:
                raise OptionError(
                    "runs",
                    found=f"{self.runs} with all weights trained, --workers or --device-memory",
                    expected="runs on the CPU that only read the weights",
                    remedy="pass --rank 8 or --lora-rank 8, and leave the other options out",
                )
        self.require_valid()
        for option in ("evaluation", "eval_split", "evaluate_every"):
            if getattr(self, option) is not None and (self.data is None or not self.evaluates):
                raise OptionError(
                    option,
                    found=f"{getattr(self, option)} without the rows",
                    expected="--data, with --evaluation or --eval-split",
                    remedy="pass the rows, or leave it out",
                )
        require_whole("steps", self.steps, 1)
        if self.max_new_tokens is not None:
            require_whole("max_new_tokens", self.max_new_tokens, 1)
        self.rows.require_valid(takes_labels=self.model_options.head != "causal-lm")
        self.adapter_options.require_valid()
        require_effect(self, self.method, trains_adapter=self.adapter_options.trains_adapter)
        if self.snapshot_every is not None and not (self.stream_blocks and self.method != "badam"):
            found, expected = str(self.snapshot_every), "--stream-blocks, and not badam"
            raise OptionError("snapshot_every", found=found, expected=expected, remedy="leave it out")
        require_state_bits(self.state_bits)
        require_whole("snapshot_every", self.snapshot_every or 1, 1)

    def _zeroth_order(self, write_back: WriteBackPolicy) -> RunPlan | DeviceRunPlan:
        """The plan of a run of zeroth-order steps, on the CPU or on a GPU."""
        from zo2adapters.trainers.device_run_plan import plan_device_run
        from zo2adapters.trainers.run_plan import plan_run

        optimization = Optimization(**vars(self.directions))
        optimization.require_consistent()
        on_cpu, has_adapter = self.device_memory is None, self.adapter_options.trains_adapter
        exact = optimization.exact_mezo or optimization.rank is not None or has_adapter
        precision = precision_of_run(self.model_options.precision, exact_mezo=exact, on_cpu=on_cpu)
        model, directory = self._opened(precision=precision, transfer_dtype=self.transfer_dtype)
        shapes = self._shapes(model, directory)._replace(new_tokens=self.max_new_tokens)
        drawn = optimization.generator(model.layouts) or SequentialNoise(model.layouts)
        require_perturbation(optimization.perturbation, model, optimization.estimator_of(1), drawn, replay=self.replay)
        if self.device_memory is not None:
            return plan_device_run(
                model,
                shapes,
                optimization,
                memory=self.memory,
                device_memory=self.device_memory,
                bus=self.bus,
                write_limit_tb=self.write_limit_tb,
                replay=self.replay,
            )
        choose_low_bit_transfer(self.replay, model.layouts, drawn, in_place=True)  # refuses a replay that is not possible
        return plan_run(
            model,
            shapes,
            optimization,
            memory=self.memory,
            write_back=write_back,
            workers=self.workers,
            steps=self.steps,
            evaluations=self.evaluations(self.steps),
        )

    def _first_order(self, method: OptimizerName) -> RunPlan:
        """The plan of a run that trains by gradients.

        Raises:
            OptionError: if the method does not train the adapter, or an option has no effect on such a run.
        """
        from zo2adapters.trainers.first_order_plan import plan_first_order_run

        require_method(method, self.adapter_options)
        for option in ("device_memory", "workers"):
            if getattr(self, option) != getattr(Plan(model=self.model), option):
                expected = "no --method: it has no effect otherwise"
                raise OptionError(option, found=str(getattr(self, option)), expected=expected, remedy="leave it out")
        model, directory = self._opened(precision=self.model_options.precision)
        return plan_first_order_run(
            model,
            self._shapes(model, directory),
            memory=self.memory,
            steps=self.steps,
            evaluations=self.evaluations(self.steps),
            update=None if self.adapter_options.trains_adapter else self._update(method),
            scratch=self.scratch,
            streams=self.stream_blocks,
            commit_every=self.snapshot_every or 1,
            write_limit_tb=self.write_limit_tb,
        )

    def _opened(self, **options: Any) -> tuple[HFBlockModel, Path]:
        """The model, opened with these options as well, and its directory."""
        from zo2adapters.models.checkpoint import open_checkpoint, resolve_directory

        self.batching.require_valid()
        directory, opening = resolve_directory(self.model), self.model_options
        model = open_checkpoint(
            directory,
            head=opening.head,
            architecture=opening.architecture,
            dtype=opening.dtype,
            adapter=self.adapter_options.adapter_of(opening.head),
            loss_chunk=self.batching.loss_chunk or "auto",
            **options,
        )
        return model, directory

    def _update(self, method: OptimizerName) -> BlockUpdate:
        options = FirstOrder(
            method=method,
            switch_every=self.switch_every,
            delayed_update=self.delayed_update,
            state_bits=self.state_bits,
        )
        return options.block_update(weight_decay=0.0)

    def _shapes(self, model: HFBlockModel, directory: Path) -> RowShapes:
        """The shapes of the run's batches, from its rows if they are given."""
        from zo2adapters.tasks.row_files import DataFiles
        from zo2adapters.tasks.tokenizer import load_tokenizer
        from zo2adapters.trainers.batch_shapes import RowShapes

        length = self.batching.length_for(model)
        if self.data is None:
            return RowShapes.of_length(self.batching, length)
        labelled_for = None if self.model_options.head == "causal-lm" else model.config
        options: dict[str, Any] = {"sequence_length": length, "labelled_for": labelled_for}
        options["tokenizer"] = load_tokenizer(directory)
        data, evaluation = DataFiles(self.data, self.evaluation, self.rows, self.eval_split, self.eval_seed).read(**options)
        return RowShapes.of_rows(self.batching, data, evaluation, seed=0)


def _unplanned(run: Train, *, names_device: bool) -> Iterator[tuple[str, object, bool, str]]:
    """Options of a run that change what it takes, and that a plan does not have.

    Yields:
        Name, value, whether the plan is right with it, and the expected value.
    """
    trains_all = run.first_order.method is not None and not run.model_options.trains_adapter
    yield "model", run.model, run.model is not None, "a model"
    for option in ("resume", "from_step", "task", "runs"):
        value = getattr(run, option)
        yield option, value, value is None, "none for a plan, which is that of a whole run"
    yield "device", run.storage.device, names_device, "cpu, or device_memory beside it, whose size the plan needs"
    yield "objective", run.objective, run.objective in _PLANNED_OBJECTIVES, f"one of {', '.join(_PLANNED_OBJECTIVES)}"
    every, reserved = run.storage.write_back_every, run.storage.activation_memory
    yield "write_back_every", every, every == "auto", "auto, which is what a plan chooses"
    yield "activation_memory", reserved, reserved is None, "none: a plan reserves what a step needs"
    in_place = run.optimization.perturb_in_place
    yield "perturb_in_place", in_place, not in_place or run.optimization.exact_mezo, "false, or exact_mezo"
    momentum = run.first_order.momentum
    yield "momentum", momentum, not (momentum and trains_all), "none for a plan of all parameters, which has no momentum"


def _beside_plan(run: Train) -> Iterator[str]:
    """What a run takes that its plan does not count, in words."""
    if run.optimization.lr == "auto":
        yield "the short runs that choose lr (those of an adapter or with --rank run together: --runs 3 plans three)"
    if run.samples:
        yield f"the answers to {run.samples} samples"
    if run.first_order.max_grad_norm is not None and not run.model_options.trains_adapter:
        yield "a second sweep of each step for max_grad_norm"


def _of_options(arguments: Sequence[str], names: set[str], *, is_kept: bool = True) -> list[str]:
    """The arguments of these options, or all others: each is an option, followed by its values."""
    kept, is_named = list[str](), False
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
            is_named = name in names or name.removeprefix("no_") in names
        kept += [argument] if is_named is is_kept else []
    return kept
