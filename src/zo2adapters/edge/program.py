"""ExecuTorch programs that train an adapter: written here, and run in ExecuTorch's runtime on this
machine.

A step is one of P-RGE with LoRA-FA (arXiv 2409.15520, Algorithm 1), in a module that
``torch.export`` takes. Both evaluations run as one batch: its first half at +eps, its second at
-eps, so that the weights are read once. A layer computes ``x W^T + (x A^T) B^T`` with a B for each
half; W and A are only read.

A program's methods share one state, B of all layers and the seed of the next step:

    step         (input_ids, labels, lr) -> (the two losses, projected gradient, seed); takes a step
    state        () -> (B, seed)
    restore      (B, seed) -> seed; sets the state
    frozen       () -> A of each layer, which no step changes
    description  () -> the ``ProgramDescription`` as JSON

Loading a method sets the state to its initial values, which are in the program. Therefore all
methods are loaded before the first step. In C++ they share the state if the ``Module`` was made
with ``share_memory_arenas``.

Note: Differences from Algorithm 1. There each layer keeps both perturbed copies of B, takes their
difference as the noise of the step before, and applies that step's update before it draws new
noise; the projected gradient is an input that the caller computes from the losses. Here the noise
follows from a seed (``Signs``). So B is kept once, is never restored with rounding errors, and is
updated at the end of the same step; the caller passes nothing back. Noise is random signs instead
of Gaussian. In exact arithmetic, and with the same noise, losses and B are those of Algorithm 1.

Note: Directions. They are random signs, computed from a seed inside the program. ExecuTorch's
kernels have no generator that can be seeded: ``rand`` and ``randn`` use the system's. So P-RGE adds
an operator to the runtime. Counter-based noise needs none. The numbers are those of
``PhiloxNoise(Distribution.RADEMACHER)``, bit for bit, so that an engine that replays a program's
losses gets the program's adapter.

Note: Operations. The runtime's portable kernels have neither shifts nor unsigned 64-bit integers.
Words are int64 below 2**32, multipliers are split into halves of 16 bits so that no product reaches
2**63, and words are shifted by division. Two words of a counter that need the same operations share
a tensor: each operation adds to the time of lowering a program.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - as everywhere
from transformers import PretrainedConfig, PreTrainedModel

from zo2adapters.models.batches import CAUSAL_LM
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_adapter import read_weight
from zo2adapters.models.peft_model import PeftBlockModel, plain_config, write_adapter
from zo2adapters.models.skeleton import Stub
from zo2adapters.optional_package import executorch
from zo2core import Batch, ParameterSpec, ZO2Error
from zo2core.errors import (
    BatchError,
    CheckpointError,
    NonFiniteLossError,
    OptionError,
    OutputError,
    UnsupportedModelError,
    system_error,
    system_errors_as,
)
from zo2core.io.durable import create_file, open_no_follow, open_regular, sync_path
from zo2core.ranges import LARGEST_WHOLE, require_number, require_whole
from zo2core.sweep.microbatch import IGNORE_INDEX
from zo2core.types import LARGEST_FLOAT32

GROUP = 1024  # signs from eight calls of Philox
_CALLS = 8  # calls per group
_BITS = 32  # bits of a word; each gives a sign
_WORD = (1 << _BITS) - 1
_HALF = 1 << 16
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # Philox4x32's multipliers of the counter's words 0 and 2
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # added to the key's words after each round
_ROUNDS = 10


class Signs(nn.Module):
    """Draws z of several parameters at once: each number is +1 or -1, by Philox4x32-10."""

    def __init__(self, indices: Sequence[int], sizes: Sequence[int]) -> None:
        super().__init__()
        calls = [_CALLS * groups_of(size) for size in sizes]
        parameters = [
            torch.full((count,), index) for index, count in zip(indices, calls, strict=True)
        ]
        multipliers = torch.tensor(_MULTIPLIERS).view(2, 1)
        constant = partial(nn.Buffer, persistent=False)  # all are int64
        # (calls,): the counter's words 0 and 1
        self.block = constant(torch.cat([torch.arange(count) for count in calls]))
        self.parameter = constant(torch.cat(parameters))  # (calls,): its word 2
        self.high_multipliers = constant(multipliers >> 16)  # (2, 1)
        self.low_multipliers = constant(multipliers & (_HALF - 1))  # (2, 1)
        self.key_steps = constant(torch.tensor(_KEY_STEPS).view(2, 1))
        self.masks = constant((1 << torch.arange(_BITS)).view(1, _BITS, 1))  # of each bit

    def forward(self, seed: torch.Tensor) -> torch.Tensor:
        """Draw z of all parameters."""
        groups = len(self.block) // _CALLS
        words = (
            self._words(seed).view(4, groups, _CALLS).transpose(0, 1).reshape(groups, 1, 4 * _CALLS)
        )
        is_positive = (words & self.masks) == 0
        return (is_positive.to(torch.float32) * 2 - 1).reshape(-1)

    def _words(self, seed: torch.Tensor) -> torch.Tensor:
        """Four words of each call: int64 (4, calls)."""
        even = torch.stack((self.block & _WORD, self.parameter))  # words 0 and 2 of the counters
        # words 1 and 3
        odd = torch.stack((self.block // (_WORD + 1), torch.zeros_like(self.parameter)))
        key = torch.stack((seed & _WORD, seed // (_WORD + 1))).view(2, 1)
        for _ in range(_ROUNDS):
            # each product is high * 2**16 + low
            high = even * self.high_multipliers
            low = even * self.low_multipliers
            upper = (high + low // _HALF) // _HALF
            lower = ((high & (_HALF - 1)) * _HALF + low) & _WORD
            even = upper.flip(0) ^ odd ^ key
            odd = lower.flip(0)
            key = (key + self.key_steps) & _WORD
        return torch.stack((even[0], odd[0], even[1], odd[1]))


def groups_of(size: int) -> int:
    """Number of groups for this number of elements."""
    return math.ceil(size / GROUP)


STREAMS = 2  # evaluations of a step: at +eps and at -eps


class DualForwardLinear(nn.Module):
    """A linear layer with LoRA, whose B differs between the two halves of a batch."""

    def __init__(
        self,
        base: nn.Linear,
        lora_a: torch.Tensor,
        scaling: float,
        *,
        path: str,
        batch: tuple[int, int],
    ) -> None:
        super().__init__()
        self.base = base
        self.scaling = scaling
        self.path = path
        self.batch = batch
        self.lora_A = nn.Buffer(lora_a)  # peft's names
        # Float32 (2, outputs, rank), for both halves. A step replaces it while it runs.
        self.lora_B = nn.Buffer(
            torch.zeros(STREAMS, base.out_features, len(lora_a)), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute both halves."""
        rows, tokens = self.batch
        if x.shape[:-1] not in ((rows, tokens), (rows * tokens,)):
            raise UnsupportedModelError(
                self.path,
                f"a layer that is called with shape {tuple(x.shape)}",
                f"a layer that is called with all {rows} rows of {tokens} tokens, in order",
                "name other layers in the adapter's target_modules",
            )
        reduced = F.linear(x.to(self.lora_A.dtype), self.lora_A)
        halves = reduced.reshape(STREAMS, -1, reduced.shape[-1])
        adapter = torch.bmm(halves, self.lora_B.transpose(1, 2)).reshape(*x.shape[:-1], -1)
        computed: torch.Tensor = self.base(x)
        return (computed + adapter * self.scaling).to(computed.dtype)


class AdapterState(nn.Module):
    """The state that steps change: B of all layers, and the seed of the next step."""

    def __init__(self, values: Sequence[torch.Tensor], seed: int) -> None:
        super().__init__()
        flat = [
            F.pad(value.flatten(), (0, groups_of(value.numel()) * GROUP - value.numel()))
            for value in values
        ]
        # Float32, one layer after another. Each starts at a whole group, as its noise does; the
        # padding is not read.
        self.adapter = nn.Buffer(torch.cat(flat))
        self.seed = nn.Buffer(torch.tensor(seed, dtype=torch.int64))


class TrainingStep(nn.Module):
    """One step of zeroth-order LoRA-FA: two losses from one forward, and the update."""

    def __init__(
        self,
        model: Any,
        names: Sequence[str],
        indices: Sequence[int],
        state: AdapterState,
        *,
        zo_eps: float,
    ) -> None:
        super().__init__()
        self.model = model
        self.state = state
        self.zo_eps = zo_eps
        self._names = tuple(names)
        self._shapes = tuple(model.get_submodule(name).lora_B.shape for name in names)
        self.signs = Signs(indices, [shape[1:].numel() for shape in self._shapes])

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, lr: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take a step. If the projected gradient is not finite, B does not change."""
        state = self.state
        seed = state.seed.clone()
        z = self.signs(seed)
        shift = self.zo_eps * z
        logits = self._logits(input_ids.repeat(STREAMS, 1), torch.stack((shift, -shift)))
        options = {"vocab_size": self.model.config.get_text_config().vocab_size}
        plus, minus = (
            self.model.loss_function(half, labels, **options)
            for half in torch.chunk(logits, STREAMS)
        )
        projected_grad = (plus - minus) / (2 * self.zo_eps)
        is_finite = projected_grad.abs() <= LARGEST_FLOAT32
        applied = torch.where(is_finite, projected_grad, torch.zeros_like(projected_grad))
        state.adapter.copy_(state.adapter - lr * (applied * z))
        state.seed.copy_(state.seed + 1)
        return torch.stack((plus, minus)), projected_grad, seed

    def _logits(self, input_ids: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """Run the model with these shifts added to B in each half."""
        perturbed: dict[str, torch.Tensor] = {}
        sizes = [groups_of(shape[1:].numel()) * GROUP for shape in self._shapes]
        parts = torch.split(self.state.adapter + shifts, sizes, dim=1)
        for name, shape, part in zip(self._names, self._shapes, parts, strict=True):
            perturbed[f"{name}.lora_B"] = part[:, : shape[1:].numel()].reshape(shape)
        arguments = {"input_ids": input_ids, "use_cache": False}
        logits: torch.Tensor = functional_call(self.model, perturbed, kwargs=arguments).logits
        return logits


class StateReader(nn.Module):
    """A method of a program that returns the state."""

    def __init__(self, state: AdapterState) -> None:
        super().__init__()
        self.state = state

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of B and of the seed."""
        return self.state.adapter.clone(), self.state.seed.clone()


class StateWriter(nn.Module):
    """A method of a program that sets the state."""

    def __init__(self, state: AdapterState) -> None:
        super().__init__()
        self.state = state

    def forward(self, adapter: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        """Set the state to that of a ``StateReader``, and return the seed."""
        self.state.adapter.copy_(adapter)
        self.state.seed.copy_(seed)
        return seed.clone()


_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ProgramDescription:
    """The properties of a program, which are fixed when it is written."""

    rows: int  # most rows of a batch
    tokens: int  # most tokens of a row
    vocabulary: int  # size of the vocabulary
    zo_eps: float  # perturbation scale
    config: Mapping[str, Any]  # peft's config, from ``plain_config``
    # (outputs, rank) of each layer's B by name in peft's files, in the state's order
    trained: Mapping[str, tuple[int, int]]
    frozen: tuple[str, ...]  # name of each layer's A in peft's files, in the same order

    def to_json(self) -> str:
        """The description as text, which is stored in the program."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str, path: Path) -> Self:
        """Read the text of ``to_json``."""
        values = json.loads(text)
        if values.pop("format", None) != _FORMAT:
            raise _refused(
                path,
                f"another format than {_FORMAT}",
                "or run it with the version of zo2core that wrote it",
            )
        trained = {
            name: (int(outputs), int(rank)) for name, (outputs, rank) in values["trained"].items()
        }
        return cls(**{**values, "trained": trained, "frozen": tuple(values["frozen"])})

    def split(self, adapter: torch.Tensor) -> dict[str, torch.Tensor]:
        """B of each layer, by its name in peft's files."""
        values: dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in self.trained.items():
            size = shape[0] * shape[1]
            values[name] = adapter[start : start + size].view(shape)
            start += groups_of(size) * GROUP
        return values


_MARK = b"zo2core sha256: "
_LENGTH = len(_MARK) + hashlib.sha256().digest_size


def append_digest(path: Path) -> None:
    """Append the SHA-256 of a file's bytes to the file."""
    with open(path, "r+b", opener=open_no_follow) as file:
        file.write(_MARK + _digest(file, path.stat().st_size))


def require_digest(path: Path) -> None:
    """Refuse a file whose bytes do not match the digest that ``append_digest`` wrote."""
    with open_regular(path) as file:
        length = max(path.stat().st_size - _LENGTH, 0)
        digest = _digest(file, length)
        end = file.read()
    if end != _MARK + digest:
        found = (
            "bytes that do not match the digest"
            if end.startswith(_MARK)
            else "no digest at its end"
        )
        raise _refused(path, found, "or copy it again")


def _digest(file: BinaryIO, length: int) -> bytes:
    """The digest of a file's first ``length`` bytes. The file's position is then behind them."""
    digest = hashlib.sha256()
    while length and (piece := file.read(min(length, 1 << 20))):
        digest.update(piece)
        length -= len(piece)
    return digest.digest()


_METHODS = ("step", "state", "restore", "frozen")


class ProgramStep(NamedTuple):
    """The result of a step. An engine can take the same step from it."""

    seed: int  # seed of the direction
    losses: torch.Tensor  # losses at +eps and at -eps, float32 (2,)
    projected_grad: float


class ProgramState(NamedTuple):
    """The state that steps change."""

    adapter: torch.Tensor  # B of all layers, float32, flat; ``ProgramDescription.split`` divides it
    seed: int  # seed of the next step


class TrainingProgram:
    """A program of ``write_program``, with its state in the runtime's memory.

    Args:
        path: File of the program. It is not written: a program that is opened again starts from its
            initial values.

    Raises:
        MissingPackageError: if ExecuTorch is not installed.
        CheckpointError: if the file cannot be read, is damaged, or is another program.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        runtime = executorch("runtime")
        try:
            require_digest(self._path)
            program = runtime.Runtime.get().load_program(self._path)
            missing = {"description", *_METHODS} - program.method_names
            if missing:
                raise _refused(self._path, f"a program without {', '.join(sorted(missing))}")
            [text] = program.load_method("description").execute([])
            # All methods are loaded before the first step, since loading one resets the state.
            self._methods = {name: program.load_method(name) for name in _METHODS}
        except OSError as error:
            raise system_error(
                CheckpointError,
                self._path,
                error,
                expected=_WHOLE_PROGRAM,
                remedy="check the path",
            ) from error
        except RuntimeError as error:  # the only error of the runtime
            found = f"a file that the runtime does not load ({' '.join(str(error).split())[:200]})"
            raise _refused(self._path, found) from error
        self._program = program  # owns the methods' memory
        self.description = ProgramDescription.from_json(text, self._path)

    def step(self, batch: Batch, *, lr: float) -> ProgramStep:
        """Take one step, which changes the state.

        Args:
            batch: input_ids, labels and perhaps an attention_mask, which may mask padding at the
                right only. Smaller batches than the program's are padded, which does not change the
                loss.
            lr: Learning rate.

        Raises:
            BatchError: if the batch does not fit the program, or has no label.
            OptionError: if the learning rate is negative or not finite.
            NonFiniteLossError: if a loss is not finite. B does not change, and the next step has
                another direction.
        """
        require_number("lr", lr, least=0, remedy="correct the learning-rate schedule")
        inputs = *self._fitted(batch), torch.tensor(lr, dtype=torch.float32)
        losses, projected_grad, seed = self._methods["step"].execute(inputs)
        if not math.isfinite(projected_grad.item()):
            remedy = (
                "lower lr, or write the program with a lower zo_eps; this step did not change the "
                "adapter"
            )
            raise NonFiniteLossError(
                f"the step of seed {seed.item()}",
                f"losses {losses.tolist()}",
                "finite losses",
                remedy,
            )
        return ProgramStep(int(seed.item()), losses, projected_grad.item())

    def state(self) -> ProgramState:
        """A copy of the state."""
        adapter, seed = self._methods["state"].execute(())
        return ProgramState(adapter, int(seed.item()))

    def restore(self, state: ProgramState) -> None:
        """Set the state to that of this program, or of another one with the same model and adapter.

        Raises:
            OptionError: if the state has another adapter, or its seed is out of range.
        """
        require_whole("state.seed", state.seed, 0)
        adapters = state.adapter, self.state().adapter
        found, expected = (
            f"{adapter.dtype} of shape {tuple(adapter.shape)}" for adapter in adapters
        )
        if found != expected:
            raise OptionError("state.adapter", found, expected, "use a state of this program")
        self._methods["restore"].execute(
            (state.adapter, torch.tensor(state.seed, dtype=torch.int64))
        )

    def save_adapter(self, directory: Path | str) -> None:
        """Write the current adapter in peft's format.

        Args:
            directory: Directory to write, which must be empty or not exist.

        Raises:
            OutputError: if the directory is in use or cannot be written.
        """
        description = self.description
        values = description.split(self.state().adapter)
        values |= zip(description.frozen, self._methods["frozen"].execute(()), strict=True)
        write_adapter(Path(directory), description.config, values)

    def _fitted(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of a batch, padded to the program's shape."""
        description = self.description
        options: dict[str, Any] = {"vocab_size": description.vocabulary}
        CAUSAL_LM.check(batch, PretrainedConfig(**options), description.tokens)
        ids = batch["input_ids"].to("cpu", torch.int64)
        labels = batch["labels"].to("cpu", torch.int64)
        if len(ids) > description.rows:
            expected = f"at most {description.rows}, the program's rows"
            raise BatchError(
                "input_ids",
                f"{len(ids)} rows",
                expected,
                "pass fewer rows, or write another program",
            )
        others = sorted(batch.keys() - {"input_ids", "labels", "attention_mask"})
        if others:
            raise BatchError(
                others[0], "an entry", "input_ids, labels and attention_mask alone", "leave it out"
            )
        mask = batch.get("attention_mask", torch.ones_like(ids)).to("cpu") != 0
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()) or bool((labels[~mask] != IGNORE_INDEX).any()):
            found, expected = (
                "masked tokens before other tokens, or with labels",
                "rows that are padded at the right",
            )
            remedy = "pad at the right, with labels of -100: a program has no mask"
            raise BatchError("attention_mask", found, expected, remedy)
        room = (0, description.tokens - ids.shape[1], 0, description.rows - len(ids))
        return F.pad(ids, room), F.pad(labels, room, value=IGNORE_INDEX)


_WHOLE_PROGRAM = "a whole program from write_program, for this runtime's backends"


def _refused(
    path: Path, found: str, other_remedy: str = "for the backends of this runtime"
) -> CheckpointError:
    return CheckpointError(path, found, _WHOLE_PROGRAM, f"write it again, {other_remedy}")


class Assembled(NamedTuple):
    """A training step, and the names of its parameters."""

    step: TrainingStep
    # (outputs, rank) of each layer's B by name in the model, in the state's order
    trained: Mapping[str, tuple[int, int]]
    # each layer's A by name in the model, in the same order; float32 (rank, inputs)
    frozen: Mapping[str, torch.Tensor]


def assemble(model: HFBlockModel, *, rows: int, tokens: int, zo_eps: float, seed: int) -> Assembled:
    """Build the step of a model with an adapter, with all weights in memory."""
    specs = {spec.name: spec for layout in model.layouts for spec in layout.parameters}
    _require_lora_fa(model, list(specs.values()))
    values = {name: read_weight(model.weights, spec) for name, spec in specs.items()}
    whole = _whole(model, values)
    wrapped: Any = [
        (path, module) for path, module in whole.named_modules() if hasattr(module, "base_layer")
    ]
    trained = dict[str, torch.Tensor]()
    frozen = dict[str, torch.Tensor]()
    for path, module in wrapped:
        [name] = module.lora_A
        a = f"{path}.lora_A.{name}.weight"
        b = f"{path}.lora_B.{name}.weight"
        frozen[a] = values[a]
        trained[b] = values[b]
        batch = (STREAMS * rows, tokens)
        dual = DualForwardLinear(
            module.base_layer, values[a], module.scaling[name], path=path, batch=batch
        )
        whole.set_submodule(path, dual, strict=True)
    paths = [path for path, _ in wrapped]
    state = AdapterState(list(trained.values()), seed)
    step = TrainingStep(whole, paths, [specs[name].index for name in trained], state, zo_eps=zo_eps)
    step.requires_grad_(requires_grad=False)
    step.train(mode=False)
    return Assembled(
        step, {name: (len(value), value.shape[1]) for name, value in trained.items()}, frozen
    )


def _require_lora_fa(model: HFBlockModel, specs: Sequence[ParameterSpec]) -> None:
    adapter = model.adapter if isinstance(model, PeftBlockModel) else None
    other = (
        "a model without an adapter"
        if adapter is None
        else adapter.kind.not_stacked(adapter.config)
    )
    if adapter is None or other is not None or adapter.config.modules_to_save:
        found = other or "LoRA with modules_to_save"
        remedy = (
            "open_checkpoint(path, adapter=Adapter(config=LoraConfig(...), frozen=('lora_A',)))"
        )
        raise UnsupportedModelError("adapter", found, "LoRA, of which lora_B is trained", remedy)
    encoded = next((spec for spec in specs if spec.encoding is not None), None)
    if encoded is not None:
        found = f"a quantised weight ({type(encoded.encoding).__name__})"
        raise UnsupportedModelError(
            encoded.name, found, "floating-point weights", "open the unquantised checkpoint"
        )
    wrong = next((spec for spec in specs if spec.frozen == (".lora_B." in spec.name)), None)
    if wrong is not None:
        found = f"{wrong.name}, which is {'frozen' if wrong.frozen else 'trained'}"
        expected = "lora_B trained, in all layers, and nothing else"
        raise OptionError(
            "adapter.frozen", found, expected, "Adapter(config=..., frozen=('lora_A',))"
        )


def _whole(model: HFBlockModel, values: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """A copy of a model's skeleton with its layers in place of the stubs, and with its weights."""
    whole = deepcopy(model.skeleton)
    for module in list(whole.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Stub):
                setattr(module, name, child.layer)
    read = {
        parameter: nn.Parameter(values[name], requires_grad=False)
        for name, parameter in whole.named_parameters()
    }
    for name, parameter in list(whole.named_parameters(remove_duplicate=False)):
        # a tied weight stays one
        path, _, leaf = name.rpartition(".")
        whole.get_submodule(path)._parameters[leaf] = read[parameter]
    return whole


_LARGEST_SEED = 1 << 62  # largest seed of the first step, which leaves 2**62 seeds for later steps
# parts of the names of the state's buffers in the exported program
_STATE = ("state_adapter", "state_seed")


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
        model: A model from ``open_checkpoint(..., adapter=Adapter(config=...,
            frozen=("lora_A",)))``. It is not changed. The program starts from its adapter's values.
        rows: Most rows of a step's batch; a step runs twice as many.
        tokens: Most tokens of a row.
        zo_eps: Perturbation scale of all steps. The learning rate is an input of each step.
        seed: Seed of the first step's direction; it grows by 1 each step.
        partitioners: ExecuTorch's partitioners of the backends that compute the forward. None:
            XNNPACK's, for CPUs; an empty sequence uses the portable kernels.

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
    require_whole("tokens", tokens, 2, model.longest_row or LARGEST_WHOLE)
    require_whole("seed", seed, 0, _LARGEST_SEED)
    require_number("zo_eps", zo_eps, above=0)
    exir = executorch("exir")
    assembled = assemble(model, rows=rows, tokens=tokens, zo_eps=zo_eps, seed=seed)
    assert isinstance(model, PeftBlockModel), "others were refused"
    names = model.adapter.parameters
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
            # ExecuTorch's warnings about itself and about states without initial values
            warnings.simplefilter("ignore")
            program = _lowered(
                exir, assembled.step, list(assembled.frozen.values()), description, partitioners
            )
    except ZO2Error:
        raise
    except Exception as error:
        # any: a model that cannot be exported leads to errors inside the exporter
        found = (
            f"a model that cannot be exported ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]})"
        )
        expected = "a decoder whose forward torch.export and ExecuTorch support"
        remedy, where = (
            "name fewer layers in the adapter's target_modules, or use another model",
            model.config.model_type,
        )
        raise UnsupportedModelError(f"model type {where}", found, expected, remedy) from error
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
        partitioners = [
            executorch("backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner()
        ]
    tokens = torch.zeros(description.rows, description.tokens, dtype=torch.int64)
    state = step.state
    methods: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "step": (step, (tokens, tokens.clone(), torch.zeros(()))),
        "state": (StateReader(state), ()),
        "restore": (StateWriter(state), (state.adapter.clone(), state.seed.clone())),
        "frozen": (_Constants(frozen), ()),
    }
    with torch.no_grad():
        exported = {
            name: torch.export.export(module, inputs, strict=False)
            for name, (module, inputs) in methods.items()
        }
    edge = exir.to_edge_transform_and_lower(
        exported,
        partitioner={"step": list(partitioners)},
        constant_methods={"description": description.to_json()},
    )
    return edge.to_executorch(
        exir.ExecutorchBackendConfig(
            passes=[
                executorch("exir.passes.init_mutable_pass").InitializedMutableBufferPass(
                    list(_STATE)
                )
            ],
            memory_planning_pass=executorch("exir.passes").MemoryPlanningPass(
                share_mutable_buffers=True
            ),
        )
    )


def _write(path: Path, program: Any) -> None:
    expected, remedy = "a file that can be written", "free space or choose another path"
    with system_errors_as(OutputError, path, expected=expected, remedy=remedy):
        try:
            file = create_file(path)
        except FileExistsError as error:
            raise _in_use(path) from error
        with file:
            try:
                program.write_to_file(file)
                file.flush()
                append_digest(path)
            except BaseException:
                path.unlink()  # this call created it
                raise
        sync_path(path)
        sync_path(path.parent)


def _in_use(path: Path) -> OutputError:
    found = "something at this path"
    return OutputError(
        path, found, "a path that does not exist yet", "choose another path, or remove this file"
    )
