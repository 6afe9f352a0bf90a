"""Write an ExecuTorch program that trains an adapter.

A program's methods share one state, B of all layers and the seed of the next step:

    step         (input_ids, labels, lr) -> (the two losses, projected gradient, seed); takes a step
    state        () -> (B, seed)
    restore      (B, seed) -> seed; sets the state
    frozen       () -> A of each layer, which no step changes
    description  () -> the ``ProgramDescription`` as JSON

Loading a method sets the state to its initial values, which are in the program. Therefore all methods are loaded before the
first step. In C++ they share the state if the ``Module`` was made with ``share_memory_arenas``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zo2adapters.edge.assembly import assemble
from zo2adapters.edge.description import ProgramDescription
from zo2adapters.edge.digest import append_digest
from zo2adapters.edge.dual_forward import StateReader, StateWriter, TrainingStep
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds import PeftBlockModel
from zo2adapters.models.peft_layers import plain_config
from zo2adapters.optional_package import executorch
from zo2core import ZO2Error
from zo2core.errors import OutputError, UnsupportedModelError, reason
from zo2core.io.durable import create_file, sync_path
from zo2core.ranges import LARGEST, require_number, require_whole

_LARGEST_SEED = 1 << 62  # largest seed of the first step, which leaves 2**62 seeds for later steps
_STATE = ("state_adapter", "state_seed")  # parts of the names of the state's buffers in the exported program


class _Constants(nn.Module):
    """A method of a program that returns constant tensors."""

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for place, value in enumerate(values):
            self.register_buffer(f"value_{place}", value)

    def forward(self) -> tuple[torch.Tensor, ...]:
        return tuple(value.clone() for value in self.buffers())


def write_program(
    path: Path | str,
    model: HFBlockModel,
    *,
    rows: int,
    tokens: int,
    zo_eps: float,
    seed: int = 0,
    partitioners: Sequence[Any] | None = None,
) -> None:
    """Write a program that trains an adapter in ExecuTorch's runtime, by zeroth-order LoRA-FA.

    Args:
        path: File to write, usually ``.pte``; it must not exist.
        model: A model from ``open_checkpoint(..., adapter=Adapter(config=..., frozen=("lora_A",)))``. It is not changed. The
            program starts from its adapter's values.
        rows: Most rows of a step's batch; a step runs twice as many.
        tokens: Most tokens of a row.
        zo_eps: Perturbation scale of all steps. The learning rate is an input of each step.
        seed: Seed of the first step's direction; it grows by 1 each step.
        partitioners: ExecuTorch's partitioners of the backends that compute the forward. None: XNNPACK's, for CPUs; an empty
            sequence uses the portable kernels.

    Raises:
        MissingPackageError: if ExecuTorch is not installed.
        OptionError: if a number is out of range, or A is trained, too.
        UnsupportedModelError: if the model has no adapter, is quantised, or cannot be exported.
        CheckpointError: if a weight cannot be read.
        OutputError: if the path exists or cannot be written.
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        raise _in_use(path)
    _require_ranges(model, rows, tokens, seed)
    require_number("zo_eps", zo_eps, above=0)
    exir = executorch("exir")
    assembled = assemble(model, rows=rows, tokens=tokens, zo_eps=zo_eps, seed=seed)
    assert isinstance(model, PeftBlockModel), "others were refused"
    names = model.adapter.inserted.parameters
    description = ProgramDescription(
        rows=rows,
        tokens=tokens,
        vocabulary=int(model.config.get_text_config().vocab_size),
        zo_eps=zo_eps,
        config=plain_config(model.adapter.config),
        trained={names[name]: shape for name, shape in assembled.trained.items()},
        frozen=tuple(names[name] for name in assembled.frozen),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ExecuTorch's warnings about itself and about states without initial values
            program = _lowered(exir, assembled.step, list(assembled.frozen.values()), description, partitioners)
    except ZO2Error:
        raise
    except Exception as error:  # any: a model that cannot be exported leads to errors inside the exporter
        raise UnsupportedModelError(
            f"model type {model.config.model_type}",
            found=f"a model that cannot be exported ({type(error).__name__}: {' '.join(str(error).split())[:300]})",
            expected="a decoder whose forward torch.export and ExecuTorch support",
            remedy="name fewer layers in the adapter's target_modules, or use another model",
        ) from error
    _write(path, program)


def _lowered(
    exir: Any,
    step: TrainingStep,
    frozen: Sequence[torch.Tensor],
    description: ProgramDescription,
    partitioners: Sequence[Any] | None,
) -> Any:
    """The ExecuTorch program with all methods."""
    if partitioners is None:
        partitioners = [executorch("backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner()]
    tokens = torch.zeros(description.rows, description.tokens, dtype=torch.int64)
    state = step.state
    methods: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "step": (step, (tokens, tokens.clone(), torch.zeros(()))),
        "state": (StateReader(state), ()),
        "restore": (StateWriter(state), (state.adapter.clone(), state.seed.clone())),
        "frozen": (_Constants(frozen), ()),
    }
    with torch.no_grad():
        exported = {name: torch.export.export(module, inputs, strict=False) for name, (module, inputs) in methods.items()}
    edge = exir.to_edge_transform_and_lower(
        exported,
        partitioner={"step": list(partitioners)},
        constant_methods={"description": description.to_json()},
    )
    return edge.to_executorch(
        exir.ExecutorchBackendConfig(
            passes=[executorch("exir.passes.init_mutable_pass").InitializedMutableBufferPass(list(_STATE))],
            memory_planning_pass=executorch("exir.passes").MemoryPlanningPass(share_mutable_buffers=True),
        )
    )


def _require_ranges(model: HFBlockModel, rows: int, tokens: int, seed: int) -> None:
    require_whole("rows", rows, 1)
    require_whole("tokens", tokens, 2, model.longest_row or LARGEST)
    require_whole("seed", seed, 0, _LARGEST_SEED)


def _write(path: Path, program: Any) -> None:
    try:
        with create_file(path) as file:
            try:
                program.write_to_file(file)
                file.flush()
                append_digest(path)
            except BaseException:
                path.unlink()  # this call created it
                raise
        sync_path(path)
        sync_path(path.parent)
    except FileExistsError as error:
        raise _in_use(path) from error
    except OSError as error:
        raise OutputError(
            path, found=reason(error), expected="a file that can be written", remedy="free space or choose another path"
        ) from error


def _in_use(path: Path) -> OutputError:
    return OutputError(
        path,
        found="something at this path",
        expected="a path that does not exist yet",
        remedy="choose another path, or remove this file",
    )
