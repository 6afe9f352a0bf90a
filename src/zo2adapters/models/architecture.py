"""The declaration of an architecture, the segment of each parameter of a decoder, and the dtypes
that it has.

Known architectures are declared here, by the config's model type; other models' parts are derived
by a dry run of Hugging Face's own forward on the meta device, with stubs for layers, which a
declaration saves. Modules that the forward calls before the first layer are the embedding, those
after the last one the head. Each layer must take exactly the output of the one before, and nothing
else may use it. Models that do otherwise need a declaration.

Models that read images are trained with them if a declaration says where their vision tower and its
projector are: they run before the first layer and belong to the embedding. Else they are trained on
text alone. What the dry run, which has no images, does not read is left out of the model.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from zo2adapters.models.batches import CAUSAL_LM, Head, reads_images, without_router_losses
from zo2adapters.models.meta_forward import MetaForward, meta_copy
from zo2adapters.models.skeleton import StandIn
from zo2core import BlockLayout, ParameterSpec, SegmentKind
from zo2core.errors import OptionError, UnsupportedModelError, system_errors_as, without_effect
from zo2core.io.durable import open_regular
from zo2core.types import Encoding

_MAX_BYTES = 1 << 20
_EXAMPLE = "see the example in docs/architectures.md"
_MAX_AXES = 8  # axes of hidden states

_MAX_RETURNED = 3  # length of the tuple that a layer returns
_IDENTITY_OPS = (torch.Tensor.to, torch.Tensor.contiguous)  # may return the tensor itself
# operations that unpack tuples
_TUPLE_OPS = (torch.Tensor.__getitem__, torch.Tensor.__iter__, torch.Tensor.unbind)
_TOKENS = 4  # in the one row of the dry run
_SHORT_ROWS = 2  # rows of one token each in a second dry run

_STORED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)
_TRANSFER_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
}
_BACK = "-back"
# the option's values
TRANSFER_DTYPES = ("stored", *_TRANSFER_DTYPES, *(f"{name}{_BACK}" for name in _TRANSFER_DTYPES))
_PROBE_ROUNDS = 20  # measurements, of which the best counts
# of bfloat16's seconds; float16, with its smaller range, must be clearly faster
_FLOAT16_THRESHOLD = 0.5


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of storage, computation and transfer.

    *Exact* precision has one dtype for all three, with MeZO's rounding after every operation.
    *Mixed* precision stores float32, whatever the checkpoint's dtype, and computes under
    ``torch.autocast``: perturbed weights are rounded once, to autocast's dtype. Its results are
    those of monolithic MeZO in float32 under autocast, bit for bit.

    Args:
        stored: The dtype in which updates are replayed and stored. Blocks are converted as they are
            read.
        computed: The dtype of matrix products; by default ``stored``.
        transfer_dtype: The dtype in which a block's matrices travel to a device with its own
            memory, where they are converted back to ``stored``: ``torch.bfloat16``,
            ``torch.float16`` or ``torch.float8_e4m3fn`` with a scale for each output row; by
            default ``stored``. Every device evaluates at these rounded weights, for the same bits.
        transfer_back: Whether blocks are also transferred back in ``transfer_dtype``, which rounds
            every update to it (ZO2, arXiv 2503.12668, section 5.5). Otherwise the host replays
            updates in ``stored``.

    Raises:
        OptionError: if the dtypes are incompatible.
    """

    stored: torch.dtype
    computed: torch.dtype | None = None
    transfer_dtype: torch.dtype | None = None
    transfer_back: bool = False

    def __post_init__(self) -> None:
        if self.stored not in _STORED:
            raise _unfit("stored", str(self.stored), f"one of {', '.join(map(str, _STORED))}")
        transferred = tuple(_TRANSFER_DTYPES.values())
        for name, dtype, dtypes in (
            ("computed", self.autocast, _HALVES),
            ("transfer_dtype", self.carried, transferred),
        ):
            if dtype is not None and not (self.stored is torch.float32 and dtype in dtypes):
                expected = (
                    f"{self.stored}, or one of {', '.join(map(str, dtypes))} where torch.float32 "
                    "is stored"
                )
                raise _unfit(name, f"{dtype} where {self.stored} is stored", expected)
        if self.transfer_back and self.carried is None:
            raise _unfit(
                "transfer_back",
                "True without a transfer dtype",
                "a transfer dtype other than the stored one",
            )

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of ``torch.autocast`` in the forward; None disables it."""
        return None if self.computed in (None, self.stored) else self.computed

    @property
    def carried(self) -> torch.dtype | None:
        """The dtype of transfer, if it is another one than the stored one."""
        return None if self.transfer_dtype in (None, self.stored) else self.transfer_dtype


def _unfit(field: str, found: str, expected: str) -> OptionError:
    where = f"precision.{field}"
    return OptionError(
        where, found, expected, "pass such a value, or store torch.float32 and leave this one out"
    )


def choose_precision(
    precision: Precision | str,
    dtype: torch.dtype,
    *,
    is_given: bool,
    transfer_dtype: str = "stored",
) -> Precision:
    """Make a ``Precision`` from the options of ``open_checkpoint``."""
    name = precision
    if name == "auto":
        name = "mixed" if dtype in _HALVES else "exact"
    if isinstance(name, Precision) and not is_given:
        chosen = name
    elif name == "exact":
        chosen = Precision(stored=dtype)
    elif name == "mixed" and (not is_given or dtype in _HALVES):
        chosen = Precision(
            stored=torch.float32, computed=dtype if is_given else faster_half(product_seconds)
        )
    elif name == "mixed" or isinstance(name, Precision):
        expected = "bfloat16 or float16 with 'mixed', and none with a Precision"
        raise without_effect("dtype", f"{dtype} with precision {name!r}", expected)
    else:
        raise OptionError(
            "precision", repr(name), "'auto', 'exact', 'mixed' or a Precision", "pass one of these"
        )
    if transfer_dtype == "stored":
        return chosen
    if transfer_dtype not in TRANSFER_DTYPES or isinstance(precision, Precision):
        expected = f"one of {', '.join(TRANSFER_DTYPES)}, and none with a Precision"
        raise OptionError("transfer_dtype", repr(transfer_dtype), expected, "pass one of these")
    carried = _TRANSFER_DTYPES[transfer_dtype.removesuffix(_BACK)]
    return replace(chosen, transfer_dtype=carried, transfer_back=transfer_dtype.endswith(_BACK))


def faster_half(seconds: Callable[[torch.dtype], float]) -> torch.dtype:
    """The 16-bit dtype in which products take less time; bfloat16 where they are close."""
    bfloat, half = (seconds(dtype) for dtype in _HALVES)
    return torch.float16 if half < _FLOAT16_THRESHOLD * bfloat else torch.bfloat16


@cache
def product_seconds(dtype: torch.dtype) -> float:
    """Measure a matrix product on this CPU, in CPU seconds of one thread, which do not depend on
    the machine's load.

    A CPU without instructions for a dtype converts element by element.
    """
    rows = torch.ones(64, 1024, dtype=dtype)
    weights = torch.ones(1024, 1024, dtype=dtype)
    best = math.inf
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(_PROBE_ROUNDS):
            start = time.thread_time()
            nn.functional.linear(rows, weights)
            best = min(best, time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return best


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The module paths of a decoder's parts.

    Paths are those of the ``AutoModelForCausalLM`` class. Every parameter must lie under exactly
    one of them.
    """

    model_type: str  # the config's model_type
    # modules that run before the layers; they may be absent in a given model
    embedding: tuple[str, ...]
    blocks: str  # the ModuleList of layers
    head: tuple[str, ...]  # modules that run after the layers; they may be absent in a given model
    # length of the tuple that a layer returns, hidden states first; 0: a bare tensor
    returned: int = 0
    axes: tuple[int, int] = (0, 1)  # axes of rows and of tokens in the hidden states between layers
    ignored: tuple[str, ...] = ()  # name endings of obsolete tensors in old checkpoints
    # modules and parameters that text does not reach: they are not part of the model, and exports
    # copy their tensors
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ParameterFormats:
    """How a model's parameters are stored, transferred and computed."""

    precision: Precision = Precision(stored=torch.float32)
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    trained: Collection[str] | None = None
    resident: Collection[str] = ()
    frozen_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)


def segment_layouts(
    model: PreTrainedModel,
    architecture: Architecture,
    formats: ParameterFormats = ParameterFormats(),
) -> tuple[BlockLayout, ...]:
    """Assign every parameter of a model to a segment."""
    blocks = len(_layers(model, architecture))
    ends = {0, blocks + 1}  # segments of embedding and head
    owned: list[list[ParameterSpec]] = [[] for _ in range(blocks + 2)]
    borrowed: list[list[ParameterSpec]] = [[] for _ in range(blocks + 2)]
    for index, (name, aliases) in enumerate(segment_aliases(model, architecture).items()):
        users = sorted(aliases)
        spec = _parameter_spec(model, name, index, formats)
        is_common = len(users) > 1 and 0 not in users  # shared by layers, and perhaps the head
        if is_common:
            _require_unquantised(spec, architecture)
        in_layers = ends.isdisjoint(users)
        is_resident = is_common or (in_layers and name in formats.resident)
        owner, *borrowers = [0, *users] if is_resident else users
        for user in (owner, *borrowers):
            modules = [
                model.get_submodule(alias.rpartition(".")[0]) for alias in aliases.get(user, ())
            ]
            user_spec = _forward_spec(spec, modules, formats.precision)
            if in_layers and not is_resident:
                user_spec = _streamed_spec(user_spec, formats)
            specs = owned if user == owner else borrowed
            specs[user].append(user_spec)
    return _layouts(owned, borrowed)


def _layouts(
    owned: Sequence[Sequence[ParameterSpec]], borrowed: Sequence[Sequence[ParameterSpec]]
) -> tuple[BlockLayout, ...]:
    """The layouts of an embedding, blocks and a head with these parameters."""
    blocks = len(owned) - 2
    kinds = [SegmentKind.EMBEDDING, *[SegmentKind.BLOCK] * blocks, SegmentKind.HEAD]
    names = ["embedding", *(f"block {i}" for i in range(blocks)), "head"]
    return tuple(
        BlockLayout(name, kind, tuple(specs), tuple(borrowed_specs))
        for name, kind, specs, borrowed_specs in zip(names, kinds, owned, borrowed, strict=True)
    )


def _parameter_spec(
    model: PreTrainedModel, name: str, index: int, formats: ParameterFormats
) -> ParameterSpec:
    """A parameter as it is stored."""
    parameter = model.get_parameter(name)
    return ParameterSpec(
        name,
        tuple(parameter.shape),
        parameter.dtype,
        index,
        # MeZO's trainer decides by the name, so RMSNorm weights decay.
        not any(part in name for part in ("bias", "layer_norm", "layernorm")),
        encoding=formats.encodings.get(name),
        frozen=formats.trained is not None and name not in formats.trained,
    )


def _require_unquantised(spec: ParameterSpec, architecture: Architecture) -> None:
    """Refuse a quantised weight of several layers."""
    if spec.encoding is None:
        return
    raise UnsupportedModelError(
        f"{architecture.model_type}: {spec.name}",
        f"a weight in {spec.encoding.name} that several layers share",
        "quantised weights in one layer each, or in embedding and head",
        "use the unquantised checkpoint",
    )


def _forward_spec(
    spec: ParameterSpec, modules: Sequence[nn.Module], precision: Precision
) -> ParameterSpec:
    """A parameter with the dtype in which these modules compute with it.

    Weights and biases of linear layers are cast before the forward. Norms and embeddings compute in
    float32, and others are cast inside the forward, with the same bits.
    """
    is_linear = bool(modules) and all(type(module) is nn.Linear for module in modules)
    return replace(spec, forward_dtype=precision.autocast if is_linear else None)


def _streamed_spec(spec: ParameterSpec, formats: ParameterFormats) -> ParameterSpec:
    """A parameter of a layer that is streamed, with its dtypes in files and in transfers."""
    precision = formats.precision
    if precision.carried is not None and len(spec.shape) > 1:
        spec = replace(
            spec, transfer_dtype=precision.carried, transfer_back=precision.transfer_back
        )
    if spec.frozen and spec.name in formats.frozen_dtypes:
        spec = replace(
            spec,
            dtype=formats.frozen_dtypes[spec.name],
            forward_dtype=spec.forward_dtype or spec.dtype,
        )
    return spec


def segment_aliases(
    model: PreTrainedModel, architecture: Architecture
) -> dict[str, dict[int, list[str]]]:
    """Map each parameter's name in ``named_parameters()`` to its names in each segment that uses
    it.
    """
    blocks = len(_layers(model, architecture))
    paths = dict.fromkeys(architecture.embedding, 0)
    paths |= {f"{architecture.blocks}.{i}": i + 1 for i in range(blocks)}
    paths |= dict.fromkeys(architecture.head, blocks + 1)
    segments: dict[str, dict[int, list[str]]] = {}
    for name, aliases in parameter_names(model).items():
        segments[name] = {}
        for alias in aliases:
            segments[name].setdefault(_segment(alias, paths, architecture), []).append(alias)
    return segments


def require_axes(
    hidden: torch.Tensor, ids: torch.Tensor, axes: tuple[int, int], model_type: str
) -> None:
    """Refuse hidden states whose rows and tokens do not lie along the declared axes."""
    if hidden.dim() > max(axes) and tuple(hidden.shape[axis] for axis in axes) == tuple(ids.shape):
        return
    raise UnsupportedModelError(
        f"model type {model_type}",
        f"hidden states of shape {list(hidden.shape)} for {ids.shape[0]} rows of {ids.shape[1]} "
        "tokens",
        f"rows along axis {axes[0]} and tokens along axis {axes[1]}, as the architecture says",
        "declare these axes as `axes` of the Architecture",
    )


def _layers(model: PreTrainedModel, architecture: Architecture) -> nn.ModuleList:
    layers = dict(model.named_modules()).get(architecture.blocks)
    if isinstance(layers, nn.ModuleList):
        return layers
    raise UnsupportedModelError(
        f"{architecture.model_type}: {architecture.blocks}",
        "no such module in this model" if layers is None else f"a {type(layers).__name__}",
        "the path of a ModuleList",
        "declare it as the blocks of the Architecture",
    )


def parameter_names(model: nn.Module) -> dict[str, list[str]]:
    """Map each parameter's name in ``named_parameters()`` to all its names in the model, in
    registration order.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {aliases[0]: aliases for aliases in names.values()}


def _segment(name: str, paths: Mapping[str, int], architecture: Architecture) -> int:
    path = name
    while path := path.rpartition(".")[0]:
        if path in paths:
            return paths[path]
    raise UnsupportedModelError(
        f"{architecture.model_type}: {name}",
        "a parameter outside the declared embedding, blocks and head",
        "a parameter under "
        f"{', '.join([*architecture.embedding, architecture.blocks, *architecture.head])}",
        "declare its module in the Architecture",
    )


def read_architecture(path: Path) -> Architecture:
    """Read a declaration."""
    with (
        system_errors_as(OptionError, path, expected="a readable file", remedy=_EXAMPLE),
        open_regular(path) as file,
    ):
        text = file.read(_MAX_BYTES)
    try:
        values: dict[str, Any] = dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(path, f"no object in JSON ({error})", "a JSON object") from error
    known = {field.name for field in fields(Architecture)}
    missing = sorted(known - {"returned", "axes", "ignored", "left_out"} - values.keys())
    unknown = sorted(values.keys() - known)
    if missing or unknown:
        found = f"no {missing[0]!r}" if missing else f"a field {unknown[0][:40]!r}"
        raise _refused(path, found, ", ".join(sorted(known)))
    for name, value in values.items():
        is_valid, expected = _checked(name, value)
        if not is_valid:
            raise _refused(f"{path}: {name}", f"{str(value)[:40]!r}", expected)
    declared: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return Architecture(**declared)


def _checked(name: str, value: Any) -> tuple[bool, str]:
    """Whether a field's value is valid, and what is."""
    items = value if isinstance(value, list) else []
    if name == "returned":
        return type(value) is int and 0 <= value <= 3, "an integer from 0 to 3"
    if name == "axes":
        are_axes = len(items) == 2 and all(
            type(axis) is int and 0 <= axis < _MAX_AXES for axis in items
        )
        return are_axes and items[0] != items[
            1
        ], f"a list of two different integers from 0 to {_MAX_AXES - 1}"
    if name in ("embedding", "head", "ignored", "left_out"):
        return items is value and all(
            isinstance(item, str) and item for item in items
        ), "a list of names"
    return isinstance(value, str) and value != "", "a name"


def _refused(where: object, found: str, expected: str) -> OptionError:
    return OptionError(str(where), found, expected, _EXAMPLE)


def _declared(model_type: str, *towers: str, decoder: str = "model") -> Architecture:
    return Architecture(
        model_type=model_type,
        embedding=(*towers, f"{decoder}.embed_tokens"),
        blocks=f"{decoder}.layers",
        head=(f"{decoder}.norm", "lm_head"),
    )


_TOWER = "model.vision_tower", "model.multi_modal_projector"
_DECLARED = (
    # ``final_layer_norm`` (and, in 350m, ``project_out`` before ``project_in``) is registered
    # before the layers, so MeZO draws its noise before theirs although it runs after them. 350m has
    # a narrower embedding with two projections.
    Architecture(
        model_type="opt",
        embedding=(
            "model.decoder.embed_tokens",
            "model.decoder.embed_positions",
            "model.decoder.project_in",
        ),
        blocks="model.decoder.layers",
        head=("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"),
        ignored=("decoder.version",),
    ),
    _declared("llama"),
    _declared("qwen2"),  # small sizes tie the head to the embedding
    _declared("qwen3"),
    *(
        _declared(model_type, "model.visual", decoder="model.language_model")
        for model_type in ("qwen2_vl", "qwen2_5_vl")
    ),
    *(
        _declared(model_type, *_TOWER, decoder="model.language_model")
        for model_type in ("gemma3", "llava", "mistral3", "internvl", "paligemma")
    ),
    *(
        _declared(model_type, "model.vision_model", "model.connector", decoder="model.text_model")
        for model_type in ("idefics3", "smolvlm")
    ),
)
ARCHITECTURES: Mapping[str, Architecture] = {
    declared.model_type: declared for declared in _DECLARED
}


class _DryRun(MetaForward):
    """Forwards of a copy of a model on the meta device, with stubs for its layers, and the record
    of the last one.

    Data may flow from part to part only through the layers' hidden states. If what the forward
    reads as values leads to an error, the caller tries the other one.
    """

    def __init__(
        self, model: PreTrainedModel, layers: nn.ModuleList, returned: int, *, read_as: bool
    ) -> None:
        super().__init__(read_as=read_as)
        self.returned = returned  # length of the tuple that a layer returns; 0: a bare tensor
        # the other values of a layer's tuple
        self.others = [object() for _ in range(max(returned - 1, 0))]
        # hidden states' shape before the first layer, for each forward
        self.shapes: list[torch.Size] = []
        self.layers = len(layers)
        stubs = nn.ModuleList(_DryLayer(layer, index, self) for index, layer in enumerate(layers))
        self.model: Any = meta_copy(model, {id(layers): stubs})
        modules = self.model.named_modules()
        self.owners = {
            name: module
            for name, module in modules
            if any(p is not None for p in module._parameters.values())
        }
        self.read: set[int] = set()  # ids of parameters that any of the forwards has read
        for name, module in self.owners.items():
            module.register_forward_pre_hook(partial(self._called, name))

    def forward(self, rows: int, tokens: int, **inputs: torch.Tensor) -> Any:
        """Run the forward."""
        self.reached = 0  # layers called so far
        self.before: list[str] = []  # modules called before the first layer
        self.between: list[str] = []
        self.after: list[str] = []
        self.layer_outputs: list[torch.Tensor] = []  # each layer's hidden states
        # by id: tensors computed from parameters before the last layer
        self.from_embedding: dict[int, torch.Tensor] = {}
        off = without_router_losses(self.model)
        with torch.inference_mode(), torch.device("meta"), self:
            ids = torch.zeros(rows, tokens, dtype=torch.int64)
            return self.model(input_ids=ids, use_cache=False, **off, **inputs)

    def names(self, path: str) -> frozenset[str]:
        """The names of a module's own parameters."""
        own = self.owners[path]._parameters
        return frozenset(f"{path}.{leaf}" for leaf, p in own.items() if p is not None)

    def unread(self) -> frozenset[str]:
        """The names of the parameters outside the layers that no forward has read."""
        return frozenset(
            f"{path}.{leaf}"
            for path, module in self.owners.items()
            for leaf, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in self.read
        )

    def _called(self, name: str, module: nn.Module, inputs: object) -> None:
        if self.reached == 0:
            self.before.append(name)
        elif self.reached == self.layers:
            self.after.append(name)
        else:
            self.between.append(name)

    def followed(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """See the base class."""
        arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.read.update(id(leaf) for leaf in arguments if results)
        if results and not (func in _IDENTITY_OPS and result is args[0]):
            self._follow(func, arguments, results)

    def _follow(
        self, func: Any, arguments: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        is_past = self.reached == self.layers
        for index, hidden in enumerate(self.layer_outputs[:-1] if is_past else self.layer_outputs):
            if any(tensor is hidden for tensor in arguments):
                if func in _TUPLE_OPS:
                    raise IndexError(f"layer {index} returned no tuple")
                raise _MismatchError(
                    f"what layer {index} returned is used outside of layer {index + 1}"
                )
        is_from_embedding = any(id(tensor) in self.from_embedding for tensor in arguments)
        if is_past and is_from_embedding:
            raise _MismatchError("what is computed before the layers is used after them")
        if not is_past and (
            is_from_embedding or any(isinstance(tensor, nn.Parameter) for tensor in arguments)
        ):
            self.from_embedding |= {id(tensor): tensor for tensor in results}


class _MismatchError(Exception):
    """A layer does not take exactly the output of the one before."""


class _DryLayer(StandIn):
    """Stands in for a layer of the dry run."""

    def __init__(self, layer: nn.Module, index: int, run: _DryRun) -> None:
        super().__init__(layer)
        self.index = index
        self.run = run

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Check the order of calls, and return a new tensor."""
        run = self.run
        if self.index != run.reached:
            raise _MismatchError(f"layer {self.index} is called after {run.reached} layers")
        if self.index > 0 and hidden_states is not run.layer_outputs[-1]:
            raise _MismatchError(
                f"layer {self.index} does not get what layer {self.index - 1} returned"
            )
        if any(value is other for value in (*args, *kwargs.values()) for other in run.others):
            raise _MismatchError(
                f"layer {self.index} gets more of layer {self.index - 1} than its hidden states"
            )
        run.shapes += [hidden_states.shape] if self.index == 0 else []
        run.reached += 1
        output = torch.empty(hidden_states.shape, dtype=hidden_states.dtype)
        run.layer_outputs.append(output)
        return output if run.returned == 0 else (output, *run.others)


def architecture_of(
    model: PreTrainedModel, head: Head, declared: Architecture | Path | None
) -> Architecture:
    """The caller's declaration of a model, else the known or the derived one."""
    model_type = model.config.model_type
    if declared is None:
        known = ARCHITECTURES.get(model_type) if head is CAUSAL_LM else None
        return known or derive_architecture(model, head)
    architecture = read_architecture(declared) if isinstance(declared, Path) else declared
    if architecture.model_type != model_type:
        found = f"a declaration of {architecture.model_type}"
        remedy = "pass the declaration of this model, or leave it out"
        raise OptionError(
            "architecture", found, f"a declaration of {model_type}, as config.json says", remedy
        )
    return architecture


def derive_architecture(model: PreTrainedModel, head: Head = CAUSAL_LM) -> Architecture:
    """Derive where a model's parts are."""
    where = f"model type {model.config.model_type}"
    path, layers = _outermost_layers(model, where)
    problem = ""
    mismatch = ""
    between = ""
    for returned, read_as in product(range(_MAX_RETURNED + 1), (True, False)):
        run = _DryRun(model, layers, returned, read_as=read_as)
        try:
            is_next_token = head is not CAUSAL_LM or _has_next_token_loss(run)
            if head is not CAUSAL_LM:
                run.forward(1, _TOKENS)
            architecture = _architecture(run, path, where)
            if head is CAUSAL_LM:
                architecture = replace(architecture, axes=_axes(run, where))
            if is_next_token:
                return architecture
            raise _underivable(
                where,
                "a loss other than that of the next token, as transformers computes it of all "
                "logits",
            )
        except UnsupportedModelError:
            raise
        except _MismatchError as error:
            mismatch = mismatch or str(error)
            between = between or next(iter(run.between), "")
        except Exception as error:  # any: unexpected values lead forwards to all kinds of errors
            problem = problem or " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if between:
        raise _underivable(where, f"{between}, called between two layers")
    raise _underivable(
        where, f"layers in {path} that do not follow each other ({mismatch or problem})"
    )


def _outermost_layers(model: PreTrainedModel, where: str) -> tuple[str, nn.ModuleList]:
    """The list of layers with the most parameters, of those not nested in another list: of a model
    that reads images, in its decoder.
    """
    whole: Any = model
    decoder: nn.Module = whole.get_decoder() if reads_images(model.config) else model
    within = {id(module) for module in decoder.modules()}
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and id(module) in within
            and not any(name.startswith(f"{outer}.") for outer, _ in lists)
        ):
            lists.append((name, module))
    if not lists:
        raise _underivable(where, "no list of layers")
    return max(lists, key=lambda pair: sum(parameter.numel() for parameter in pair[1].parameters()))


def _has_next_token_loss(run: _DryRun) -> bool:
    """Run the forward, and return whether its loss is exactly the model's loss function of logits
    and labels.

    Counting labelled tokens and computing logits in chunks rely on that. Models with other heads
    need no such loss.
    """
    calls: list[tuple[torch.Tensor, ...]] = []

    def loss(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((logits, labels, logits.new_empty(())))
        return calls[-1][-1]

    vars(run.model)["_loss_function"] = loss
    labels = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    output = run.forward(1, _TOKENS, labels=labels)
    expected = output.logits, labels, output.loss
    return bool(calls) and all(
        tensor is other for tensor, other in zip(calls[-1], expected, strict=True)
    )


def _axes(run: _DryRun, where: str) -> tuple[int, int]:
    """Find the axes of rows and of tokens in hidden states: those whose sizes are the batch's in
    both dry runs.

    The second one has rows of one token, which is how logits of final hidden states are computed.
    """
    try:
        run.forward(_SHORT_ROWS, 1)
    except Exception as error:  # any, as in a dry run of longer rows
        raise _underivable(
            where, f"a forward that takes no rows of one token ({type(error).__name__}: {error})"
        ) from error
    long, short = run.shapes
    sizes = list(zip(long, short, strict=False))
    expected_sizes = [(1, _SHORT_ROWS), (_TOKENS, 1)]
    others = [pair for pair in sizes if pair not in expected_sizes]
    if (
        len(long) != len(short)
        or len(sizes) != len(others) + 2
        or any(first != second for first, second in others)
    ):
        found = (
            f"hidden states of shape {list(long)} for a row of {_TOKENS} tokens, {list(short)} "
            f"for {_SHORT_ROWS} of one"
        )
        raise _underivable(where, f"{found}: no axis of rows and one of tokens")
    rows, tokens = (sizes.index(pair) for pair in expected_sizes)
    return rows, tokens


def _architecture(run: _DryRun, path: str, where: str) -> Architecture:
    """Make a declaration of a dry run, in which each module must be called, and on one side of the
    layers only. Of a model that reads images, what is not read is left out.
    """
    if run.reached != run.layers:
        raise _MismatchError(f"{run.reached} of {run.layers} layers are called")
    if run.between:
        raise _underivable(where, f"{run.between[0]}, called between two layers")
    both = [name for name in run.before if name in run.after]
    if both:
        raise _underivable(where, f"{both[0]}, called before the layers and after them")
    called = {*run.before, *run.after}
    unread = run.unread() if reads_images(run.model.config) else frozenset()
    _require_called(run, called, unread, where)
    without = {name for name in called if run.names(name) <= unread}
    return Architecture(
        model_type=run.model.config.model_type,
        embedding=tuple(name for name in dict.fromkeys(run.before) if name not in without),
        blocks=path,
        head=tuple(name for name in dict.fromkeys(run.after) if name not in without),
        returned=run.returned,
        left_out=_outermost(run.model, unread, called),
    )


def _require_called(
    run: _DryRun, called: Collection[str], unread: Collection[str], where: str
) -> None:
    """Refuse a parameter, other than an unread one, that no module has which is called."""
    tied = {id(p) for name in called for p in run.owners[name]._parameters.values()}
    for name, module in run.owners.items():
        for leaf, p in module._parameters.items():
            path = f"{name}.{leaf}"
            if p is not None and id(p) not in tied and path not in unread:
                raise _underivable(where, f"{path}, a parameter whose module is never called")


def _outermost(
    model: nn.Module, names: Collection[str], called: Collection[str]
) -> tuple[str, ...]:
    """Paths of the outermost modules all of whose parameters have these names, and none of whose
    parts is called, and the names of the other parameters.
    """
    paths: list[str] = []
    for path, module in model.named_modules():
        within = [name for name, _ in module.named_parameters(path, remove_duplicate=False)]
        is_inside = is_under(path, paths)
        are_called = any(is_under(part, (path,)) for part in called)
        if path and within and not is_inside and not are_called and {*within} <= {*names}:
            paths.append(path)
    return (*paths, *(name for name in sorted(names) if not is_under(name, paths)))


def is_under(name: str, paths: Collection[str]) -> bool:
    """Whether a module or parameter is one of these modules, or in one of them."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _underivable(where: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        where,
        found,
        "an embedding, a list of layers that each take the output of the one before, and a head",
        "declare an Architecture and pass it to open_checkpoint; docs/architectures.md shows how",
    )
