"""How a checkpoint is opened: what a user may say of the model, the same for every command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from zo2core import OptionError

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # a command line is read without transformers

DtypeName: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "float64"]
PrecisionName: TypeAlias = Literal["auto", "exact", "mixed"]
TransferName: TypeAlias = Literal["stored", "bfloat16", "float16", "float8", "bfloat16-back", "float16-back", "float8-back"]
HeadName: TypeAlias = Literal["causal-lm", "sequence-classification"]


def precision_of_run(asked: PrecisionName, *, exact_mezo: bool, on_cpu: bool) -> PrecisionName:
    """The precision to open a run's model in: auto stays exact for MeZO's bits, and on a GPU.

    To a GPU the float32 of mixed precision would travel for twice as long.
    """
    return "exact" if asked == "auto" and (exact_mezo or not on_cpu) else asked


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a checkpoint is opened."""

    architecture: Path | None = None
    """JSON file that says where the model's parts are; by default they are learned."""
    head: HeadName = "causal-lm"
    """What the model ends in. sequence-classification is trained on rows with text, perhaps text_pair, and label: a class,
    or a number where the model rates."""
    dtype: DtypeName = "auto"
    """Dtype of the weights; auto is the checkpoint's own. In mixed precision it is the dtype that is computed with, and auto
    takes the faster of the 16-bit ones."""
    precision: PrecisionName = "auto"
    """exact has one dtype for all, with MeZO's rounding: in 16 bits small updates are lost. mixed keeps weights in float32,
    whatever the checkpoint has, and computes under autocast. auto is mixed for weights of 16 bits on the CPU; it is exact
    with --exact-mezo or --rank, for a --journal without its run, and on a GPU, to which float32 would travel twice as
    long."""


@dataclass(frozen=True, kw_only=True)
class RunModelOptions(ModelOptions):
    """How the checkpoint of a run is opened."""

    transfer_dtype: TransferName = "stored"
    """What the layers' matrices travel to a GPU in, in mixed precision: as they are stored, or in fewer bits, and then the
    host replays and nothing comes back. With -back they come back in it, too, and every update is rounded to it.
    Evaluations see what travels: it is part of the result, on the CPU too."""
    adapter: Path | None = None
    """Adapter of peft's (LoRA, DoRA, VeRA, a prefix) that is trained instead of the weights, which are then only read: a
    directory with an adapter, or to begin one, adapter_config.json as peft writes it. Exports are adapters."""
    adapter_frozen: tuple[str, ...] = ()
    """With --adapter: parts of parameters' names that stay as they are, such as lora_A for LoRA-FA."""

    def require_valid(self) -> None:
        """Refuse options that have no effect.

        Raises:
            OptionError: naming the option.
        """
        if self.adapter is None and self.adapter_frozen:
            raise OptionError(
                "adapter_frozen",
                found=" ".join(self.adapter_frozen),
                expected="--adapter beside it",
                remedy="leave one of the two out",
            )

    def opened(
        self, directory: Path, *, seed: int, loss_chunk: int | None = None, export_dtype: DtypeName = "auto"
    ) -> HFBlockModel:
        """Open a checkpoint.

        Args:
            directory: Directory of the checkpoint.
            seed: Seed of the first values of an adapter that has none yet.
            loss_chunk: Labelled tokens whose logits are in memory at a time; None leaves it to the precision.
            export_dtype: Dtype to which exported weights are rounded, as ``open_checkpoint`` takes it.
        """
        from zo2adapters.models.checkpoint import open_checkpoint
        from zo2adapters.models.peft_model import Adapter

        adapter = None if self.adapter is None else Adapter(config=self.adapter, frozen=self.adapter_frozen, seed=seed)
        return open_checkpoint(
            directory,
            head=self.head,
            architecture=self.architecture,
            adapter=adapter,
            dtype=self.dtype,
            precision=self.precision,
            transfer_dtype=self.transfer_dtype,
            export_dtype=export_dtype,
            loss_chunk=loss_chunk or "auto",
        )
