"""Parameter-efficient training: a few new parameters in peft's modules, and a base that is only
read.

Peft inserts its modules into the skeleton, names their parameters and makes their initial values.
The embedding's segment owns all of these parameters and blocks borrow theirs, so that blocks never
change.

Most kinds wrap linear layers, and their initial values depend only on the seed and the layers'
shapes. LoRA and DoRA have two thin matrices in addition to a linear layer's matrix, DoRA also a
vector of magnitudes; a stack of experts gets a pair of matrices for each expert
(``target_parameters``). The parameter of a prefix is peft's table of keys and values, without a
projection; they start as MeZO's, with those that the base computes for random tokens.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from zo2adapters.models.adapter_files import (
    ADAPTER_NAME,
    CONFIG_FILE,
    FILE_PREFIX,
    SAVED,
    mapped_by_peft,
    read_adapter,
    weights_of,
    without_adapter_name,
)
from zo2adapters.models.batches import longest_row
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.library_names import Conv1D, names_of
from zo2adapters.models.shared_projections import (
    projections,
    projections_digest,
    put_vera,
    require_key,
    round_projections,
    take_projections,
)
from zo2adapters.models.token_rows import (
    WRAPPER,
    copied_bytes,
    is_token_layer,
    own_parameters,
    require_known_tokens,
    token_rows,
)
from zo2adapters.optional_package import optional_package
from zo2core import Engine, HostPlan, MemoryPolicy, ParameterSpec
from zo2core.checkpoint.shards import TensorEntry, require_own_file
from zo2core.encodings.decoding import decoded
from zo2core.errors import (
    CheckpointError,
    OptionError,
    UnsupportedModelError,
    ZO2Warning,
    reason,
    system_remedy,
    without_effect,
)
from zo2core.io.durable import open_regular
from zo2core.protocols import TensorReader
from zo2core.ranges import LARGEST_WHOLE, require_number, require_whole

# part of the names of a wrapped module's parameters
_WRAPPED = re.compile(rf"(\.({WRAPPER}|base_layer|original_module))+\.")
# returns initial values by parameter, in its dtype
FirstValues = Callable[[], Mapping[str, torch.Tensor]]

# among ``target_modules``: linear layers outside experts, and stacks of experts
AUTO, EXPERTS = "auto", "experts"
_LAYERS = {
    "modules_to_save",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
}
_NEUTRAL = {  # options of every config that do not change a run
    *(
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "peft_version",
        "auto_mapping",
    )
}
_TASK_TYPE = "adapter.task_type"
# modules that peft trains whole, by task, where the model has them
_OF_TASK: Mapping[str | None, tuple[str, ...]] = {
    **dict.fromkeys(("SEQ_CLS", "TOKEN_CLS"), ("classifier", "score")),
    "QUESTION_ANS": ("qa_outputs",),
}
_DROPOUT = {
    "lora_dropout",
    "rank_dropout",
    "module_dropout",
    "vera_dropout",
}  # options that change training only
# float32 matrices of a layer's shape that exist at a time in a forward: products, their sum, the
# weights
_MATRICES = 4
_LARGEST_RANK = 1 << 16
_FLOAT32_MAX = torch.finfo(torch.float32).max
_LARGEST_CONFIG = 1 << 20  # bytes

_ENCODER = "prompt_encoder"  # name of the module of a prefix's table in peft's model
_TABLE = f"{_ENCODER}.{ADAPTER_NAME}.embedding.weight"
_BASE_SIZES = ("num_layers", "token_dim", "num_attention_heads", "num_transformer_submodules")
_TASK = "CAUSAL_LM"
_STACK_AXES = 3  # of a stack of experts' matrices
_SHORTEST_ROW = 2  # tokens of the shortest useful row: one to read and one to predict
_NO_LIMIT = 1 << 62  # bytes of a host plan that streams one block at a time

T = TypeVar("T")
OpenBase = Callable[[], HFBlockModel]  # opens the base without the adapter


def base_form(name: str) -> str:
    """The name in the base of a parameter of the model with an adapter; a trained copy has the name
    of its original.
    """
    return _WRAPPED.sub(".", name).replace(SAVED, ".")


def read_weight(weights: TensorReader, spec: ParameterSpec) -> torch.Tensor:
    """Read a parameter of the base, decoded, in its shape."""
    stored = torch.empty(spec.stored_numel, dtype=spec.stored_dtype)
    weights.read_into(spec.name, stored)
    return (stored if spec.encoding is None else decoded(spec, stored)).view(spec.shape)


def put_value(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Set the parameter of this name to a tensor."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = nn.Parameter(value)


@dataclass(frozen=True)
class AdapterKind:
    """A kind of peft's adapters that wraps linear layers. To add one, add it to ``KINDS``.

    Args:
        peft_type: The kind's name in peft's files.
        title: Name in messages.
        decisive: Its supported options that change the forward: part of a run's description.
        supported: Other supported options, which change only initial values, parameters or files.
        part_of_names: A part of the names of some parameters, as an example in messages.
        accepted: What it is supported for, for messages.
        is_mixed: Whether it computes in mixed precision what it computes in the whole model.
    """

    # whether it is for causal language models that read no images
    is_of_text_alone: ClassVar[bool] = False
    embedding: ClassVar[tuple[str, ...]] = ()  # modules that run before the layers

    peft_type: str
    title: str
    decisive: set[str]
    supported: set[str]
    part_of_names: str
    accepted: str = "linear layers alone, without dropout"
    is_mixed: bool = True

    def unused_options(self, config: Any) -> list[str]:
        """Names of options whose value is not supported."""
        return []

    def not_stacked(self, config: Any) -> str | None:
        """Name of these adapters in the error that refuses low-rank perturbations; None: they are
        supported.
        """
        return self.title

    def file_name(self, name: str) -> str:
        """The name of a parameter in peft's files."""
        # without its module's name
        name = name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name
        return FILE_PREFIX + without_adapter_name(name)

    def mapped(
        self, skeleton: PreTrainedModel, state: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The tensors of a file by the parameters to which peft loads them."""
        return mapped_by_peft(skeleton, state)

    def insert(
        self, skeleton: PreTrainedModel, config: Any, seed: int, idle: Collection[str]
    ) -> Any:
        """Put peft's modules into a skeleton, some of whose layers are never called.

        Returns peft's model around it, if the adapter only works through that.
        """
        _wrap_layers(skeleton, config, seed=seed)

    def forward_bytes(self, skeleton: PreTrainedModel, config: Any) -> int:
        """Bytes of the matrices that exist at a time in the forward of the largest wrapped
        layer.
        """
        largest = max(layer.base_layer.weight.numel() for _, layer in _wrapped_layers(skeleton))
        return int(_MATRICES * torch.float32.itemsize * largest)

    def first_values(
        self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase
    ) -> FirstValues:
        """Prepare the initial values of a new adapter: those that peft has drawn."""
        values = {
            name: value.detach().contiguous()
            for name, value in _added(skeleton)
            if SAVED not in name
        }
        return lambda: values


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter in a skeleton, with its initial values."""

    kind: AdapterKind
    config: Any  # peft's config
    parameters: Mapping[str, str]  # names in peft's files, by names in the skeleton
    tensors: Mapping[str, torch.Tensor]  # its parameters by name, on the meta device
    trained: frozenset[str]  # names of the trained parameters
    values: FirstValues
    # parameters of the base that are saved beside the adapter's, with values of their own, by name
    beside: Mapping[str, TensorEntry]
    where: str  # name of the adapter in messages
    forward_bytes: int  # memory that a layer's forward needs in addition to the base's
    # peft's model around the skeleton, if the adapter only works through it; else None
    wrapper: Any
    trains_base: bool  # whether the base's parameters are trained, too
    # tensors of the adapter that are not trained, by their names in peft's files
    constants: Mapping[str, torch.Tensor]
    # SHA-256 of the constants; None: they are those that the config draws
    constants_digest: str | None


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of a skeleton with an adapter is the adapter's."""
    return f".{ADAPTER_NAME}." in f"{name}."


def _added(skeleton: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapter's parameters in a skeleton."""
    return ((name, value) for name, value in skeleton.named_parameters() if is_of_adapter(name))


@contextmanager
def _insertion(expected: str, remedy: str) -> Iterator[None]:
    """A context in which peft puts its modules into a skeleton; it draws weights that are not
    used.
    """
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # it corrects this option for each layer
            warnings.filterwarnings("ignore", "fan_in_fan_out is set")
            # of a mixture: its own
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern .*gate_up_proj")
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # peft reads it
            # of a model, of which they are left out
            warnings.filterwarnings("ignore", "You have passed exclude_modules")
            yield
    except Exception as error:  # any: an invalid config leads to errors inside peft
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        where = (
            "adapter.target_modules"
            if "arget modules" in found or "arget_modules" in found
            else "adapter"
        )
        raise OptionError(where, found, expected, remedy) from error


def _wrap_layers(
    skeleton: PreTrainedModel,
    config: Any,
    layers: tuple[type[nn.Module], ...] = (nn.Linear,),
    seed: int | None = None,
    put: Callable[[Any, PreTrainedModel], object] | None = None,
) -> None:
    """Let peft wrap layers of a skeleton, of these types. With a seed it draws initial values.
    ``put`` has peft do it; None: its usual function.
    """
    import peft

    linears = [
        module
        for module in skeleton.modules()
        if seed is not None and isinstance(module, nn.Linear)
    ]
    weights = {linear: linear.weight for linear in linears}
    for linear, weight in weights.items():
        # peft keeps what it draws on the device of a layer's weights, in their dtype
        linear.weight = nn.Parameter(torch.empty(1).expand(weight.shape), requires_grad=False)
    expected = "a config that peft can put into this model, with names of its linear layers"
    with _insertion(expected, "name layers that the model has, such as q_proj, or all-linear"):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # without seeding devices
        if put is None:
            peft.inject_adapter_in_model(config, skeleton, ADAPTER_NAME)
        else:
            put(config, skeleton)
    for linear, weight in weights.items():
        linear.weight = weight
    for path, module in _wrapped_layers(skeleton):
        wrapped = module.base_layer
        if not (wraps_parameter(module) or _is_linear(wrapped, layers)):
            kinds = " and embeddings" if nn.Embedding in layers else ""
            raise OptionError(
                "adapter.target_modules",
                f"{path}, {type(wrapped).__name__}",
                f"linear layers{kinds}",
                f"name such layers, as q_proj, or {AUTO} for all linear ones outside experts, "
                "routers and the head",
            )
    _require_copies(skeleton, config)
    skeleton.train(mode=False)


def _wrapped_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the path of each wrapped layer, and peft's module around it; without those of trained
    tokens.
    """
    for path, module in model.named_modules():
        if getattr(module, "base_layer", None) is not None and not is_token_layer(module):
            yield path, module


def wraps_parameter(module: nn.Module) -> bool:
    """Whether a module of peft adapts a parameter of the module that it wraps, such as a stack of
    experts.
    """
    return hasattr(module, "parameter_name")


def _in_drawing_order(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the wrapped layers of a model in the order in which peft wraps them and draws values.

    Modules come first, then parameters; several parameters of one module are wrapped around each
    other from the inside out.
    """
    of_parameters: dict[str, list[tuple[str, Any]]] = {}
    for path, layer in _wrapped_layers(model):
        if wraps_parameter(layer):
            of_parameters.setdefault(base_form(f"{path}."), []).insert(0, (path, layer))
        else:
            yield path, layer
    for wrapped in of_parameters.values():
        yield from wrapped


def _require_copies(skeleton: PreTrainedModel, config: Any) -> None:
    """Refuse ``modules_to_save`` that match no module, or modules whose copies cannot be
    trained.
    """
    paths = dict.fromkeys(
        name[: name.index(SAVED)] for name, _ in skeleton.named_parameters() if SAVED in name
    )
    unmatched = [
        name for name in _saved_modules(config) if not any(path.endswith(name) for path in paths)
    ]
    of_task = _OF_TASK.get(config.task_type, ())
    if of_task and {*of_task} <= {*unmatched}:
        raise OptionError(
            _TASK_TYPE,
            f"{config.task_type}, whose {' or '.join(of_task)} this model does not have",
            "the task of the model's head",
            "open the base with the head of this task (--head, or head=...)",
        )
    wrong = [name for name in unmatched if name not in of_task]
    wrong += [path for path in paths if not _is_trainable_copy(skeleton, path)]
    if wrong:
        expected = "modules with parameters of their own, such as norms or lm_head"
        raise OptionError(
            "adapter.modules_to_save", wrong[0], expected, "name such modules, or leave it out"
        )


def _saved_modules(config: Any) -> Sequence[str]:
    """The modules of which an adapter has a copy; some kinds have none."""
    return getattr(config, "modules_to_save", None) or ()


def _is_trainable_copy(skeleton: PreTrainedModel, path: str) -> bool:
    """Whether a module's copy can be trained: only if it has no modules in it."""
    copies = skeleton.get_submodule(path + SAVED.rstrip("."))
    return not any(True for _ in copies.children())


def _is_linear(module: nn.Module, layers: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is a linear layer, and no router that only inherits from one."""
    if type(module) in layers or not isinstance(module, nn.Linear):
        return type(module) in layers
    values = module.weight.new_empty(1, module.in_features)
    try:
        with torch.no_grad():
            output = module(values)
    except Exception:  # any: a class of transformers that takes more than one tensor
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, module.out_features)


class LoRAKind(AdapterKind):
    """LoRA and DoRA."""

    def unused_options(self, config: Any) -> list[str]:
        """See the base class."""
        require_whole("adapter.r", config.r, 1, _LARGEST_RANK)
        by_layer = config.alpha_pattern if isinstance(config.alpha_pattern, dict) else {}
        for alpha in (config.lora_alpha, *by_layer.values()):
            require_number("adapter.lora_alpha", alpha, least=-_FLOAT32_MAX, most=_FLOAT32_MAX)
        return (
            [] if config.init_lora_weights in (True, False, "gaussian") else ["init_lora_weights"]
        )

    def not_stacked(self, config: Any) -> str | None:
        """DoRA and LoRA of experts are refused, in mixed precision, too.

        DoRA's forward divides by norms of the perturbed matrix, which differ for each direction. It
        takes norms of matrices, and experts' matrices are added to the base's, before autocast
        casts them.
        """
        if config.use_dora:
            return "DoRA"
        return "LoRA of experts" if config.target_parameters else None

    def insert(
        self, skeleton: PreTrainedModel, config: Any, seed: int, idle: Collection[str]
    ) -> None:
        """See the base class."""
        layers: tuple[type[nn.Module], ...] = (
            (nn.Linear,) if config.use_dora else (nn.Linear, Conv1D)
        )
        _name_targets(skeleton, config, layers, idle)
        _wrap_layers(skeleton, config, layers if config.use_dora else (*layers, nn.Embedding))
        if any(type(layer.base_layer) is Conv1D for _, layer in _wrapped_layers(skeleton)):
            # as peft sets it for each such layer, with a warning if the config says otherwise
            config.fan_in_fan_out = True

    def forward_bytes(self, skeleton: PreTrainedModel, config: Any) -> int:
        """DoRA's matrices, or adapted stacks, which exist beside the base's while their module
        runs.
        """
        sums = Counter[nn.Module]()
        for _, layer in _wrapped_layers(skeleton):
            if wraps_parameter(layer):
                sums[layer.get_base_layer()] += layer.get_param().nbytes
        of_dora = super().forward_bytes(skeleton, config) if config.use_dora else 0
        return max([of_dora, copied_bytes(skeleton), *sums.values()])

    def first_values(
        self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase
    ) -> FirstValues:
        """Matrices from peft's initialisation; DoRA's magnitudes from peft's too, which reads each
        layer's weights.
        """
        wrapped = dict(_in_drawing_order(skeleton))
        values: dict[str, torch.Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # without seeding devices
            for path, layer in wrapped.items():
                if isinstance(layer.base_layer, nn.Embedding):
                    values |= _embedding_matrices(path, layer)
                    layer.reset_lora_parameters(ADAPTER_NAME, config.init_lora_weights)
                    continue
                for name in _matrices(path):
                    module: Any = skeleton.get_submodule(name.removesuffix(".weight"))
                    linear = module.float().to_empty(device="cpu")
                    linear.reset_parameters()  # as when the layer is built
                    values[name] = linear.weight.detach()
                layer.reset_lora_parameters(ADAPTER_NAME, config.init_lora_weights)
        if not config.use_dora:
            return lambda: values
        named = {parameter: base_form(name) for name, parameter in skeleton.named_parameters()}
        weights = [named[layer.base_layer.weight] for layer in wrapped.values()]
        return lambda: {**values, **_magnitudes(wrapped, values, base(), weights)}


def _name_targets(
    skeleton: PreTrainedModel,
    config: Any,
    layers: tuple[type[nn.Module], ...],
    idle: Collection[str],
) -> None:
    """Replace ``auto`` and ``experts`` among a config's targets by names of this model."""
    targets = (
        {config.target_modules}
        if isinstance(config.target_modules, str)
        else {*(config.target_modules or ())}
    )
    if EXPERTS in targets:
        stacks = {  # the ends of names of parameters that are one matrix for each expert
            f"{EXPERTS}.{name}"
            for path, module in skeleton.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if path.endswith(f".{EXPERTS}") and parameter.ndim == _STACK_AXES
        }
        if not stacks:
            found = f"{EXPERTS}, which {skeleton.config.model_type} does not have as stacks"
            raise without_effect("adapter.target_modules", found, "layers of this model")
        config.target_parameters = sorted({*(config.target_parameters or ()), *stacks})
        config.target_modules = targets = targets - {EXPERTS}
    if AUTO in targets:
        config.target_modules = targets - {AUTO} | _linear_layers(skeleton, layers, idle)


def _linear_layers(
    skeleton: PreTrainedModel, layers: tuple[type[nn.Module], ...], idle: Collection[str]
) -> set[str]:
    """The paths of linear layers before the head that are called: of a mixture, those outside its
    experts and routers.

    Dense layers stay out whose names peft takes for those of experts, as ``gate_proj`` in
    DeepSeek's first layers, and layers that peft refuses, as ``out_proj`` of Mamba.
    """
    whole: Any = skeleton
    head = whole.get_output_embeddings()
    paths = [
        path
        for path, module in skeleton.named_modules()
        if module is not head and path not in idle and _is_linear(module, layers)
        if not _is_router(skeleton, path)
    ]
    named = {path.rpartition(".")[2]: skeleton.get_submodule(path) for path in paths}
    left_out = {
        leaf
        for leaf, module in named.items()
        if _names_experts(skeleton, leaf) or not is_taken_by_peft(skeleton.config, leaf, module)
    }
    return {path for path in paths if path.rpartition(".")[2] not in left_out}


def _is_router(skeleton: PreTrainedModel, path: str) -> bool:
    """Whether a linear layer has an output for each expert of the mixture that its module is a part
    of, whose stacks are beside this module.
    """
    mixture = skeleton.get_submodule(path.rpartition(".")[0].rpartition(".")[0])
    outputs = getattr(skeleton.get_submodule(path), "out_features", None)
    return any(
        parameter.ndim == _STACK_AXES and len(parameter) == outputs
        for module in mixture.children()
        if not isinstance(module, nn.Conv1d)
        for parameter in module.parameters(recurse=False)
    )


def is_taken_by_peft(config: PretrainedConfig, leaf: str, module: nn.Module) -> bool:
    """Whether peft puts LoRA on a layer of this name in a model of this config, tried on a model
    that has only this layer.
    """
    import peft

    model = nn.Module()
    model.config = config  # type: ignore[assignment]
    model.add_module(leaf, module)
    try:
        with _insertion("", ""):
            peft.inject_adapter_in_model(peft.LoraConfig(r=1, target_modules=[leaf]), model)
    except OptionError:
        return False
    return True


def _require_called(skeleton: PreTrainedModel, idle: Collection[str]) -> None:
    """Refuse an adapter of a layer that the model's forward never calls."""
    for path, _ in _wrapped_layers(skeleton):
        name = base_form(f"{path}.").rstrip(".")
        if name in idle:
            raise OptionError(
                "adapter.target_modules",
                f"{name}, which {skeleton.config.model_type}'s forward never calls: it takes the "
                "layer's weight by itself, or does not use it",
                "layers that are called, since an adapter has no effect in others",
                f"leave it out, or name {AUTO}, which leaves such layers out",
            )


def _names_experts(skeleton: PreTrainedModel, leaf: str) -> bool:
    """Whether peft takes a layer's name for a projection of this model's experts, which are one
    stacked parameter.
    """
    from peft import LoraConfig

    with names_of("peft"):
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[leaf])
    try:
        convert_peft_config_for_transformers(config, skeleton, None)
    except ValueError:  # a projection is stacked with another one
        return True
    return bool(config.target_parameters)


def _matrices(path: str) -> tuple[str, str]:
    """The names of a layer's two matrices, in the order in which they are drawn."""
    return f"{path}.lora_A.{ADAPTER_NAME}.weight", f"{path}.lora_B.{ADAPTER_NAME}.weight"


def _embedding_matrices(path: str, layer: Any) -> dict[str, torch.Tensor]:
    """The two matrices of an embedding's adapter, drawn as peft draws them before it resets
    them.
    """
    matrices: dict[str, torch.Tensor] = {}
    for name in ("lora_embedding_A", "lora_embedding_B"):
        of_adapters = getattr(layer, name)
        drawn = nn.Parameter(torch.randn(of_adapters[ADAPTER_NAME].shape))
        of_adapters[ADAPTER_NAME] = drawn
        matrices[f"{path}.{name}.{ADAPTER_NAME}"] = drawn.detach()
    return matrices


@torch.no_grad()
def _magnitudes(
    wrapped: Mapping[str, Any],
    values: Mapping[str, torch.Tensor],
    base: HFBlockModel,
    weights: Iterable[str],
) -> dict[str, torch.Tensor]:
    """DoRA's initial magnitudes, computed by peft with one matrix of the base in memory at a
    time.
    """
    norms: dict[str, torch.Tensor] = {}
    for (path, layer), (spec, weight) in zip(
        wrapped.items(), _base_values(base, weights), strict=True
    ):
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        magnitude = type(layer.lora_magnitude_vector[ADAPTER_NAME])(fan_in_fan_out=False)
        # In the weights' dtype, as in peft, which converts its matrices to float32 only after
        # computing the norms.
        a, b = (values[name].to(spec.dtype) for name in _matrices(path))
        magnitude.update_layer(
            base_layer=linear, lora_A=a, lora_B=b, scaling=layer.scaling[ADAPTER_NAME]
        )
        norms[f"{path}.lora_magnitude_vector.{ADAPTER_NAME}.weight"] = (
            magnitude.weight.detach().float()
        )
    return norms


def _base_values(
    base: HFBlockModel, names: Iterable[str]
) -> Iterator[tuple[ParameterSpec, torch.Tensor]]:
    """Read parameters of a base one after the other, decoded; a shared one by any of its names."""
    specs = {
        f"{path}.{leaf}": spec
        for layout in base.layouts
        for spec in layout.parameters
        for path, _, leaf in base.places_of(spec.name)
    }
    with closing(base.weights) as weights:
        for name in names:
            yield specs[name], read_weight(weights, specs[name])


class PrefixKind(AdapterKind):
    """``peft.PrefixTuningConfig``."""

    is_of_text_alone = True
    embedding = (_ENCODER,)

    def unused_options(self, config: Any) -> list[str]:
        """See the base class."""
        refused = [] if config.task_type in (None, _TASK) else ["task_type"]
        return refused if config.init_weights in (None, "zero") else [*refused, "init_weights"]

    def file_name(self, name: str) -> str:
        """See the base class."""
        return "prompt_embeddings"

    def mapped(
        self, skeleton: PreTrainedModel, state: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See the base class."""
        return {_TABLE if key == self.file_name(key) else key: state[key] for key in state}

    def insert(
        self, skeleton: PreTrainedModel, config: Any, seed: int, idle: Collection[str]
    ) -> Any:
        """See the base class. Sizes that the config does not set are filled in, as in peft."""
        # so that rows fit in the model's positions
        most = (longest_row(skeleton) or LARGEST_WHOLE) - _SHORTEST_ROW
        require_whole("adapter.num_virtual_tokens", config.num_virtual_tokens, 1, most)
        wrapper, sized = _wrapped(skeleton, config)
        for option in _BASE_SIZES:
            size = getattr(config, option)
            expected = getattr(sized, option)
            if size not in (None, expected):
                remedy = "leave it out, or use the base that the adapter was made for"
                raise OptionError(
                    f"adapter.{option}", repr(size)[:80], f"{expected}, as in the base", remedy
                )
            setattr(config, option, expected)
        config.task_type, config.encoder_hidden_size = sized.task_type, sized.encoder_hidden_size
        skeleton.add_module(_ENCODER, wrapper.get_submodule(_ENCODER))
        return wrapper

    def forward_bytes(self, skeleton: PreTrainedModel, config: Any) -> int:
        """None: see ``PrefixBlockModel`` for its cache."""
        return 0

    def first_values(
        self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase
    ) -> FirstValues:
        """Keys and values of random tokens; zeros with ``init_weights="zero"``."""
        shape = skeleton.get_parameter(_TABLE).shape
        if config.init_weights == "zero":
            return lambda: {_TABLE: torch.zeros(shape)}
        return lambda: {_TABLE: _real_keys_and_values(base(), config, shape, seed)}


def _wrapped(skeleton: PreTrainedModel, config: Any) -> tuple[Any, Any]:
    """Peft's model around a skeleton, and a config with the base's sizes."""
    import peft

    without_sizes = deepcopy(config)
    without_sizes.task_type = _TASK
    for option in (*_BASE_SIZES, "encoder_hidden_size"):
        setattr(without_sizes, option, None)
    with _insertion("a config of a prefix for this model", "pass num_virtual_tokens alone"):
        wrapper = peft.PeftModelForCausalLM(skeleton, without_sizes, ADAPTER_NAME)
    return wrapper.eval(), without_sizes


def _real_keys_and_values(
    base: HFBlockModel, config: Any, shape: torch.Size, seed: int
) -> torch.Tensor:
    """Keys and values that the base computes for one row of random tokens, with one block in memory
    at a time.
    """
    tokens, heads = config.num_virtual_tokens, config.num_attention_heads
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache()
    ids = torch.randint(base.config.get_text_config().vocab_size, (1, tokens), generator=generator)
    # the base's up to the last layer, which writes all keys and values to the cache
    forward: Any = SimpleNamespace(
        prepared=lambda batch: batch,
        embed=lambda batch: base.prologue(batch, cache),
        block=base.block,
        head=lambda batch, activations: activations.hidden.new_zeros(()),
        forward_bytes=base.forward_bytes,
        held_bytes=base.held_bytes,
    )
    streamed = MemoryPolicy(host=HostPlan((), _NO_LIMIT, buckets=1, keep_noise=False))
    with Engine(base, memory=streamed) as replayer:
        list(replayer.forwards([{"input_ids": ids}], forward))
    layers: list[Any] = cache.layers  # those that share the keys of another layer have none
    states = [
        states for layer in layers for states in (layer.keys, layer.values) if states is not None
    ]
    shapes = {
        (1, heads, tokens, config.token_dim // heads),
        *(tuple(state.shape) for state in states),
    }
    if len(shapes) > 1 or len(states) * config.token_dim != shape[1]:
        raise UnsupportedModelError(
            f"model type {base.config.model_type}",
            f"{len(states)} keys and values of {len(layers)} layers, or not of the same shape: "
            f"{sorted(shapes)}",
            f"those of every layer, {shape[1]} numbers a token, as in peft's table",
            'write "init_weights": "zero" in its config, or train LoRA',
        )
    return torch.cat(
        [state[0].transpose(0, 1).reshape(tokens, -1).float() for state in states], dim=1
    )


class TokensKind(AdapterKind):
    """``peft.TrainableTokensConfig``: rows of the embedding alone."""

    def unused_options(self, config: Any) -> list[str]:
        """See the base class."""
        return [] if config.init_weights else ["init_weights"]

    def insert(
        self, skeleton: PreTrainedModel, config: Any, seed: int, idle: Collection[str]
    ) -> None:
        """See the base class; nothing is drawn."""
        _wrap_layers(skeleton, config)

    def first_values(
        self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase
    ) -> FirstValues:
        """None are drawn: they are the base's."""
        return dict

    def forward_bytes(self, skeleton: PreTrainedModel, config: Any) -> int:
        """A copy of the embedding."""
        return copied_bytes(skeleton)


class VeRAKind(AdapterKind):
    """``peft.VeraConfig`` (P-RGE, arXiv 2409.15520, appendix A.2)."""

    def unused_options(self, config: Any) -> list[str]:
        """See the base class."""
        require_whole("adapter.r", config.r, 1, _LARGEST_RANK)
        require_number("adapter.d_initial", config.d_initial, most=_FLOAT32_MAX)
        require_key(config)
        return []

    def insert(
        self, skeleton: PreTrainedModel, config: Any, seed: int, idle: Collection[str]
    ) -> None:
        """See the base class."""
        _wrap_layers(skeleton, config, seed=seed, put=put_vera)

    def mapped(
        self, skeleton: PreTrainedModel, state: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See the base class. A file's projections replace those that were drawn."""
        config: Any = skeleton.peft_config[ADAPTER_NAME]
        left = take_projections(skeleton, config, state)
        saves = config.save_projection
        config.save_projection = False  # else peft looks for them among the layers' tensors
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Specified to not load vera_A")
                return super().mapped(skeleton, left)
        finally:
            config.save_projection = saves

    def forward_bytes(self, skeleton: PreTrainedModel, config: Any) -> int:
        """The projections, which all layers share."""
        return sum(value.nbytes for value in projections(skeleton).values())


_FACTORS = _LAYERS | {"r", "alpha", "rank_pattern", "alpha_pattern"}
_INIT = {"init_weights"}
_KINDS = (
    LoRAKind(
        *("LORA", "LoRA"),
        _FACTORS - {"alpha"}
        | {"lora_alpha", "use_rslora", "fan_in_fan_out", "target_parameters"}
        | {"trainable_token_indices"},
        {"init_lora_weights", "use_dora"},
        "lora_A",
        "linear layers, GPT-2's Conv1D and stacked experts, or DoRA of linear layers, without "
        "dropout, whose initial values "
        "do not depend on the base's weights",
        is_mixed=False,
    ),
    PrefixKind(
        *("PREFIX_TUNING", "a prefix"),
        {"num_virtual_tokens", *_BASE_SIZES},
        {"init_weights", "encoder_hidden_size"},  # the latter has no effect without a projection
        _ENCODER,
        "a causal language model, without prefix_projection",
        is_mixed=False,
    ),
    TokensKind(
        *("TRAINABLE_TOKENS", "trained tokens"),
        {"target_modules", "token_indices"},
        _INIT,
        "trainable_tokens_delta",
        "rows of the embedding, which start with the base's values",
    ),
    AdapterKind(
        "IA3",
        "IA3",
        _LAYERS | {"feedforward_modules", "fan_in_fan_out"},
        {"init_ia3_weights"},
        "ia3_l",
    ),
    AdapterKind("LOHA", "LoHa", _FACTORS, _INIT, "hada_w1_a", is_mixed=False),
    AdapterKind(
        "LOKR",
        "LoKr",
        _FACTORS | {"decompose_both", "decompose_factor", "use_effective_conv2d"},
        _INIT,
        "lokr_w1",
    ),
    AdapterKind("HRA", "HRA", _LAYERS | {"r", "apply_GS"}, _INIT, "hra_u"),
    VeRAKind(
        *("VERA", "VeRA"),
        _LAYERS | {"r", "projection_prng_key", "fan_in_fan_out"},
        {*_INIT, "d_initial", "save_projection"},
        "vera_lambda_d",
    ),
    AdapterKind("MISS", "Miss", _LAYERS | {"r", "mini_r"}, _INIT, "miss_block"),
)
KINDS: Mapping[str, AdapterKind] = {kind.peft_type: kind for kind in _KINDS}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter to train.

    Args:
        config: A config of peft, of a kind in ``KINDS``; a JSON file of one; or a directory with an
            adapter saved by peft, whose values the run starts from.
        frozen: Parameters whose names contain one of these texts are not trained, such as
            ``("lora_A",)`` for LoRA-FA (arXiv 2308.03303).
        seed: Seed of a new adapter's initial values.
        base: Path or hub id of the base, which an exported config names if ``config`` names none.
        is_trained: Whether it will be trained. An adapter that is only read may have been trained
            with dropout.
        trains_base: Whether the base's weights are trained, too, with ``AdapterAndBase``. Otherwise
            they do not change.
    """

    config: Any
    frozen: Sequence[str] = ()
    seed: int = 0
    base: str | None = None
    is_trained: bool = True
    trains_base: bool = False

    def __post_init__(self) -> None:
        require_whole("adapter.seed", self.seed, 0)


class ChosenConfig(NamedTuple):
    """An adapter's config, its kind, and the file of its values."""

    adapter: Adapter
    kind: AdapterKind
    config: Any  # peft's config
    weights: Path | None  # file of its values; None: it is new


def peft_config(adapter: Adapter) -> ChosenConfig:
    """Read and check an adapter's config."""
    peft = optional_package("peft", install="zo2core[peft]")
    config = deepcopy(adapter.config)  # peft writes into it
    weights: Path | None = None
    if isinstance(config, (str, Path)):
        path = Path(config)
        if path.is_dir():
            weights = weights_of(path)
            path = path / CONFIG_FILE
            for file in (weights, path):
                require_own_file(file, path.parent)
        config = _read_config(peft, path)
    name = str(getattr(config, "peft_type", type(config).__name__)).removeprefix("PeftType.")
    kind = KINDS.get(name)
    config_classes = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    if kind is None or not isinstance(config, config_classes[name]):
        remedy = f"use one of {', '.join(config_classes[known].__name__ for known in KINDS)}"
        raise OptionError("adapter", name, f"one of {', '.join(KINDS)} as peft_type", remedy)
    plain = config.to_dict()
    defaults = type(config)().to_dict()
    known = kind.decisive | kind.supported | _NEUTRAL | (set() if adapter.is_trained else _DROPOUT)
    unused_options = [
        key for key, value in plain.items() if key not in known and value != defaults.get(key)
    ]
    unused_options += kind.unused_options(config)
    if unused_options:
        option = unused_options[0]
        raise without_effect(f"adapter.{option}", plain[option], f"{kind.title} of {kind.accepted}")
    of_task = _OF_TASK.get(config.task_type, ())
    if of_task:
        config.modules_to_save = [*dict.fromkeys([*(config.modules_to_save or ()), *of_task])]
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = adapter.base
    return ChosenConfig(adapter, kind, config, weights)


def inject(
    skeleton: PreTrainedModel,
    chosen: ChosenConfig,
    base: OpenBase,
    *,
    is_mixed: bool,
    encoded: Collection[str],
    idle: Collection[str],
    left_out: Collection[str],
) -> OpenedAdapter:
    """Insert peft's modules into a skeleton, in mixed or exact precision, given the names of the
    encoded parameters, the paths of the modules that are never called, and the names of tensors
    that are not part of the skeleton.

    Their parameters are on the meta device.
    """
    adapter, kind, config, weights = chosen
    of_base = skeleton.named_parameters(remove_duplicate=False)
    dtypes = {name: parameter.dtype for name, parameter in of_base}
    wrapper = _insert(skeleton, chosen, idle)
    round_projections(skeleton, {*_dtypes_beside(skeleton, encoded).values()})
    drawn_digest = projections_digest(skeleton)
    if adapter.is_trained:
        _require_called(skeleton, idle)
    _name_what_is_adapted(skeleton, config, left_out)
    tensors = dict[str, torch.Tensor]()
    for name, value in _added(skeleton):  # a module's copy has the dtype of the module, as in peft
        dtype = dtypes[base_form(name)] if SAVED in name else torch.float32
        tensors[name] = torch.empty(value.shape, dtype=dtype, device="meta")
    require_known_tokens(skeleton)
    names = {name: kind.file_name(name) for name in tensors}
    trained = _trained_names(tensors, adapter, kind)
    if is_mixed:
        _require_mixable(kind, config)
    beside = dict[str, TensorEntry]()
    if weights is None:
        drawn = kind.first_values(skeleton, config, adapter.seed, base)
        rounded = partial(_rounded, drawn, _dtypes_beside(skeleton, encoded))
        values = partial(_with_copies, rounded, _copies(skeleton, tensors), base)
    else:
        mapped = partial(kind.mapped, skeleton)
        modules = {name.rpartition(".")[0] for name in left_out}
        saved, beside = read_adapter(weights, skeleton, tensors, names, mapped, modules)
        values = partial(dict, saved)
    for name, tensor in tensors.items():
        put_value(skeleton, name, tensor)
    own_parameters(skeleton)
    digest = projections_digest(skeleton)
    return OpenedAdapter(
        kind=kind,
        config=config,
        parameters=names,
        tensors=tensors,
        trained=trained,
        values=values,
        beside=beside,
        where=str(weights or "the new adapter"),
        forward_bytes=kind.forward_bytes(skeleton, config),
        wrapper=wrapper,
        trains_base=adapter.trains_base,
        constants=projections(skeleton),
        constants_digest=digest if digest != drawn_digest else None,
    )


def _name_what_is_adapted(
    skeleton: PreTrainedModel, config: Any, left_out: Collection[str]
) -> None:
    """Change a config such that peft adapts no module that was left out of a skeleton, when it puts
    the adapter into the whole model.
    """
    with names_of("peft"):
        from peft.tuners.tuners_utils import check_target_module_exists

    if not left_out:
        return
    modules = sorted({name.rpartition(".")[0] for name in left_out})
    matched = [path for path in modules if check_target_module_exists(config, path)]
    excluded = getattr(config, "exclude_modules", None)
    if matched and isinstance(excluded, str):
        config.exclude_modules = "|".join([excluded, *map(re.escape, matched)])
    elif matched:
        config.exclude_modules = sorted({*(excluded or ()), *matched})
    saved = _saved_modules(config)
    if any(path.endswith(name) for path in modules for name in saved):
        copies = (name.partition(SAVED)[0] for name, _ in _added(skeleton) if SAVED in name)
        config.modules_to_save = [*dict.fromkeys(copies)]


def _insert(skeleton: PreTrainedModel, chosen: ChosenConfig, idle: Collection[str]) -> Any:
    """Insert peft's modules. If they do not fit, a saved adapter was made for another base."""
    try:
        return chosen.kind.insert(skeleton, chosen.config, chosen.adapter.seed, idle)
    except OptionError as error:
        if chosen.weights is None:
            raise
        remedy = (
            "use the base that the adapter was made for; if this is it, merge the adapter with "
            "peft's merge_and_unload, and use the merged model"
        )
        if error.where == _TASK_TYPE:
            remedy = error.remedy
        found = f"{error.where}: {error.found}"
        raise CheckpointError(
            chosen.weights.with_name(CONFIG_FILE), found, error.expected, remedy
        ) from error


def _trained_names(
    tensors: Mapping[str, torch.Tensor], adapter: Adapter, kind: AdapterKind
) -> frozenset[str]:
    """The parameters that are trained. Parts of names that freeze none or all are refused."""
    trained = frozenset(
        name for name in tensors if not any(part in name for part in adapter.frozen)
    )
    unmatched = [part for part in adapter.frozen if not any(part in name for name in tensors)]
    if not trained or unmatched:
        raise OptionError(
            "adapter.frozen",
            f"{unmatched or list(adapter.frozen)}, which {'no' if trained else 'every'} "
            "parameter's name contains",
            f"parts of the names of some of them, such as {kind.part_of_names}",
            "leave it out to train all",
        )
    return trained


def _require_mixable(kind: AdapterKind, config: Any) -> None:
    """Refuse an adapter that cannot be computed with in mixed precision."""
    not_mixed = None if kind.is_mixed else kind.not_stacked(config)
    if not_mixed is not None:
        remedy = "leave it out, or use LoRA of linear layers"
        raise OptionError("precision", f"mixed with {not_mixed}", "exact precision", remedy)


def _rounded(values: FirstValues, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Initial values of an adapter, rounded to these dtypes."""
    return {
        name: value.to(dtypes.get(name, value.dtype)).to(value.dtype)
        for name, value in values().items()
    }


def _dtypes_beside(skeleton: PreTrainedModel, encoded: Collection[str]) -> dict[str, torch.dtype]:
    """The dtype of the weights that each parameter of an adapter belongs to, to which peft rounds
    what it draws; of encoded weights, beside which it does not, none.
    """
    dtypes: dict[str, torch.dtype] = {}
    for path, layer in _wrapped_layers(skeleton):
        weight = "weight" if not wraps_parameter(layer) else layer.parameter_name
        adapted: nn.Parameter = getattr(layer.get_base_layer(), weight)
        if f"{base_form(path + '.')}{weight}" not in encoded:
            dtypes |= {f"{path}.{name}": adapted.dtype for name, _ in layer.named_parameters()}
    return dtypes


class _Copy(NamedTuple):
    """Which values of the base a parameter starts with."""

    weight: str  # a parameter of the base
    dtype: torch.dtype
    rows: list[int] | None = None  # None: all


def _copies(skeleton: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, _Copy]:
    """The parameters of an adapter that start as copies: whole modules, and rows of the
    embedding.
    """
    copies = {
        name: _Copy(base_form(name), tensor.dtype)
        for name, tensor in tensors.items()
        if SAVED in name
    }
    for rows in token_rows(skeleton):
        copies[rows.parameter] = _Copy(rows.weight, tensors[rows.parameter].dtype, rows.tokens)
    return copies


def _with_copies(
    values: FirstValues, copies: Mapping[str, _Copy], base: OpenBase
) -> Mapping[str, torch.Tensor]:
    """Initial values of an adapter, some of whose parameters start as copies of the base's."""
    if not copies:
        return values()
    read = _base_values(base(), [copy.weight for copy in copies.values()])
    started = {
        name: (value if copy.rows is None else value[copy.rows]).to(copy.dtype)
        for (name, copy), (_, value) in zip(copies.items(), read, strict=True)
    }
    return {**values(), **started}


def by_wrapped_names(model: nn.Module, values: Mapping[str, T]) -> dict[str, T]:
    """A mapping by the base's names, with the names that peft's wrapping gives these parameters as
    keys.
    """
    names = (name for name, _ in model.named_parameters())
    return {
        name: values[plain]
        for name in names
        if SAVED not in name and (plain := base_form(name)) in values
    }


def _read_config(peft: Any, path: Path) -> Any:
    try:
        with open_regular(path) as file:
            values = json.loads(file.read(_LARGEST_CONFIG))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # those for the author of the config are dropped below
            config = peft.PeftConfig.from_peft_type(**values)
    except Exception as error:  # any: an invalid config leads to errors inside peft
        found = (
            reason(error)
            if isinstance(error, OSError)
            else f"a config that peft does not read ({str(error)[:200]})"
        )
        remedy = system_remedy(error, "save the adapter again with peft")
        raise CheckpointError(path, found, f"{CONFIG_FILE} as peft writes it", remedy) from error
    for warning in caught:
        if (text := str(warning.message)).startswith("Unexpected keyword arguments"):
            # of a newer peft, which it ignores
            warnings.warn(f"{path}: {text}", ZO2Warning, stacklevel=2)
    return config
