"""Cut any Hugging Face decoder into embedding, blocks and head by running Hugging Face's own code.

The model is built from its config with parameters on the meta device. Its layers are replaced by stubs. *Prologue*: HF's
forward runs until the last stub has recorded with which arguments HF calls each layer. Each real layer is then called with
what was recorded for it. *Epilogue*: HF's forward runs again, each stub returning the final hidden state: norm, head and
loss are HF's own. No forward is copied, so none can rot.

Trade-off: embedding, positions and masks are computed twice a forward, which costs little beside one layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from zo2adapters.models.batch_check import check_batch
from zo2adapters.models.branch_cache import Answers, PreparedBatch, predictions
from zo2adapters.models.chunked_loss import chunked_loss
from zo2adapters.models.footprint import forward_bytes, held_bytes
from zo2adapters.models.stubs import CutError, Recorder, Stub
from zo2core import BlockLayout, ParameterSpec, SegmentKind, UnsupportedModelError
from zo2core.protocols import TensorReader
from zo2core.types import Batch


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Where a decoder's parts are: all that a new architecture has to say.

    Module paths are those of the ``AutoModelForCausalLM`` class. Every parameter must lie under exactly one of them.
    """

    model_type: str  # of the config
    embedding: tuple[str, ...]  # modules that run before the layers; they may be absent in a given model
    blocks: str  # the ModuleList of layers
    head: tuple[str, ...]  # modules that run after the layers; they may be absent in a given model
    returns_tuple: bool = False  # a layer returns (hidden, ...) instead of hidden
    ignored: tuple[str, ...] = ()  # endings of tensor names that old checkpoints carry and no model has


class Activations(NamedTuple):
    """What goes from segment to segment."""

    hidden: torch.Tensor  # (batch, tokens, hidden size)
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]  # per layer: HF's other arguments (masks, positions, ...)


class HFBlockModel:
    """A Hugging Face causal language model as segments.

    Args:
        skeleton: From ``build_skeleton``; changed: its layers become stubs.
        architecture: Where its parts are.
        weights: The checkpoint, by the skeleton's parameter names.
        companions: Files to lay beside exported weights.
        loss_chunk: Labelled tokens whose logits are there at a time; None: all.

    Raises:
        UnsupportedModelError: if the architecture's declaration does not fit the model.
    """

    def __init__(
        self,
        skeleton: PreTrainedModel,
        architecture: Architecture,
        weights: TensorReader,
        companions: Mapping[str, Path | bytes],
        *,
        loss_chunk: int | None = None,
    ) -> None:
        self.config = skeleton.config
        self.layouts = cut(skeleton, architecture)
        self.weights = weights
        self.companions = companions
        self.loss_chunk = loss_chunk
        self._aliases = parameter_names(skeleton)
        self._modules = dict(skeleton.named_modules())
        self._skeleton = skeleton
        self._recorder = Recorder()
        self._of_stand_ins = Answers()  # the same for any number of them
        layers = skeleton.get_submodule(architecture.blocks)
        assert isinstance(layers, nn.ModuleList)
        self._layers = list(layers)
        for i, layer in enumerate(self._layers):
            last = i + 1 == len(self._layers)
            layers[i] = Stub(layer, self._recorder, last=last, returns_tuple=architecture.returns_tuple)

    @property
    def hf_forward(self) -> Callable[..., Any]:
        """HF's forward, for asking which arguments it takes."""
        return self._skeleton.forward

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Make these views the modules' parameters, a tied one under each of its names."""
        for name, view in parameters.items():
            for alias in self._aliases[name]:
                path, _, leaf = alias.rpartition(".")
                self._modules[path]._parameters[leaf] = nn.Parameter(view, requires_grad=False)
        device = next(iter(parameters.values())).device
        for module in self._modules.values():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)

    def prepared(self, batch: Batch) -> Batch:
        """Check a batch, and learn what HF's forward asks about it. See the contract."""
        check_batch(batch, self.config)
        found = PreparedBatch(dict(batch))
        if batch["input_ids"].device.type != "cpu":  # there it costs nothing to ask, the first time
            self.learn(found)
        return found

    @torch.inference_mode()
    def learn(self, batch: Batch) -> None:
        """Have HF's forward ask all that it asks about a batch, and about what stands in for final hidden states."""
        self.embed(batch)
        with self._of_stand_ins:
            self.prologue(input_ids=torch.zeros_like(batch["input_ids"][:1, :1]), use_cache=False)

    def embed(self, batch: Batch) -> Activations:
        """Run HF's forward up to the first layer. See the contract."""
        with _answers(batch):
            return self.prologue(**{key: value for key, value in batch.items() if key != "labels"}, use_cache=False)

    def prologue(self, **inputs: Any) -> Activations:
        """Run HF's forward with these arguments up to the first layer."""
        recorder = self._recorder
        recorder.reset()
        with contextlib.suppress(CutError):
            self._skeleton(**inputs)
        assert recorder.hidden is not None, "HF's forward did not reach the last layer"
        return Activations(recorder.hidden, recorder.calls)

    def block(self, index: int, activations: Activations) -> Activations:
        """Run one layer with the arguments HF gave it."""
        args, kwargs = activations.calls[index]
        out = self._layers[index](activations.hidden, *args, **kwargs)
        return activations._replace(hidden=out[0] if isinstance(out, tuple) else out)

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Run HF's norm, head and loss on the final hidden state."""
        if self.loss_chunk is None:
            with _answers(batch):
                return self._epilogue(activations.hidden, "loss", **batch)
        return chunked_loss(
            activations.hidden,
            batch["labels"],
            batch.predictions if isinstance(batch, PreparedBatch) else predictions(batch["labels"]),
            self.loss_chunk,
            logits=self.logits,
            loss_function=self._skeleton.loss_function,
            vocab_size=self.config.vocab_size,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run HF's norm and head on final hidden states, (n, hidden size); returns (n, vocabulary)."""
        # Each is a row of one token: there may be more of them than the model has positions.
        ids = torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
        with self._of_stand_ins:
            return self._epilogue(hidden[:, None], "logits", input_ids=ids)[:, 0]

    def _epilogue(self, final: torch.Tensor, wanted: str, **inputs: torch.Tensor) -> torch.Tensor:
        self._recorder.final = final
        try:
            found = getattr(self._skeleton(**inputs, use_cache=False), wanted)
        finally:
            self._recorder.final = None
        assert isinstance(found, torch.Tensor)
        return found

    def held_bytes(self, batch: Batch) -> int:
        """By formula. See the contract."""
        rows, tokens = batch["input_ids"].shape
        return held_bytes(self.config, rows, tokens)

    def forward_bytes(self, batch: Batch) -> int:
        """By formula. See the contract."""
        rows, tokens = batch["input_ids"].shape
        return forward_bytes(self.config, rows, tokens, loss_chunk=self.loss_chunk)


def _answers(batch: Batch) -> contextlib.AbstractContextManager[object]:
    """What is known about a batch."""
    return batch.answers if isinstance(batch, PreparedBatch) else contextlib.nullcontext()


class _ParametersOnMeta(TorchFunctionMode):
    """Uninitialised tensors go to the meta device, computed ones (rotary tables and other buffers) stay real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            kwargs = {**(kwargs or {}), "device": "meta"}
        return func(*args, **(kwargs or {}))


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model whose parameters take no memory, ready to be cut.

    Args:
        config: Of the checkpoint. Remote code is not run.
        dtype: Of the parameters.

    Raises:
        UnsupportedModelError: if the model cannot be built so, or wants parts of itself in another dtype.
    """
    where = f"model type {config.model_type}"
    with _ParametersOnMeta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=False
        )
    model.train(mode=False)
    if dtype is torch.float16 and getattr(model, "_keep_in_fp32_modules", None):
        raise UnsupportedModelError(
            where, found="modules that stay in float32", expected="one dtype", remedy="use dtype bfloat16 or float32"
        )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UnsupportedModelError(
                f"{where}: {name}",
                found="a buffer without values",
                expected="buffers that follow from the config",
                remedy="this architecture needs an adapter of its own",
            )
    return model


def cut(model: PreTrainedModel, architecture: Architecture) -> tuple[BlockLayout, ...]:
    """Assign every parameter of a model to a segment.

    Raises:
        UnsupportedModelError: naming a parameter that lies under no declared part, or a tie between other parts than
            embedding and head.
    """
    blocks = len(model.get_submodule(architecture.blocks))  # type: ignore[arg-type]
    paths = dict.fromkeys(architecture.embedding, 0)
    paths |= {f"{architecture.blocks}.{i}": i + 1 for i in range(blocks)}
    paths |= dict.fromkeys(architecture.head, blocks + 1)
    owned: list[list[ParameterSpec]] = [[] for _ in range(blocks + 2)]
    borrowed: list[list[ParameterSpec]] = [[] for _ in range(blocks + 2)]
    for index, (name, aliases) in enumerate(parameter_names(model).items()):
        parameter = model.get_parameter(name)
        spec = ParameterSpec(name, tuple(parameter.shape), parameter.dtype, index, decays_in_mezo(name))
        users = sorted({_segment(alias, paths, architecture) for alias in aliases})
        if len(users) > 1 and users != [0, blocks + 1]:
            raise UnsupportedModelError(
                f"{architecture.model_type}: {name}",
                found=f"a weight that segments {users} share",
                expected="ties between embedding and head only",
                remedy="this architecture needs an adapter of its own",
            )
        owned[users[0]].append(spec)
        for user in users[1:]:
            borrowed[user].append(spec)
    kinds = [SegmentKind.EMBEDDING, *[SegmentKind.BLOCK] * blocks, SegmentKind.HEAD]
    names = ["embedding", *(f"block {i}" for i in range(blocks)), "head"]
    return tuple(
        BlockLayout(name, kind, tuple(own), tuple(other))
        for name, kind, own, other in zip(names, kinds, owned, borrowed, strict=True)
    )


def decays_in_mezo(name: str) -> bool:
    """Whether MeZO's trainer applies weight decay to a parameter: it goes by the name, and so RMSNorm weights decay."""
    return not any(part in name for part in ("bias", "layer_norm", "layernorm"))


def parameter_names(model: nn.Module) -> dict[str, list[str]]:
    """Each parameter's name in ``named_parameters()``, to all names it has in the model, in registration order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {aliases[0]: aliases for aliases in names.values()}


def _segment(name: str, paths: Mapping[str, int], architecture: Architecture) -> int:
    for path in _prefixes(name):
        if path in paths:
            return paths[path]
    raise UnsupportedModelError(
        f"{architecture.model_type}: {name}",
        found="a parameter outside the declared embedding, blocks and head",
        expected=f"one under {', '.join([*architecture.embedding, architecture.blocks, *architecture.head])}",
        remedy="declare its module in the Architecture",
    )


def _prefixes(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
