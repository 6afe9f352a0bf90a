"""Options that say how a checkpoint is opened, shared by the commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from zo2adapters.trainers.adapter_options import AdapterOptions

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # a command line is read without transformers

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
