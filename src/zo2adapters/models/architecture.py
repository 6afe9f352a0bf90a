"""The declaration of an architecture, and the segment that each parameter of a decoder belongs to.

Known architectures are declared here, by the config's model type; other models' parts are derived by a dry run, which a
declaration saves. Models that read images need one, since the dry run has no images. Their vision tower and its projector
run before the first layer, so they belong to the embedding.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from zo2adapters.models.precision import Precision, autocast_dtype
from zo2core import BlockLayout, ParameterSpec, SegmentKind
from zo2core.encodings import Encoding
from zo2core.errors import OptionError, UnsupportedModelError, reason
from zo2core.io.durable import open_regular


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The module paths of a decoder's parts.

    Paths are those of the ``AutoModelForCausalLM`` class. Every parameter must lie under exactly one of them.
    """

    model_type: str  # the config's model_type
    embedding: tuple[str, ...]  # modules that run before the layers; they may be absent in a given model
    blocks: str  # the ModuleList of layers
    head: tuple[str, ...]  # modules that run after the layers; they may be absent in a given model
    returned: int = 0  # length of the tuple that a layer returns, hidden states first; 0: a bare tensor
    axes: tuple[int, int] = (0, 1)  # axes of rows and of tokens in the hidden states between layers
    ignored: tuple[str, ...] = ()  # name endings of obsolete tensors in old checkpoints


@dataclass(frozen=True, kw_only=True)
class ParameterFormats:
    """How a model's parameters are stored, transferred and computed."""

    precision: Precision = Precision(stored=torch.float32)  # noqa: RUF009 - frozen; of parameters that are not encoded
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    trained: Collection[str] | None = None
    resident: Collection[str] = ()
    frozen_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)


def segment_layouts(
    model: PreTrainedModel, architecture: Architecture, formats: ParameterFormats = ParameterFormats()
) -> tuple[BlockLayout, ...]:
    """Assign every parameter of a model to a segment."""
    blocks, precision = len(_layers(model, architecture)), formats.precision
    owned: list[list[ParameterSpec]] = [[] for _ in range(blocks + 2)]
    borrowed: list[list[ParameterSpec]] = [[] for _ in range(blocks + 2)]
    for index, (name, aliases) in enumerate(segment_aliases(model, architecture).items()):
        users, parameter = sorted(aliases), model.get_parameter(name)
        spec = ParameterSpec(
            name,
            tuple(parameter.shape),
            parameter.dtype,
            index,
            _decays_in_mezo(name),
            encoding=formats.encodings.get(name),
            frozen=formats.trained is not None and name not in formats.trained,
        )
        is_common = len(users) > 1 and 0 not in users  # shared by layers, and perhaps the head
        in_layers = not {0, blocks + 1} & set(users)
        if spec.encoding is not None and is_common:
            raise UnsupportedModelError(
                f"{architecture.model_type}: {name}",
                found=f"a weight in {spec.encoding.name} that several layers share",
                expected="quantised weights in one layer each, or in embedding and head",
                remedy="use the unquantised checkpoint",
            )
        is_resident = is_common or (name in formats.resident and in_layers)
        if precision.carried is not None and len(spec.shape) > 1 and in_layers and not is_resident:
            spec = replace(spec, transfer_dtype=precision.carried, transfer_back=precision.transfer_back)
        for order, user in enumerate([0, *users] if is_resident else users):
            modules = [model.get_submodule(alias.rpartition(".")[0]) for alias in aliases.get(user, ())]
            user_spec = replace(spec, forward_dtype=autocast_dtype(modules, precision.autocast))
            if spec.frozen and name in formats.frozen_dtypes and in_layers and not is_resident:
                forward_dtype = user_spec.forward_dtype or spec.dtype
                user_spec = replace(user_spec, dtype=formats.frozen_dtypes[name], forward_dtype=forward_dtype)
            (borrowed if order else owned)[user].append(user_spec)
    kinds = [SegmentKind.EMBEDDING, *[SegmentKind.BLOCK] * blocks, SegmentKind.HEAD]
    names = ["embedding", *(f"block {i}" for i in range(blocks)), "head"]
    return tuple(
        BlockLayout(name, kind, tuple(specs), tuple(borrowed_specs))
        for name, kind, specs, borrowed_specs in zip(names, kinds, owned, borrowed, strict=True)
    )


def segment_aliases(model: PreTrainedModel, architecture: Architecture) -> dict[str, dict[int, list[str]]]:
    """Map each parameter's name in ``named_parameters()`` to its names in each segment that uses it."""
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


def require_axes(hidden: torch.Tensor, ids: torch.Tensor, axes: tuple[int, int], model_type: str) -> None:
    """Refuse hidden states whose rows and tokens do not lie along the declared axes."""
    if hidden.dim() > max(axes) and tuple(hidden.shape[axis] for axis in axes) == tuple(ids.shape):
        return
    raise UnsupportedModelError(
        f"model type {model_type}",
        found=f"hidden states of shape {list(hidden.shape)} for {ids.shape[0]} rows of {ids.shape[1]} tokens",
        expected=f"rows along axis {axes[0]} and tokens along axis {axes[1]}, as the architecture says",
        remedy="declare these axes as `axes` of the Architecture",
    )


def _layers(model: PreTrainedModel, architecture: Architecture) -> nn.ModuleList:
    layers = dict(model.named_modules()).get(architecture.blocks)
    if isinstance(layers, nn.ModuleList):
        return layers
    raise UnsupportedModelError(
        f"{architecture.model_type}: {architecture.blocks}",
        found="no such module in this model" if layers is None else f"a {type(layers).__name__}",
        expected="the path of a ModuleList",
        remedy="declare it as the blocks of the Architecture",
    )


def _decays_in_mezo(name: str) -> bool:
    """Whether MeZO's trainer decays a parameter. It decides by the name, so RMSNorm weights decay."""
    return not any(part in name for part in ("bias", "layer_norm", "layernorm"))


def parameter_names(model: nn.Module) -> dict[str, list[str]]:
    """Map each parameter's name in ``named_parameters()`` to all its names in the model, in registration order."""
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
        found="a parameter outside the declared embedding, blocks and head",
        expected=f"a parameter under {', '.join([*architecture.embedding, architecture.blocks, *architecture.head])}",
        remedy="declare its module in the Architecture",
    )


_MAX_BYTES = 1 << 20
_MAX_AXES = 8  # axes of hidden states


def read_architecture(path: Path) -> Architecture:
    """Read a declaration."""
    try:
        with open_regular(path) as file:
            values: dict[str, Any] = dict(json.loads(file.read(_MAX_BYTES)))
    except OSError as error:
        raise _refused(path, reason(error), "a readable file") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(path, f"no object in JSON ({error})", "a JSON object") from error
    known = {field.name for field in fields(Architecture)}
    missing, unknown = sorted(known - {"returned", "axes", "ignored"} - values.keys()), sorted(values.keys() - known)
    if missing or unknown:
        found = f"no {missing[0]!r}" if missing else f"a field {unknown[0][:40]!r}"
        raise _refused(path, found, ", ".join(sorted(known)))
    for name, value in values.items():
        is_valid, expected = _checked(name, value)
        if not is_valid:
            raise _refused(f"{path}: {name}", f"{str(value)[:40]!r}", expected)
    declared: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Architecture(**declared)


def _checked(name: str, value: Any) -> tuple[bool, str]:
    """Whether a field's value is valid, and what is."""
    items = value if isinstance(value, list) else []
    if name == "returned":
        return type(value) is int and 0 <= value <= 3, "an integer from 0 to 3"
    if name == "axes":
        are_axes = len(items) == 2 and all(type(axis) is int and 0 <= axis < _MAX_AXES for axis in items)
        return are_axes and items[0] != items[1], f"a list of two different integers from 0 to {_MAX_AXES - 1}"
    if name in ("embedding", "head", "ignored"):
        return items is value and all(isinstance(item, str) and item for item in items), "a list of names"
    return isinstance(value, str) and value != "", "a name"


def _refused(where: object, found: str, expected: str) -> OptionError:
    return OptionError(str(where), found=found, expected=expected, remedy="see the example in docs/models.md")


def _declared(model_type: str, *towers: str, decoder: str = "model", ignored: tuple[str, ...] = ()) -> Architecture:
    return Architecture(
        model_type=model_type,
        embedding=(*towers, f"{decoder}.embed_tokens"),
        blocks=f"{decoder}.layers",
        head=(f"{decoder}.norm", "lm_head"),
        ignored=ignored,
    )


_TOWER = "model.vision_tower", "model.multi_modal_projector"
_DECLARED = (
    # ``final_layer_norm`` (and, in 350m, ``project_out`` before ``project_in``) is registered before the layers, so MeZO
    # draws its noise before theirs although it runs after them. 350m has a narrower embedding with two projections.
    Architecture(
        model_type="opt",
        embedding=("model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"),
        blocks="model.decoder.layers",
        head=("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"),
        ignored=("decoder.version",),
    ),
    _declared("llama", ignored=("rotary_emb.inv_freq",)),
    _declared("qwen2", ignored=("rotary_emb.inv_freq",)),  # small sizes tie the head to the embedding
    _declared("qwen3"),
    _declared("qwen2_5_vl", "model.visual", decoder="model.language_model"),
    *(_declared(model_type, *_TOWER, decoder="model.language_model") for model_type in ("gemma3", "llava", "mistral3")),
)
ARCHITECTURES: Mapping[str, Architecture] = {declared.model_type: declared for declared in _DECLARED}
