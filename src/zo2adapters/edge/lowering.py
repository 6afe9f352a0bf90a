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
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from zo2adapters.edge.running import ProgramDescription, append_digest
from zo2adapters.edge.step import STREAMS, AdapterState, DualForwardLinear, StateReader, StateWriter, TrainingStep
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds import LoRAKind, PeftBlockModel, plain_config, read_weight
from zo2adapters.models.skeleton import Stub
from zo2adapters.optional_package import executorch
from zo2core import ParameterSpec, ZO2Error
from zo2core.errors import OptionError, OutputError, UnsupportedModelError, reason
from zo2core.io.durable import create_file, sync_path
from zo2core.ranges import LARGEST, require_number, require_whole


class Assembled(NamedTuple):
    """A training step, and the names of its parameters."""

    step: TrainingStep
    trained: Mapping[str, tuple[int, int]]  # (outputs, rank) of each layer's B by name in the model, in the state's order
    frozen: Mapping[str, torch.Tensor]  # each layer's A by name in the model, in the same order; float32 (rank, inputs)


def assemble(model: HFBlockModel, *, rows: int, tokens: int, zo_eps: float, seed: int) -> Assembled:
    """Build the step of a model with an adapter, with all weights in memory."""
    specs = {spec.name: spec for layout in model.layouts for spec in layout.parameters}
    _require_lora_fa(model, list(specs.values()))
    values = {name: read_weight(model.weights, spec) for name, spec in specs.items()}
    whole = _whole(model, values)
    wrapped: list[tuple[str, Any]] = [
        (path, module) for path, module in whole.named_modules() if hasattr(module, "base_layer")
    ]
    trained, frozen = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for path, module in wrapped:
        [name] = module.lora_A
        a, b = f"{path}.lora_A.{name}.weight", f"{path}.lora_B.{name}.weight"
        frozen[a], trained[b] = values[a], values[b]
        batch = (STREAMS * rows, tokens)
        dual = DualForwardLinear(module.base_layer, values[a], module.scaling[name], path=path, batch=batch)
        whole.set_submodule(path, dual, strict=True)
    step = TrainingStep(
        whole,
        [path for path, _ in wrapped],
        [specs[name].index for name in trained],
        AdapterState(list(trained.values()), seed),
        zo_eps=zo_eps,
    )
    step.requires_grad_(requires_grad=False)
    step.train(mode=False)
    return Assembled(step, {name: (len(value), value.shape[1]) for name, value in trained.items()}, frozen)


def _require_lora_fa(model: HFBlockModel, specs: Sequence[ParameterSpec]) -> None:
    adapter = model.adapter if isinstance(model, PeftBlockModel) else None
    title = "a model without an adapter" if adapter is None else adapter.kind.why_not_stacked(adapter.config)
    if adapter is None or title is not None or not isinstance(adapter.kind, LoRAKind) or adapter.config.modules_to_save:
        expected = "LoRA, of which lora_B is trained"
        remedy = "open_checkpoint(path, adapter=Adapter(config=LoraConfig(...), frozen=('lora_A',)))"
        raise UnsupportedModelError("adapter", found=str(title), expected=expected, remedy=remedy)
    encoded = next((spec for spec in specs if spec.encoding is not None), None)
    if encoded is not None:
        found, remedy = f"a quantised weight ({type(encoded.encoding).__name__})", "open the unquantised checkpoint"
        raise UnsupportedModelError(encoded.name, found=found, expected="floating-point weights", remedy=remedy)
    other = next((spec for spec in specs if spec.frozen == (".lora_B." in spec.name)), None)
    if other is not None:
        raise OptionError(
            "adapter.frozen",
            found=f"{other.name}, which is {'frozen' if other.frozen else 'trained'}",
            expected="lora_B trained, in all layers, and nothing else",
            remedy="Adapter(config=..., frozen=('lora_A',))",
        )


def _whole(model: HFBlockModel, values: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """A copy of a model's skeleton with its layers in place of the stubs, and with its weights."""
    whole = deepcopy(model.skeleton)
    for module in list(whole.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Stub):
                setattr(module, name, child.layer)
    read = {parameter: nn.Parameter(values[name], requires_grad=False) for name, parameter in whole.named_parameters()}
    for name, parameter in list(whole.named_parameters(remove_duplicate=False)):  # a tied weight stays one
        path, _, leaf = name.rpartition(".")
        whole.get_submodule(path)._parameters[leaf] = read[parameter]
    return whole


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
    require_whole("rows", rows, 1)
    require_whole("tokens", tokens, 2, model.longest_row or LARGEST)
    require_whole("seed", seed, 0, _LARGEST_SEED)
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
        exported, partitioner={"step": list(partitioners)}, constant_methods={"description": description.to_json()}
    )
    return edge.to_executorch(
        exir.ExecutorchBackendConfig(
            passes=[executorch("exir.passes.init_mutable_pass").InitializedMutableBufferPass(list(_STATE))],
            memory_planning_pass=executorch("exir.passes").MemoryPlanningPass(share_mutable_buffers=True),
        )
    )


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
