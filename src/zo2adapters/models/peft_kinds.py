"""Kinds of peft's adapters, and Hugging Face models with one. Exports are the adapter, in peft's files.

Names, forwards and initial values are peft's. Most kinds wrap linear layers, and their initial values depend only on the
seed and the layers' shapes: peft draws them for one layer at a time, in the order in which it draws them for a whole model.
LoRA and DoRA have two thin matrices in addition to a linear layer's matrix, DoRA also a vector of magnitudes; a stack of
experts gets a pair of matrices for each expert (``target_parameters``).
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from zo2adapters.models.hf import HFBlockModel, HFHeadModel
from zo2core import Batch, ParameterSpec
from zo2core.checkpoint.shards import new_directory, write_companions
from zo2core.errors import OptionError, UnsupportedModelError
from zo2core.kernels.encoding import decoded
from zo2core.protocols import TensorReader

ADAPTER_NAME = "default"  # the adapter's name in the model, peft's default
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."  # prefix of the names of layers' parameters
AUTO, EXPERTS = "auto", "experts"  # among ``target_modules``: linear layers outside experts, and stacks of experts
_WRAPPED = re.compile(r"(\.(base_layer|original_module))+\.")  # part of the names of a wrapped module's parameters
SAVED = f".modules_to_save.{ADAPTER_NAME}."  # part of the names of parameters in a module's trained copy
_WHICH_LAYERS = {"modules_to_save", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
_MATRICES = 4  # float32 matrices of a layer's shape that exist at a time in a forward: products, their sum, the weights
_LARGEST_RANK = 1 << 16

OpenBase = Callable[[], HFBlockModel]  # opens the base without the adapter
FirstValues = Callable[[], Mapping[str, torch.Tensor]]  # returns initial values by parameter, in its dtype


def wrap_layers(skeleton: PreTrainedModel, config: Any, layers: tuple[type[nn.Module], ...] = (nn.Linear,)) -> list[str]:
    """Let peft wrap layers of a skeleton."""
    import peft

    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # peft draws weights that are not used
            warnings.filterwarnings("ignore", "fan_in_fan_out is set")  # it corrects this option for each layer
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern .*gate_up_proj")  # of a mixture: its own
            peft.inject_adapter_in_model(config, skeleton, adapter_name=ADAPTER_NAME)
    except Exception as error:  # any: an invalid config leads to errors inside peft
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise OptionError(
            "adapter.target_modules" if "arget modules" in found or "arget_modules" in found else "adapter",
            found=found,
            expected="a config that peft can put into this model, with names of its linear layers",
            remedy="name layers that the model has, such as q_proj, or all-linear",
        ) from error
    output: Any = skeleton.get_output_embeddings
    for path, module in wrapped_layers(skeleton):
        wrapped = module.base_layer
        if not (wraps_parameter(module) or _is_linear(wrapped, layers)) or module is output():
            raise OptionError(
                "adapter.target_modules",
                found=f"{path}, {'the head' if module is output() else type(wrapped).__name__}",
                expected="linear layers before the head",
                remedy=f"name such layers, as q_proj, or {AUTO} for all of them outside experts and routers",
            )
    _require_copies(skeleton, config)
    skeleton.train(mode=False)
    return [name for name, _ in skeleton.named_parameters() if f".{ADAPTER_NAME}." in f"{name}."]


def name_targets(skeleton: PreTrainedModel, config: Any, layers: tuple[type[nn.Module], ...]) -> None:
    """Replace ``auto`` and ``experts`` among a config's targets by names of this model."""
    targets = {config.target_modules} if isinstance(config.target_modules, str) else {*(config.target_modules or ())}
    if EXPERTS in targets:
        stacks = _stacked_experts(skeleton)
        if not stacks:
            found, remedy = f"{EXPERTS}, which {skeleton.config.model_type} does not have as stacks", "leave it out"
            raise OptionError("adapter.target_modules", found=found, expected="layers of this model", remedy=remedy)
        config.target_parameters = sorted({*(config.target_parameters or ()), *stacks})
        config.target_modules = targets = targets - {EXPERTS}
    if AUTO in targets:
        config.target_modules = targets - {AUTO} | _linear_layers(skeleton, layers)


def _stacked_experts(skeleton: nn.Module) -> set[str]:
    """The ends of names of parameters that are one matrix for each expert."""
    experts = (module for path, module in skeleton.named_modules() if path.endswith(f".{EXPERTS}"))
    parameters = (it for module in experts for it in module.named_parameters(recurse=False))
    return {f"{EXPERTS}.{name}" for name, parameter in parameters if parameter.ndim == 3}


def _linear_layers(skeleton: PreTrainedModel, layers: tuple[type[nn.Module], ...]) -> set[str]:
    """The paths of linear layers before the head: of a mixture, those outside its experts and routers.

    Dense layers stay out whose names peft takes for those of experts, as ``gate_proj`` in DeepSeek's first layers.
    """
    whole: Any = skeleton
    head = whole.get_output_embeddings()
    paths = [path for path, module in skeleton.named_modules() if module is not head and _is_linear(module, layers)]
    of_experts = {leaf for leaf in {path.rpartition(".")[2] for path in paths} if _names_experts(skeleton, leaf)}
    return {path for path in paths if path.rpartition(".")[2] not in of_experts}


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


def _names_experts(skeleton: PreTrainedModel, leaf: str) -> bool:
    """Whether peft takes a layer's name for a projection of this model's experts, which are one stacked parameter."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[leaf])
    try:
        convert_peft_config_for_transformers(config, skeleton, None)
    except ValueError:  # a projection is stacked with another one
        return True
    return bool(config.target_parameters)


def wraps_parameter(module: nn.Module) -> bool:
    """Whether a module of peft adapts a parameter of the module that it wraps, such as a stack of experts."""
    return hasattr(module, "parameter_name")


def _require_copies(skeleton: PreTrainedModel, config: Any) -> None:
    """Refuse ``modules_to_save`` that match no module, or modules whose copies cannot be trained."""
    wanted = list(config.modules_to_save or ())
    paths = [name[: name.index(SAVED)] for name, _ in skeleton.named_parameters() if SAVED in name]
    whole: Any = skeleton
    ends = (whole.get_input_embeddings(), whole.get_output_embeddings())
    wrong = [name for name in wanted if not any(path.endswith(name) for path in paths)]
    wrong += [path for path in dict.fromkeys(paths) if skeleton.get_submodule(path) in ends or _has_parts(skeleton, path)]
    if wrong:
        raise OptionError(
            "adapter.modules_to_save",
            found=wrong[0],
            expected="modules with parameters of their own, such as norms, other than the embedding and the output layer",
            remedy="name such modules, or leave it out",
        )


def _has_parts(skeleton: nn.Module, path: str) -> bool:
    return any(True for _ in skeleton.get_submodule(path + SAVED.rstrip(".")).children())


def wrapped_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the path of each wrapped layer, and peft's module around it."""
    for path, module in model.named_modules():
        if getattr(module, "base_layer", None) is not None:
            yield path, module


def base_form(name: str) -> str:
    """The name in the base of a parameter of the model with an adapter; a trained copy has the name of its original."""
    return _WRAPPED.sub(".", name).replace(SAVED, ".")


def file_name(name: str) -> str:
    """The name of an adapter's parameter in peft's files."""
    name = name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name  # saved without its module's name
    return FILE_PREFIX + re.sub(rf"\.{ADAPTER_NAME}(?=\.|$)", "", name.replace(SAVED, "."))


def read_weight(weights: TensorReader, spec: ParameterSpec) -> torch.Tensor:
    """Read a parameter of the base, decoded, in its shape."""
    stored = torch.empty(spec.stored_numel, dtype=spec.stored_dtype)
    weights.read_into(spec.name, stored)
    return (stored if spec.encoding is None else decoded(spec, stored)).view(spec.shape)


def base_values(base: HFBlockModel, names: Iterable[str]) -> Iterator[tuple[ParameterSpec, torch.Tensor]]:
    """Read parameters of a base one after the other, decoded."""
    specs = {spec.name: spec for layout in base.layouts for spec in layout.parameters}
    with closing(base.weights) as weights:
        for name in names:
            yield specs[name], read_weight(weights, specs[name])


def put_value(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Set the parameter of this name to a tensor."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = nn.Parameter(value)


def write_adapter(
    directory: Path,
    config: Mapping[str, Any],
    values: dict[str, torch.Tensor],
    files: Mapping[str, Path | bytes] = MappingProxyType({}),
) -> None:
    """Write an adapter."""
    with new_directory(directory) as partial:
        (partial / WEIGHTS_FILE).write_bytes(save(values, {"format": "pt"}))
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        write_companions(partial, files)


def plain_config(config: Any) -> dict[str, Any]:
    """Peft's config as JSON values, as peft saves it."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=_listed))
    return {**values, "inference_mode": True}


def _listed(value: object) -> object:
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


@dataclass(frozen=True)
class Inserted:
    """An adapter's modules in a skeleton. Its parameters are on the meta device."""

    parameters: Mapping[str, str]  # names in peft's files, by names in the skeleton
    embedding: tuple[str, ...] = ()  # modules that run before the layers
    forward_bytes: int = 0  # memory that a layer's forward needs in addition to the base's
    wrapper: Any = None  # peft's model around the skeleton, if the adapter only works through it; else None


class AdapterKind:
    """A kind of peft's adapters. To add one, add it to ``KINDS`` in ``peft_adapter``.

    Args:
        peft_type: The kind's name in peft's files.
        config_class: Name of peft's class of configs.
        decisive: Supported options that change the forward beside those that choose layers; part of a run's description.
        supported: Other supported options, which change only initial values, parameters or files.
        part_of_names: A part of the names of some parameters, as an example in messages.
        is_mixed: Whether it computes in mixed precision what it computes in the whole model.
    """

    model_class: type[PeftBlockModel] | None = None  # for causal language models of text alone; None: any model is taken

    def __init__(
        self,
        peft_type: str,
        config_class: str,
        decisive: set[str],
        supported: set[str],
        part_of_names: str,
        *,
        is_mixed: bool = True,
    ) -> None:
        self.peft_type, self.config_class, self.part_of_names = peft_type, config_class, part_of_names
        self.title = config_class.removesuffix("Config")  # name in messages
        self.decisive, self.supported = _WHICH_LAYERS | decisive, supported
        self.accepted = f"{self.title} of linear layers alone, without dropout"  # the supported configs, for messages
        self.is_mixed = is_mixed

    def unused_options(self, config: Any) -> list[str]:
        """Names of options whose value is not supported."""
        return []

    def why_not_stacked(self, config: Any) -> str | None:
        """Name of these adapters in the error that refuses low-rank perturbations; None: they are supported."""
        return self.title

    def why_not_mixed(self, config: Any) -> str | None:
        """Name of these adapters in the error that refuses mixed precision; None: it is supported."""
        return None if self.is_mixed else self.title

    def insert(self, skeleton: PreTrainedModel, config: Any) -> Inserted:
        """Put peft's modules into a skeleton."""
        names = wrap_layers(skeleton, config)
        return Inserted({name: file_name(name) for name in names}, forward_bytes=_forward_bytes(skeleton))

    def first_values(self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase) -> FirstValues:
        """Prepare the initial values of a new adapter."""
        shapes = {path: layer.base_layer.weight.shape for path, layer in wrapped_layers(skeleton)}

        def drawn() -> Mapping[str, torch.Tensor]:
            values: dict[str, torch.Tensor] = {}
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # without seeding devices
                for path, shape in shapes.items():
                    values |= _values_of_layer(path, shape, config)
            return values

        return drawn


def _forward_bytes(skeleton: nn.Module) -> int:
    """Bytes of the matrices that exist at a time in the forward of the largest wrapped layer."""
    largest = max(layer.base_layer.weight.numel() for _, layer in wrapped_layers(skeleton))
    return int(_MATRICES * torch.float32.itemsize * largest)


def _values_of_layer(path: str, shape: torch.Size, config: Any) -> dict[str, torch.Tensor]:
    """Initial values of one layer's adapter, by name in the whole model."""
    import peft

    config = deepcopy(config)
    config.modules_to_save = None
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.out_features, layer.in_features = shape
    layer.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
    holder = parent = nn.Module()
    *parents, leaf = path.split(".")
    for name in parents:
        parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(leaf, layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about options that match other layers only
        peft.inject_adapter_in_model(config, holder, adapter_name=ADAPTER_NAME)
    values = {name: parameter for name, parameter in holder.named_parameters() if parameter is not layer.weight}
    return {name: value.detach().contiguous() for name, value in values.items()}


class LoRAKind(AdapterKind):
    """LoRA and DoRA."""

    def __init__(self) -> None:
        decisive = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "target_parameters"}
        super().__init__("LORA", "LoraConfig", decisive, {"init_lora_weights", "use_dora"}, "lora_A")
        self.title = "LoRA"
        self.accepted = (
            "LoRA of linear layers, GPT-2's Conv1D and stacked experts, or DoRA of linear layers, without dropout, whose "
            "initial values do not depend on the base's weights"
        )

    def unused_options(self, config: Any) -> list[str]:
        """See the base class."""
        refused = [] if config.init_lora_weights in (True, False, "gaussian") else ["init_lora_weights"]
        return refused if type(config.r) is int and 1 <= config.r <= _LARGEST_RANK else [*refused, "r"]

    def why_not_stacked(self, config: Any) -> str | None:
        """DoRA is refused: its forward divides by norms of the perturbed matrix, which differ for each direction."""
        return "DoRA" if config.use_dora else "LoRA of experts" if config.target_parameters else None

    def why_not_mixed(self, config: Any) -> str | None:
        """DoRA takes norms of matrices, and experts' matrices are added to the base's, before autocast casts them."""
        return self.why_not_stacked(config)

    def insert(self, skeleton: PreTrainedModel, config: Any) -> Inserted:
        """See the base class."""
        layers: tuple[type[nn.Module], ...] = (nn.Linear,) if config.use_dora else (nn.Linear, Conv1D)
        name_targets(skeleton, config, layers)
        names = wrap_layers(skeleton, config, layers)
        wrapped = [layer for _, layer in wrapped_layers(skeleton)]
        if any(type(layer.base_layer) is Conv1D for layer in wrapped):
            config.fan_in_fan_out = True  # as peft sets it for each such layer, with a warning if the config says otherwise
        sums = Counter[nn.Module]()  # bytes of adapted stacks, which exist beside the base's while their module runs
        for layer in wrapped:
            if wraps_parameter(layer):
                sums[layer.get_base_layer()] += layer.get_param().nbytes
        return Inserted(
            {name: file_name(name) for name in names},
            forward_bytes=max([_forward_bytes(skeleton) if config.use_dora else 0, *sums.values()]),
        )

    def first_values(self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase) -> FirstValues:
        """Matrices from peft's initialisation; DoRA's magnitudes from peft's too, which reads each layer's weights."""
        wrapped = dict(wrapped_layers(skeleton))
        names = [name for path in wrapped for name in _matrices(path)]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # without seeding devices
            for name in names:
                put_value(skeleton, name, torch.zeros(skeleton.get_parameter(name).shape, dtype=torch.float32))
                linear = skeleton.get_submodule(name.rpartition(".")[0])
                assert isinstance(linear, nn.Linear), "other layers were refused"
                linear.reset_parameters()  # as when the layer is built
            for layer in wrapped.values():
                layer.reset_lora_parameters(ADAPTER_NAME, config.init_lora_weights)
        values = {name: skeleton.get_parameter(name).detach() for name in names}
        if not config.use_dora:
            return lambda: values
        named = {parameter: base_form(name) for name, parameter in skeleton.named_parameters()}
        weights = [named[layer.base_layer.weight] for layer in wrapped.values()]
        return lambda: {**values, **_magnitudes(wrapped, values, base(), weights)}


def _matrices(path: str) -> tuple[str, str]:
    """The names of a layer's two matrices, in the order in which they are drawn."""
    return f"{path}.lora_A.{ADAPTER_NAME}.weight", f"{path}.lora_B.{ADAPTER_NAME}.weight"


@torch.no_grad()
def _magnitudes(
    wrapped: Mapping[str, Any], values: Mapping[str, torch.Tensor], base: HFBlockModel, weights: Iterable[str]
) -> dict[str, torch.Tensor]:
    """DoRA's initial magnitudes, computed by peft with one matrix of the base in memory at a time."""
    norms: dict[str, torch.Tensor] = {}
    for (path, layer), (spec, weight) in zip(wrapped.items(), base_values(base, weights), strict=True):
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        magnitude = type(layer.lora_magnitude_vector[ADAPTER_NAME])(fan_in_fan_out=False)
        # In the weights' dtype, as in peft, which converts its matrices to float32 only after computing the norms.
        a, b = (values[name].to(spec.dtype) for name in _matrices(path))
        magnitude.update_layer(base_layer=linear, lora_A=a, lora_B=b, scaling=layer.scaling[ADAPTER_NAME])
        norms[f"{path}.lora_magnitude_vector.{ADAPTER_NAME}.weight"] = magnitude.weight.detach().float()
    return norms


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter in a skeleton, with its initial values."""

    kind: AdapterKind
    config: Any  # peft's config
    inserted: Inserted
    tensors: Mapping[str, torch.Tensor]  # its parameters by name, on the meta device
    trained: frozenset[str]  # names of the trained parameters
    values: FirstValues
    where: str  # name of the adapter in messages

    def require_mixed(self) -> None:
        """Refuse mixed precision where the adapter would not compute what it computes in the whole model."""
        why_not = self.kind.why_not_mixed(self.config)
        if why_not is not None:
            found, remedy = f"mixed with {why_not}", "leave it out, or use LoRA of linear layers"
            raise OptionError("precision", found=found, expected="exact precision", remedy=remedy)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of its parameters."""
        return {name: tensor.dtype for name, tensor in self.tensors.items()}


class PeftBlockModel(HFBlockModel):
    """A Hugging Face model with an adapter of peft."""

    def __init__(self, *arguments: Any, adapter: OpenedAdapter, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.adapter = adapter

    @property
    def description(self) -> Mapping[str, Any]:
        """The values that determine the forward, including the adapter's config."""
        plain = plain_config(self.adapter.config)
        decisive = {key: plain[key] for key in sorted(self.adapter.kind.decisive & plain.keys())}
        for key in ("modules_to_save", "target_parameters"):  # earlier runs have no entry
            if not decisive.get(key):
                decisive.pop(key, None)
        return {**super().description, "adapter": decisive}

    @property
    def exported_parameters(self) -> frozenset[str]:
        """The adapter's parameters."""
        return frozenset(self.adapter.inserted.parameters)

    def write(self, directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], files: Mapping[str, Path | bytes]) -> None:
        """Write the adapter's config and its tensors among these as peft does, the base's tokenizer, and further files."""
        names = self.adapter.inserted.parameters
        saved = {names[name]: tensor.clone() for name, tensor in tensors if name in names}
        write_adapter(directory, plain_config(self.adapter.config), saved, {**self.tokenizer_files, **files})

    def require_stackable(self) -> None:
        """Patch the modules for low-rank perturbations. See the contract."""
        title = self.adapter.kind.why_not_stacked(self.adapter.config)
        if title is None and self.adapter.config.modules_to_save:
            title = "modules_to_save"
        if title is not None:
            raise UnsupportedModelError(
                "adapter",
                found=f"{title} with low-rank perturbations",
                expected="LoRA, whose matrices are linear layers",
                remedy="leave --rank out, or use DensePerturbation()",
            )
        super().require_stackable()

    def adapter_bytes(self, rows: int, streams: int) -> int:
        """Expected bytes of memory that the adapter adds to a sweep of the base."""
        return self.adapter.inserted.forward_bytes

    def forward_bytes(self, batch: Batch) -> int:
        """Estimate the bytes by formula. See the contract."""
        return super().forward_bytes(batch) + self.adapter.inserted.forward_bytes


class PeftHeadModel(PeftBlockModel, HFHeadModel):
    """A Hugging Face model with another head than a causal language model's, and an adapter."""


WITH_ADAPTER: Mapping[type[HFBlockModel], type[PeftBlockModel]] = {HFBlockModel: PeftBlockModel, HFHeadModel: PeftHeadModel}
