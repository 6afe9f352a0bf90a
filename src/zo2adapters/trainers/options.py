"""Options of a fine-tuning run, and their JSON form in the run's directory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Self,
    TypeAlias,
    Union,
    get_args,
    get_origin,
)

from zo2adapters.models.model_files import saved_model
from zo2adapters.optional_package import optional_package, require_package
from zo2adapters.tasks.option_tree import (
    ADAPTERS,
    ADAPTERS_ALONE,
    BOTH,
    MOST_ROWS,
    SNAPSHOTS,
    TRANSFERS,
    WRITES,
    WRITES_BACK,
    Change,
    MethodName,
    Option,
    Refusal,
    declared,
    filled,
    flat,
    leaves,
    number,
    refuse,
    shown,
    size,
    whole,
)
from zo2adapters.tasks.registry import (
    AUTO,
    REWARD,
    function_file,
    require_evaluation,
    require_task,
)
from zo2adapters.tasks.rewards import RewardOptions
from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2adapters.tasks.row_source import saved_path
from zo2adapters.trainers.optimization import (
    DEFAULT_RATES,
    Decay,
    LearningRate,
    Optimization,
)
from zo2adapters.trainers.option_checks import require_valid
from zo2core.errors import OptionError, without_effect
from zo2core.ranges import (
    LARGEST_WHOLE,
    MatmulPrecision,
    require_whole,
)

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # a command line is read without transformers
    from zo2adapters.models.peft_adapter import Adapter
    from zo2core import ZOEstimator


# every linear layer before the head and outside experts, and a mixture's experts
EVERY, EXPERTS = "auto", "experts"
ALL_LINEAR = "all-linear"  # what peft makes of this name
LORA_RANK = 8  # by default


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """The adapter that is trained instead of the weights."""

    adapter: Annotated[
        Path | None, Option("model", Change.MOVED, decides=True, effect=ADAPTERS)
    ] = None
    """peft adapter (LoRA, DoRA, prefix tuning) to train instead of the weights, which are then only
    read, unless --method lora+lomo trains them, too. Pass a directory with a saved adapter, or an
    adapter_config.json as peft writes it to start a new one. Exports are adapters.
    """
    adapter_frozen: Annotated[
        tuple[str, ...],
        Option(
            "model",
            needs=("adapter", "lora_rank"),
            library=("adapter.frozen",),
            effect=ADAPTERS_ALONE,
        ),
    ] = ()
    """With an adapter: parameters whose names contain one of these parts are not trained, such as
    lora_A for LoRA-FA.
    """
    lora_rank: Annotated[
        int | None,
        Option(
            "model",
            check=whole(1),
            excludes={
                "adapter": (
                    "one adapter: --lora-rank starts a new one, --adapter takes that of a file"
                )
            },
            elsewhere=("lora_r",),
            decides=True,
            effect=ADAPTERS,
        ),
    ] = None
    """Train a new LoRA adapter of this rank, peft's LoraConfig(r=8). --adapter takes other configs.
    By default 8 with --method lora or lora+lomo, and no adapter with other methods.
    """
    lora_targets: Annotated[
        tuple[str, ...],
        Option("model", needs=("lora_rank",), elsewhere=("target_modules",), effect=ADAPTERS),
    ] = ()
    """With --lora-rank: names of the layers that get an adapter, such as q_proj v_proj.

    By default auto, which is every linear layer but the output layer of a language model, and of a
    mixture those outside its experts and routers; layers that the forward never calls or that peft
    refuses are left out. auto experts is these and the experts. all-linear is what peft makes of
    it: of some mixtures the experts, too.
    """
    lora_alpha: Annotated[
        int | None, Option("model", check=whole(1), needs=("lora_rank",), effect=ADAPTERS)
    ] = None
    """With --lora-rank: peft's lora_alpha, which scales the adapter by alpha / rank.

    By default twice the rank.
    """

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter is trained."""
        return self.adapter is not None or self.lora_rank is not None

    @property
    def adapter_name(self) -> str | None:
        """The adapter as text, for messages; None: there is none."""
        return (
            str(self.adapter or f"LoRA of rank {self.lora_rank}") if self.trains_adapter else None
        )

    def require_valid(self) -> None:
        """Refuse what the table refuses, and names of layers that are no list."""
        require_valid(self)
        targets = set(self.lora_targets)
        names = " ".join(self.lora_targets)
        apart = " ".join(names.replace(",", " ").replace(ALL_LINEAR, " ").split())
        others = " ".join(name for name in self.lora_targets if name != EVERY)
        refuse(
            Refusal(
                "," in names or (ALL_LINEAR in targets and len(self.lora_targets) > 1),
                "lora_targets",
                names,
                f"{ALL_LINEAR} alone, or names with spaces between them",
                f"write {apart}",
            ),
            Refusal(
                EVERY in targets and not targets <= {EVERY, EXPERTS},
                "lora_targets",
                names,
                f"{EVERY}, {EVERY} {EXPERTS}, or names of layers",
                f"write {others}",
            ),
        )

    def of_method(self, method: MethodName) -> Self:
        """The options with the adapter that the method trains if none is named."""
        if method not in ("lora", BOTH) or self.trains_adapter:
            return self
        return replace(self, lora_rank=LORA_RANK)

    def without_adapter(self) -> Self:
        """The options of the base alone."""
        return replace(self, **vars(AdapterOptions()))

    def with_lora_defaults(self) -> Self:
        """The options with the values that stand for those that were left out."""
        if self.lora_rank is None:
            return self
        return replace(
            self,
            lora_targets=self.lora_targets or (EVERY,),
            lora_alpha=self.lora_alpha or 2 * self.lora_rank,
        )

    def adapter_of(
        self,
        head: str,
        *,
        seed: int = 0,
        base: str | None = None,
        is_trained: bool = True,
        trains_base: bool = False,
    ) -> Adapter | None:
        """The adapter to open the model with; None: the weights alone are trained."""
        if not self.trains_adapter:
            return None
        from zo2adapters.models.peft_adapter import Adapter

        config = self.adapter if self.lora_rank is None else self._lora_config(head)
        if base is not None and Path(base).is_dir():
            base = str(Path(base).resolve())
        return Adapter(
            config=config,
            frozen=self.adapter_frozen,
            seed=seed,
            base=base,
            is_trained=is_trained,
            trains_base=trains_base,
        )

    def _lora_config(self, head: str) -> Any:
        """Peft's config of the new adapter."""
        filled = self.with_lora_defaults()
        peft: Any = optional_package("peft", install="zo2core[peft]")
        return peft.LoraConfig(
            r=filled.lora_rank,
            lora_alpha=filled.lora_alpha,
            target_modules=ALL_LINEAR
            if filled.lora_targets == (ALL_LINEAR,)
            else list(filled.lora_targets),
            # peft's own for others add a head of theirs
            task_type="CAUSAL_LM" if head == "causal-lm" else None,
        )


DtypeName: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "float64"]
PrecisionName: TypeAlias = Literal["auto", "exact", "mixed"]
TransferName: TypeAlias = Literal[
    "stored", "bfloat16", "float16", "float8", "bfloat16-back", "float16-back", "float8-back"
]
HeadName: TypeAlias = Literal["causal-lm", "sequence-classification"]


def precision_of_run(precision: PrecisionName, *, is_exact: bool, on_cpu: bool) -> PrecisionName:
    """Precision to open a run's model in: auto becomes exact for MeZO's bits, and on a GPU.

    Transfers of mixed precision's float32 weights to a GPU would take twice as long.
    """
    return "exact" if precision == "auto" and (is_exact or not on_cpu) else precision


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a checkpoint is opened."""

    architecture: Annotated[Path | None, Option("model", Change.MOVED)] = None
    """JSON file that says where embedding, layers and head are in the model; by default this is
    detected.
    """
    head: Annotated[HeadName, Option("model")] = "causal-lm"
    """Head of the model. sequence-classification trains on rows with text, optionally text_pair,
    and label, which is a class or, for regression, a number.
    """
    dtype: Annotated[
        DtypeName,
        Option(
            "model",
            elsewhere=(
                "bf16",
                "fp16",
            ),
            is_shared=True,
        ),
    ] = "auto"
    """Dtype of the weights; auto is the checkpoint's dtype.

    In mixed precision it is the dtype of the computation, and auto chooses the faster 16-bit dtype.
    """
    precision: Annotated[PrecisionName, Option("model", is_shared=True)] = "auto"
    """exact uses one dtype for weights and computation and rounds as MeZO does: in 16 bits small
    updates are lost. mixed keeps the weights in float32 and computes under autocast. auto is mixed
    for 16-bit weights on the CPU. It is exact with --rank or --method mezo, for a --journal without
    its run, and on a GPU, where float32 weights take twice as long to transfer.
    """


@dataclass(frozen=True, kw_only=True)
class RunModelOptions(AdapterOptions, ModelOptions):
    """How the checkpoint of a run is opened."""

    transfer_dtype: Annotated[
        TransferName,
        Option(
            "model",
            effect=TRANSFERS,
        ),
    ] = "stored"
    """Dtype in which the layers' matrices are transferred to a GPU in mixed precision.

    With fewer bits the host replays updates and nothing is transferred back. With -back the
    matrices are also transferred back in this dtype, and every update is rounded to it. Evaluations
    use the transferred values, so the dtype is part of the result, also on the CPU.
    """
    matmul_precision: Annotated[MatmulPrecision, Option("model")] = "highest"
    """Precision of products of float32 matrices, as torch.set_float32_matmul_precision names it.

    high computes them in TF32, medium in bfloat16, where the device does so faster; weights and
    sums stay in float32. Products in 16 bits do not change.
    """

    def opened(
        self,
        directory: Path,
        *,
        seed: int,
        base: str | None = None,
        is_trained: bool = True,
        trains_base: bool = False,
        loss_chunk: int | Literal["auto"] | None = "auto",
        export_dtype: str = "auto",
    ) -> HFBlockModel:
        """Open a checkpoint. See ``open_checkpoint``."""
        from zo2adapters.models.checkpoint import open_checkpoint

        return open_checkpoint(
            directory,
            dtype=self.dtype,
            precision=self.precision,
            transfer_dtype=self.transfer_dtype,
            export_dtype=export_dtype,
            architecture=self.architecture,
            loss_chunk=loss_chunk,
            head=self.head,
            adapter=self.adapter_of(
                self.head, seed=seed, base=base, is_trained=is_trained, trains_base=trains_base
            ),
        )


DEFAULT_LENGTH = 1024  # longest row in tokens, unless the model's limit is lower


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How many rows of a batch run at a time."""

    micro_batch_size: Annotated[
        int | None,
        Option(
            "data",
            check=whole(1),
            excludes={"reward": "none: rows run at a time as memory allows"},
            elsewhere=("gradient_accumulation_steps",),
        ),
    ] = None
    """Rows that run at a time, if a whole batch does not fit in memory.

    Each block is still read once for all rows.
    """


@dataclass(frozen=True, kw_only=True)
class Batching(MicroBatches):
    """How rows become batches."""

    batch_size: Annotated[int, Option("data", check=whole(1, MOST_ROWS))] = 16
    """Rows per batch."""
    loss_chunk: Annotated[int | None, Option("data", check=whole(1))] = None
    """Labelled tokens whose logits are in memory at a time.

    By default all tokens of a batch in exact precision, and as many as fit in the CPU's cache in
    mixed precision. It changes only the order in which the loss is summed.
    """
    pack: Annotated[
        bool,
        Option(
            "data",
            excludes={
                "head": "a causal language model",
                "micro_batch_size": "whole batches, because packed rows run together",
            },
            elsewhere=("packing",),
        ),
    ] = False
    """Concatenate the rows of a batch instead of padding them.

    Needs rows of text, the model's own loss, and attention that keeps packed rows apart. It changes
    only the order in which the loss is summed.
    """
    sequence_length: Annotated[
        int | None,
        Option(
            "data",
            check=whole(2),
            elsewhere=(
                "cutoff_len",
                "max_length",
                "max_seq_length",
            ),
        ),
    ] = None
    """Longest row in tokens; longer rows are cut at the end.

    By default 1024, or the model's limit if that is lower.
    """

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Rows and tokens per row of a batch."""
        return (1, rows * tokens) if self.pack else (rows, tokens)

    def length_for(self, model: HFBlockModel) -> int:
        """Longest row in tokens for a model."""
        longest = model.longest_row
        if self.sequence_length is None:
            return min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
        require_whole(
            "sequence_length",
            self.sequence_length,
            2,
            longest or LARGEST_WHOLE,
            otherwise=", what the model takes",
        )
        return self.sequence_length


TrackerName: TypeAlias = Literal["none", "tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Limits on the memory that a process uses."""

    memory: Annotated[
        str, Option("memory", Change.RESUME, check=size, library=("memory.host",), is_shared=True)
    ] = "auto"
    """Host memory the process may use in total, such as 6GiB; auto uses what is free.

    Blocks that do not fit are streamed from disk.
    """
    device_memory: Annotated[
        str,
        Option(
            "memory",
            Change.RESUME,
            check=size,
            needs=("device=cuda",),
            library=("memory.device",),
            is_shared=True,
        ),
    ] = "auto"
    """Device memory the run may use, such as 8GiB; auto uses what is free.

    Blocks that fit stay on the device; activations that do not fit are offloaded to host memory.
    """


@dataclass(frozen=True, kw_only=True)
class ChosenDevice:
    """Where a run is computed."""

    device: Annotated[
        str,
        Option(
            "memory",
            excludes={"stream_blocks": "cpu: blocks are computed on in host memory"},
            is_shared=True,
        ),
    ] = "cpu"
    """Device to compute on: cpu, cuda or cuda:N.

    A resumed run keeps its device, since a GPU rounds differently.
    """


@dataclass(frozen=True, kw_only=True)
class Resources(ChosenDevice, MemoryLimits):
    """What a process uses of this machine."""


@dataclass(frozen=True, kw_only=True)
class ActivationMemory:
    """How much of the memory is for activations."""

    activation_memory: Annotated[
        str | None,
        Option(
            "memory",
            Change.RESUME,
            check=size,
            unchecked=(None,),
            library=(
                "memory.activations",
                "memory.least_activations",
            ),
        ),
    ] = None
    """Memory reserved for activations, such as 1GiB, in host memory on the CPU and in device memory
    on a GPU. Evaluations process as many batches in a pass over the blocks as fit in it. By default
    it is what a step needs.
    """


@dataclass(frozen=True, kw_only=True)
class Storage(ActivationMemory, Resources):
    """Where the weights are kept, and how often they are written."""

    write_back_every: Annotated[
        int | Literal["auto", "never"],
        Option(
            "memory",
            Change.RESUME,
            WRITES_BACK,
            whole(1, otherwise=", or auto or never"),
            library=("write_back.every",),
        ),
    ] = "auto"
    """Steps between two writes of a block to the run's scratch file; in between, updates are
    replayed. auto measures noise and disk and chooses the longest interval whose replays cost at
    most a tenth of a step. With --rank blocks are never written; auto writes the factors of each
    finished period, never does not.
    """
    write_limit_tb: Annotated[
        float | None,
        Option(
            "memory",
            Change.RESUME,
            WRITES,
            number(above=0),
            library=("write_back.terabytes_per_1000_steps",),
        ),
    ] = None
    """Terabytes that 1,000 steps may write, since writing wears disks out. auto obeys this limit; a
    run with --rank whose finished periods need more writes none of them. Where a first-order method
    trains all parameters, it limits snapshots.
    """
    snapshot_every: Annotated[
        int | None,
        Option(
            "memory",
            Change.RESUME,
            SNAPSHOTS,
            check=whole(1),
            elsewhere=("save_steps",),
            library=("write_back.snapshot_every",),
        ),
    ] = None
    """Largest number of steps that a resumed run has to replay, plus one or two after a crash.

    With first-order steps: steps between two snapshots; by default one a minute is taken, or fewer
    if they took more than 2 % of the time.
    """


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How this process executes a run.

    The result has the same bits, so a resumed run may change these.
    """

    trace: Annotated[Path | None, Option("output", Change.CALL)] = None
    """New file for a timeline of every pass over the blocks, for ui.perfetto.dev: when the run
    read, transferred, computed and wrote, and how many bytes.
    """
    verify_base: Annotated[bool, Option("output", Change.CALL)] = False
    """Read the whole base checkpoint before the first step, and compare it with the digests in the
    journal.
    """


@dataclass(frozen=True, kw_only=True)
class Seeded:
    """What a run's random numbers follow from."""

    seed: Annotated[
        int, Option("schedule", check=whole(-LARGEST_WHOLE), library=("adapter.seed",))
    ] = 0
    """Seed of the order of rows, of random directions, and of the first values of a new adapter."""


_APART = "no evaluation, because trials are compared by their training losses"


@dataclass(frozen=True, kw_only=True)
class RunOptions(Seeded):
    """Optional settings of a fine-tuning run."""

    evaluation: Annotated[Path | None, Option("evaluation", Change.MOVED, untried=_APART)] = None
    """File to evaluate on, before the first step and after the last one."""
    eval_split: Annotated[
        float | None,
        Option(
            "evaluation",
            check=number(above=0, below=1, remedy="pass a share such as 0.1"),
            excludes={"evaluation": "one source of rows to evaluate on"},
            untried=_APART,
        ),
    ] = None
    """Share of the training rows, such as 0.1, that is evaluated on instead of trained on."""
    evaluate_every: Annotated[
        int | None,
        Option(
            "evaluation",
            Change.BRANCH,
            check=whole(1),
            needs=("evaluation", "eval_split"),
            elsewhere=("eval_steps",),
            library=("evaluated_every",),
            untried=_APART,
        ),
    ] = None
    """Steps between two evaluations."""
    samples: Annotated[
        int,
        Option(
            "evaluation", check=whole(0, MOST_ROWS), excludes={"head": "a causal language model"}
        ),
    ] = 0
    """Number of rows whose prompts the model answers before and after training: the first rows to
    evaluate on or, without these, to train on. The answers are in samples.jsonl, and zo2 report
    shows them; each token takes a pass over the blocks.
    """
    objective: Annotated[str, Option("method", excludes={"head": "the model's own loss"})] = AUTO
    """Objective to minimize. loss is the model's own loss, for rows with candidates that of the
    right one. For these, too: choice-loss is MeZO's loss over the candidates, accuracy and f1 have
    no gradient. For rows with chosen and rejected completions: dpo, with the base model as
    reference. exact-match is the share of completions that the model does not generate.
    FILE.py:function is a function of the model and a batch. auto is choice-loss for rows with
    candidates, dpo for preferences, and loss otherwise.
    """
    beta: Annotated[
        float | None,
        Option("method", check=number(above=0), excludes={"head": "the model's own loss"}),
    ] = None
    """With --objective dpo: strength of the penalty for leaving the base, by default 0.1."""
    keep_best: Annotated[
        bool,
        Option(
            "output",
            Change.RESUME,
            needs=("evaluation", "eval_split"),
            excludes={"stream_blocks": "none: only the last committed weights are kept"},
            elsewhere=("load_best_model_at_end",),
        ),
    ] = False
    """Export the model of the step with the best evaluation instead of the last step's."""
    report_to: Annotated[TrackerName, Option("output", Change.RESUME)] = "none"
    """Tracker that also gets the rows of metrics.jsonl: tensorboard or wandb, if installed."""
    steps: Annotated[
        int,
        Option(
            "schedule",
            Change.RESUME,
            check=whole(1),
            elsewhere=(
                "epochs",
                "num_epochs",
                "num_train_epochs",
            ),
            untried="none: --forwards sets the budget",
        ),
    ] = 1000
    """Training steps.

    Each takes the time of three or four forward passes, or of two per query without gradients.
    """
    rows: RowOptions = field(default_factory=RowOptions)
    rewards: RewardOptions = field(default_factory=RewardOptions)
    model_options: RunModelOptions = field(default_factory=RunModelOptions)
    optimization: Optimization = field(default_factory=Optimization)
    batching: Batching = field(default_factory=Batching)
    storage: Storage = field(default_factory=Storage)

    def of_run(self, *, model: str, data: Path, output: Path) -> TrainOptions:
        """These options, for a run of this model on these rows in this directory."""
        given = {
            option.name: getattr(self, option.name) for option in dataclasses.fields(RunOptions)
        }
        return TrainOptions(model=model, data=data, output=output, **given)

    def having(self, **values: Any) -> Self:
        """The same options with other values, by name."""
        options: Self = filled(self, values)
        return options

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to evaluate on."""
        return self.evaluation is not None or self.eval_split is not None

    def is_evaluated_after(self, step: int) -> bool:
        """Whether the run is evaluated after this number of steps, among them 0 and all, if it has
        rows to evaluate on.
        """
        every = self.evaluate_every
        return self.evaluates and (
            step in (0, self.steps) or (every is not None and step % every == 0)
        )

    def evaluations_from(self, step: int) -> int:
        """Number of evaluations after this number of steps or more."""
        every = self.steps if self.evaluate_every is None else self.evaluate_every
        earlier = range(-(-step // every) * every, self.steps, every)  # than the last one
        return len(earlier) + (step <= self.steps) if self.evaluates else 0

    @property
    def trains_adapter_alone(self) -> bool:
        """Whether an adapter is trained, and the base under it only read."""
        return self.model_options.trains_adapter and not self.optimization.trains_both

    @property
    def reads_base(self) -> bool:
        """Whether the base's weights are only read."""
        return self.optimization.rank is not None or self.trains_adapter_alone

    @property
    def takes_labels(self) -> bool:
        """Whether rows are texts with labels."""
        return self.model_options.head != "causal-lm"

    def require_packages(self) -> None:
        """Refuse options that need a package which is not installed."""
        needed = {
            "tensorboard": (self.report_to == "tensorboard", "tensorboard"),
            "wandb": (self.report_to == "wandb", "wandb"),
            "peft": (self.model_options.trains_adapter, "zo2core[peft]"),
            "bitsandbytes": (self.optimization.state_bits == 8, "bitsandbytes"),
            "jsonschema": (
                any(
                    name.file is None and name.name == "json-schema" for name in self.rewards.names
                ),
                "zo2core[rewards]",
            ),
        }
        for package, (is_needed, install) in needed.items():
            if is_needed:
                require_package(package, install=install)

    def _require_storage(self) -> None:
        """Refuse writes of what never changes, and snapshots beside commits."""
        every = self.storage.write_back_every
        snapshots = self.storage.snapshot_every
        in_turns = self.optimization.method == "badam" and self.optimization.stream_blocks
        refuse(
            Refusal(
                isinstance(every, int) and self.optimization.rank is not None,
                "write_back_every",
                f"{every} with --rank",
                "auto or never, because no weights change",
                "leave it out",
            ),
            Refusal(
                in_turns and snapshots is not None,
                "snapshot_every",
                f"{snapshots} with --stream-blocks",
                "none with badam: the end of a turn is committed",
                "leave it out",
            ),
        )

    def require_rows(self, rows: RowFormat | None, evaluation: RowFormat | None = None) -> None:
        """Refuse rows that the objective, or an option beside it, does not take.

        Args:
            rows: Format of the rows to train on; None: it is not known yet.
            evaluation: Format of the rows to evaluate on; None: there are none, or it is not known.
        """
        used = {
            "pack": self.batching.pack,
            "beta": self.beta,
            "per_row": self.optimization.per_row,
            "rewards": self.rewards.reward or None,
        }
        objective, option = self.objective, "objective"
        if self.rewards.reward:
            objective, option = REWARD, "reward"
        differentiates = self.optimization.optimizer is not None
        require_task(objective, rows, used, differentiates=differentiates, option=option)
        if rows is not None and evaluation is not None:
            require_evaluation(rows, evaluation)

    @property
    def own_functions(self) -> tuple[str, str] | None:
        """The option that names functions of the user's own, and its value; None: there are
        none.
        """
        if any(name.file is not None for name in self.rewards.names):
            return "reward", " ".join(self.rewards.reward)
        return None if function_file(self.objective) is None else ("objective", self.objective)

    def require_valid(self, *, given: Collection[str] = ()) -> None:
        """Check the options that depend on neither model nor data: by the table, and by what no
        table says.

        Args:
            given: Names of options that were given, whatever their values are.
        """
        self.rewards.require_valid()
        if self.objective == REWARD and not self.rewards.reward:
            raise OptionError(
                "objective", REWARD, "--reward, which names the rewards", "pass --reward instead"
            )
        # a run that was settled names the objective of its rewards
        named = self.objective == REWARD
        require_valid(replace(self, objective=AUTO) if named else self, given=given)
        self.rows.require_valid(takes_labels=self.takes_labels)
        self.model_options.require_valid()
        self._require_storage()
        if self.optimization.optimizer is None:
            self.optimization.require_consistent()
            return
        method, lr = self.optimization.method, self.optimization.lr
        expected = f"a learning rate for {method}, which has none by default"
        refuse(Refusal(lr is None, "lr", "nothing", expected, "pass --lr auto, or such as 1e-5"))
        self.optimization.require_base_lr()


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """All options of a fine-tuning run."""

    model: Annotated[str, Option("model", Change.MOVED, is_shared=True)]
    """Model directory, GGUF file or hub id, or ollama:NAME of ollama's store."""
    data: Annotated[Path, Option("data", Change.MOVED)]
    """File of rows, each of which has text, or prompt and completion (loss on the completion only),
    or messages.
    """
    output: Annotated[Path, Option("output", Change.CALL, is_shared=True)]
    """Directory for the run: journal.jsonl, metrics.jsonl and, at the end, model/.

    It must be new or empty.
    """
    schedule_steps: int | None = None
    """Steps over which the learning rate was scheduled; None: ``steps``.

    A run that was lengthened has more ``steps``.
    """

    def __post_init__(self) -> None:
        """Fill in what the method has by default."""
        method, lr = self.optimization.method, self.optimization.lr
        model_options = self.model_options.of_method(method)
        optimization = replace(
            self.optimization, lr=DEFAULT_RATES.get(method) if lr is None else lr
        )
        object.__setattr__(self, "model_options", model_options)
        object.__setattr__(self, "optimization", optimization)

    @property
    def scheduled_steps(self) -> int:
        """Steps over which the learning rate is scheduled."""
        return self.steps if self.schedule_steps is None else self.schedule_steps

    @property
    def resume_command(self) -> str:
        """The command that continues the run.

        The run's own functions are named in it: a directory does not start code.
        """
        own = self.own_functions
        return f"zo2 train --resume {self.output}" + (
            "" if own is None else f" --{own[0]} {own[1]}"
        )

    def estimator(self) -> ZOEstimator:
        """The estimator of the run, with its clipping and guard."""
        return self.optimization.scheduled_estimator(self.scheduled_steps, self.batching.batch_size)

    def learning_rate(self) -> LearningRate:
        """The learning rate of each step."""
        return self.optimization.learning_rate(self.scheduled_steps)

    def with_rate(self, lr: float | Literal["auto"]) -> Self:
        """The same run with another peak learning rate."""
        return self.having(lr=lr)

    def with_steps(self, steps: int) -> TrainOptions:
        """The same run with another number of steps and an unchanged learning-rate schedule."""
        return (
            self
            if steps == self.steps
            else replace(self, steps=steps, schedule_steps=self.scheduled_steps)
        )

    def precision_asked(self) -> PrecisionName:
        """Precision to open the model in."""
        model_options = self.model_options
        on_cpu = self.storage.device == "cpu"
        # Factors and adapters are float32 in either precision.
        exact = self.optimization.is_exact or self.reads_base
        return precision_of_run(model_options.precision, is_exact=exact, on_cpu=on_cpu)

    def opened(self, directory: Path) -> HFBlockModel:
        """Open the run's model from its directory."""
        model_options = replace(self.model_options, precision=self.precision_asked())
        chunk: int | Literal["auto"] = self.batching.loss_chunk or "auto"
        return model_options.opened(
            directory,
            seed=self.seed,
            base=self.model,
            trains_base=self.optimization.trains_both,
            loss_chunk=chunk,
        )

    def settled(self, model: HFBlockModel) -> TrainOptions:
        """Replace what was chosen for this machine, or left out, by its value, so that a resumed
        run computes the same.
        """
        named = self._with_defaults()
        if model.autocast is None:
            return named.having(precision="exact")
        computed = str(model.autocast).removeprefix("torch.")
        return named.having(precision="mixed", dtype=computed, loss_chunk=model.loss_chunk)

    def settled_as(self, saved: TrainOptions) -> TrainOptions:
        """Replace what was left out by its value in a run, as it was settled when the run began."""
        named = self._with_defaults()
        before, now = (
            {name: value for name, value, _ in leaves(options)} for options in (saved, named)
        )
        left_out = [
            name for name in ("precision", "dtype", "loss_chunk") if now[name] in ("auto", None)
        ]
        return named.having(**{name: before[name] for name in left_out})

    def _with_defaults(self) -> TrainOptions:
        """Replace what was left out by its value, where this depends on neither model nor
        machine.
        """
        objective = REWARD if self.rewards.reward else self.objective
        model_options = self.model_options.with_lora_defaults()
        return replace(
            self, objective=objective, rewards=self.rewards.absolute(), model_options=model_options
        )

    def require_valid(self, *, given: Collection[str] = ()) -> None:
        """Check the options as above, and refuse to lengthen a run whose learning rate decays."""
        super().require_valid(given=given)
        scheduled = self.schedule_steps
        if scheduled not in (None, self.steps) and self.optimization.decay is not Decay.CONSTANT:
            expected = (
                f"{scheduled}, the steps of this run's {self.optimization.decay.value} schedule"
            )
            remedy = (
                "leave it out, or start a new run, with --adapter RUN/model if this one trains an "
                "adapter; only a "
                "run with constant lr can be lengthened"
            )
            raise OptionError("steps", str(self.steps), expected, remedy)

    def to_json(self) -> dict[str, Any]:
        """The options as JSON values, without the run's own directory and with other paths made
        absolute.
        """
        values = dataclasses.asdict(self)
        del values["output"]
        values |= values.pop("model_options")  # on the top level
        values["model"] = saved_model(self.model)
        for key in ("data", "evaluation"):
            values[key] = None if values[key] is None else saved_path(Path(values[key]))
        for key in ("architecture", "adapter"):
            values[key] = None if values[key] is None else str(Path(values[key]).resolve())
        values["rewards"] = dataclasses.asdict(self.rewards.absolute())
        if (path := function_file(self.objective)) is not None:
            values["objective"] = f"{path.resolve()}:{self.objective.rpartition(':')[2]}"
        return dict(
            json.loads(
                json.dumps(
                    values, default=lambda value: value.value if isinstance(value, Enum) else value
                )
            )
        )

    @classmethod
    def from_json(cls, values: dict[str, Any], output: Path) -> TrainOptions:
        """Convert the values of ``to_json`` back to options."""
        given = {**flat(values), "output": str(output)}
        hints = {one.name: one.type for one in declared(cls)}
        options: TrainOptions = filled(
            cls, {name: _value(given[name], hint, name) for name, hint in hints.items()}
        )
        if unknown := given.keys() - hints.keys():
            raise TypeError(f"the unknown key {min(unknown)[:80]}")
        options.require_valid()
        return options


def can_share(options: TrainOptions) -> bool:
    """Whether a run only reads its base: one with low-rank perturbations, or of an adapter by any
    method.
    """
    return options.reads_base and not options.takes_labels


def require_shareable(options: TrainOptions) -> None:
    """Refuse a run that changes its base, or that has a new head."""
    if not can_share(options):
        found = (
            f"--head {options.model_options.head}"
            if options.takes_labels
            else "a run that trains all weights"
        )
        expected = "runs of a causal language model that only read its weights"
        raise OptionError(
            "runs", found, expected, "pass --method lora, or --rank 8, or train it alone"
        )


def require_tunable(
    options: RunOptions, zo_eps: Sequence[float] = (), *, given: Collection[str] = ()
) -> None:
    """Refuse options that trials of learning rates, and of these scales of perturbations, do not
    have.

    Args:
        options: The options.
        zo_eps: The scales.
        given: Names of options that were given, whatever their values are.
    """
    untried = {one.name: one.option.untried for one in declared(options) if one.option is not None}
    if isinstance(options, TrainOptions):  # in which both have a value whatever was given
        untried |= {"lr": "", "steps": ""}
    for name, value, default in leaves(options):
        if untried.get(name) and (name in given or value != default):
            raise without_effect(name, shown(value), untried[name])
    if zo_eps and options.optimization.optimizer is not None:
        expected = "none with first-order steps, which perturb nothing"
        raise without_effect("zo_eps_to_try", ", ".join(map(str, zo_eps)), expected)


def _value(value: Any, hint: Any, name: str) -> Any:
    """The value as its field has it."""
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]:
        if not _is_of(value, kind):
            continue
        if get_origin(kind) is tuple:
            return tuple(_value(item, get_args(kind)[0], name) for item in value)
        return kind(value) if _is_made(kind) else value
    raise TypeError(f"{type(value).__name__} {str(value)[:40]!r} as {name}")


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is one of this kind; of a tuple without looking at its items."""
    items = get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list) and (items[-1] is ... or len(items) == len(value))
    if get_origin(kind) is Literal:
        return (type(value), value) in [(type(item), item) for item in items]
    if kind in (str, Path):
        return isinstance(value, str) and "\0" not in value
    if _is_made(kind):
        return value in [member.value for member in kind]
    if kind in (int, float) and type(value) is int:
        return abs(value) <= LARGEST_WHOLE
    if kind is float and type(value) is float:
        return math.isfinite(value)
    return kind in (bool, NoneType) and type(value) is kind


def _is_made(kind: Any) -> bool:
    """Whether JSON has another type for values of this kind, from which they are made."""
    return kind in (str, Path) or (isinstance(kind, type) and issubclass(kind, Enum))
