"""Options that say how a checkpoint is opened, shared by the commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from zo2adapters.trainers.option_table import require_valid
from zo2core.errors import OptionError

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # a command line is read without transformers
    from zo2adapters.models.peft_adapter import Adapter  # a command line is read without transformers


AUTO, EXPERTS = "auto", "experts"  # every linear layer before the head and outside experts, and a mixture's experts
ALL_LINEAR = "all-linear"  # what peft makes of this name


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """The adapter that is trained instead of the weights."""

    adapter: Path | None = None
    """peft adapter (LoRA, DoRA, prefix tuning) to train instead of the weights, which are then only read. Pass a directory
    with a saved adapter, or an adapter_config.json as peft writes it to start a new one. Exports are adapters."""
    adapter_frozen: tuple[str, ...] = ()
    """With an adapter: parameters whose names contain one of these parts are not trained, such as lora_A for LoRA-FA."""
    lora_rank: int | None = None
    """Train a new LoRA adapter of this rank, such as 8, and only read the weights: peft's LoraConfig(r=8), with initial
    values from --seed. --adapter takes other configs."""
    lora_targets: tuple[str, ...] = ()
    """With --lora-rank: names of the layers that get an adapter, such as q_proj v_proj. By default auto, which is every
    linear layer but the output layer of a language model, and of a mixture those outside its experts and routers. auto
    experts is these and the experts. all-linear is what peft makes of it: of some mixtures the experts, too."""
    lora_alpha: int | None = None
    """With --lora-rank: peft's lora_alpha, which scales the adapter by alpha / rank. By default twice the rank."""

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter is trained instead of the weights."""
        return self.adapter is not None or self.lora_rank is not None

    @property
    def adapter_option(self) -> str:
        """The option that asks for the adapter."""
        return "adapter" if self.lora_rank is None else "lora_rank"

    @property
    def adapter_name(self) -> str | None:
        """The adapter as text, for messages; None: there is none."""
        return str(self.adapter or f"LoRA of rank {self.lora_rank}") if self.trains_adapter else None

    def require_valid(self) -> None:
        """Refuse what the table refuses, and names of layers that are no list."""
        require_valid(self)
        names = " ".join(self.lora_targets)
        if "," in names or (ALL_LINEAR in self.lora_targets and len(self.lora_targets) > 1):
            expected = f"{ALL_LINEAR} alone, or names with spaces between them"
            remedy = f"write {' '.join(names.replace(',', ' ').replace(ALL_LINEAR, ' ').split())}"
            raise OptionError("lora_targets", found=names, expected=expected, remedy=remedy)
        if AUTO in self.lora_targets and not {*self.lora_targets} <= {AUTO, EXPERTS}:
            expected = f"{AUTO}, {AUTO} {EXPERTS}, or names of layers"
            remedy = f"write {' '.join(name for name in self.lora_targets if name != AUTO)}"
            raise OptionError("lora_targets", found=names, expected=expected, remedy=remedy)

    def with_lora_defaults(self) -> Self:
        """The options with the values that stand for those that were left out."""
        if self.lora_rank is None:
            return self
        return replace(self, lora_targets=self.lora_targets or (AUTO,), lora_alpha=self.lora_alpha or 2 * self.lora_rank)

    def adapter_of(self, head: str, *, seed: int = 0, base: str | None = None, is_trained: bool = True) -> Adapter | None:
        """The adapter to open the model with; None: the weights are trained."""
        if not self.trains_adapter:
            return None
        from zo2adapters.models.peft_adapter import Adapter

        config = self.adapter if self.lora_rank is None else self._lora_config(head)
        if base is not None and Path(base).is_dir():
            base = str(Path(base).resolve())
        return Adapter(config=config, frozen=self.adapter_frozen, seed=seed, base=base, is_trained=is_trained)

    def _lora_config(self, head: str) -> Any:
        """Peft's config of the new adapter."""
        from zo2adapters.optional_package import optional_package

        filled = self.with_lora_defaults()
        peft: Any = optional_package("peft", install="zo2core[peft]")
        return peft.LoraConfig(
            r=filled.lora_rank,
            lora_alpha=filled.lora_alpha,
            target_modules=ALL_LINEAR if filled.lora_targets == (ALL_LINEAR,) else list(filled.lora_targets),
            task_type="CAUSAL_LM" if head == "causal-lm" else None,  # peft's own for others add a head of theirs
        )


DtypeName: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "float64"]
PrecisionName: TypeAlias = Literal["auto", "exact", "mixed"]
TransferName: TypeAlias = Literal["stored", "bfloat16", "float16", "float8", "bfloat16-back", "float16-back", "float8-back"]
HeadName: TypeAlias = Literal["causal-lm", "sequence-classification"]


def precision_of_run(precision: PrecisionName, *, exact_mezo: bool, on_cpu: bool) -> PrecisionName:
    """Precision to open a run's model in: auto becomes exact for MeZO's bits, and on a GPU.

    Transfers of mixed precision's float32 weights to a GPU would take twice as long.
    """
    return "exact" if precision == "auto" and (exact_mezo or not on_cpu) else precision


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a checkpoint is opened."""

    architecture: Path | None = None
    """JSON file that says where embedding, layers and head are in the model; by default this is detected."""
    head: HeadName = "causal-lm"
    """Head of the model. sequence-classification trains on rows with text, optionally text_pair, and label, which is a class
    or, for regression, a number."""
    dtype: DtypeName = "auto"
    """Dtype of the weights; auto is the checkpoint's dtype. In mixed precision it is the dtype of the computation, and auto
    chooses the faster 16-bit dtype."""
    precision: PrecisionName = "auto"
    """exact uses one dtype for weights and computation and rounds as MeZO does: in 16 bits small updates are lost. mixed
    keeps the weights in float32 and computes under autocast. auto is mixed for 16-bit weights on the CPU. It is exact with
    --rank or an --estimator that is exact, for a --journal without its run, and on a GPU, where float32 weights take twice
    as long to transfer."""


@dataclass(frozen=True, kw_only=True)
class RunModelOptions(AdapterOptions, ModelOptions):
    """How the checkpoint of a run is opened."""

    transfer_dtype: TransferName = "stored"
    """Dtype in which the layers' matrices are transferred to a GPU in mixed precision. With fewer bits the host replays
    updates and nothing is transferred back. With -back the matrices are also transferred back in this dtype, and every
    update is rounded to it. Evaluations use the transferred values, so the dtype is part of the result, also on the CPU."""

    def opened(
        self,
        directory: Path,
        *,
        seed: int,
        base: str | None = None,
        is_trained: bool = True,
        loss_chunk: int | None = None,
        export_dtype: DtypeName = "auto",
    ) -> HFBlockModel:
        """Open a checkpoint."""
        from zo2adapters.models.checkpoint import open_checkpoint

        return open_checkpoint(
            directory,
            head=self.head,
            architecture=self.architecture,
            adapter=self.adapter_of(self.head, seed=seed, base=base, is_trained=is_trained),
            dtype=self.dtype,
            precision=self.precision,
            transfer_dtype=self.transfer_dtype,
            export_dtype=export_dtype,
            loss_chunk=loss_chunk or "auto",
        )
