"""Parameter-efficient training: a few new parameters in peft's modules, and a base that is only read.

peft puts its modules into the skeleton and names their parameters; values of a new adapter are made by peft's own code.
They are few: the embedding's segment has all of them, and blocks borrow theirs, so that blocks never change.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.optional_package import optional_package
from zo2core import (
    CheckpointError,
    OptionError,
    ParameterSpec,
    SafetensorsReader,
    TensorReader,
    new_directory,
    open_regular,
    parse_header,
    reason,
)

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"  # of the adapter within the model
_PREFIX = "base_model.model."  # of names in peft's files
_BASE = ".base_layer."
_KNOWN_STARTS = (True, False, "gaussian")  # of values that need no weights of the base
_LARGEST_RANK = 1 << 16
_LARGEST_CONFIG = 1 << 20  # bytes
_DECISIVE = frozenset(
    {"r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "rank_pattern", "alpha_pattern"}
    | {"layers_to_transform", "layers_pattern", "fan_in_fan_out"}
)
_HEEDED = _DECISIVE | {"init_lora_weights"}  # which decides the first values: the fingerprint has them
_NEUTRAL = frozenset(
    {"peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """New parameters beside a base that stays as it is.

    Args:
        config: peft's ``LoraConfig``, a JSON file of one, or a directory with an adapter that peft has saved: then its
            values are what the run begins with.
        frozen: Parts of parameters' names that are not trained, as ``("lora_A",)`` for LoRA-FA (arXiv 2308.03303).
        seed: Of a new adapter's values.
    """

    config: Any
    frozen: Sequence[str] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            expected = "a whole number of at least 0 and below 2^63"
            raise OptionError("adapter.seed", found=repr(self.seed)[:40], expected=expected, remedy="choose such a number")


class AdapterReader:
    """A base checkpoint, and an adapter's first values, which are in memory.

    Args:
        base: Reads the base; belongs to this reader.
        values: By parameter: float32.
        where: What the adapter is called in messages.
    """

    def __init__(self, base: TensorReader, values: Mapping[str, torch.Tensor], where: str) -> None:
        self._base = base
        self._values = {name: value.view(-1) for name, value in values.items()}
        self._where = where
        self.close = base.close

    @property
    def fingerprint(self) -> str:
        """Of the base, and of all values of the adapter."""
        values = save({name: value.contiguous() for name, value in sorted(self._values.items())})
        return hashlib.sha256(self._base.fingerprint.encode() + hashlib.sha256(values).digest()).hexdigest()

    def page_offset(self, spec: ParameterSpec) -> int | None:
        """None for the adapter, which is not read from a disk. See the contract."""
        return None if spec.name in self._values else self._base.page_offset(spec)

    def itemsize(self, parameter: str) -> int:
        """Bytes of an element."""
        return self._values[parameter].itemsize if parameter in self._values else self._base.itemsize(parameter)

    def origin(self, parameter: str) -> str:
        """Where a parameter comes from."""
        return self._where if parameter in self._values else self._base.origin(parameter)

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of one parameter. See the contract."""
        if parameter in self._values:
            out.copy_(self._values[parameter][start : start + out.numel()])
        else:
            self._base.read_into(parameter, out, start)


class PeftBlockModel(HFBlockModel):
    """A Hugging Face model with an adapter of peft's in it. Exports are adapters, in peft's files.

    Args:
        config: peft's.
        arguments: As for ``HFBlockModel``.
        options: The same.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.adapter_config = config

    @property
    def description(self) -> Mapping[str, Any]:
        """What decides the forwards, the adapter's config among it."""
        plain = _plain(self.adapter_config)
        return {**super().description, "adapter": {key: plain[key] for key in sorted(_DECISIVE & plain.keys())}}

    @property
    def written(self) -> frozenset[str]:
        """The adapter's parameters."""
        return frozenset(spec.name for layout in self.layouts for spec in layout.parameters if _is_of_adapter(spec.name))

    def write(self, directory: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the adapter as peft does: its config, and those of these tensors that are its own.

        Raises:
            OutputError: if the directory is in use or cannot be written.
        """
        own = self.written
        saved = {_saved_name(name): tensor.clone() for name, tensor in tensors if name in own}
        with new_directory(directory) as partial:
            (partial / WEIGHTS_FILE).write_bytes(save(saved, {"format": "pt"}))
            (partial / CONFIG_FILE).write_text(json.dumps(_plain(self.adapter_config), indent=2, sort_keys=True) + "\n")


def peft_config(adapter: Adapter) -> tuple[Any, Path | None]:
    """Peft's config of an adapter, and the file of its values if there is one.

    Raises:
        OptionError: for a kind of adapter, or an option of it, that cannot be trained here.
        CheckpointError: if a file cannot be read.
    """
    peft = optional_package("peft", install="zo2core[peft]")
    config, weights = deepcopy(adapter.config), None  # peft writes into it
    if isinstance(config, (str, Path)):
        path = Path(config)
        weights = path / WEIGHTS_FILE if path.is_dir() else None
        config = _read_config(peft, path / CONFIG_FILE if path.is_dir() else path)
    if not isinstance(config, peft.LoraConfig):
        kind = str(getattr(config, "peft_type", type(config).__name__)).removeprefix("PeftType.")
        raise OptionError("adapter", found=kind, expected="LORA as peft_type", remedy="use a LoraConfig")
    plain, defaults = config.to_dict(), peft.LoraConfig().to_dict()
    unheeded = [key for key, value in plain.items() if key not in _HEEDED | _NEUTRAL and value != defaults.get(key)]
    if config.init_lora_weights not in _KNOWN_STARTS:
        unheeded.append("init_lora_weights")
    if type(config.r) is not int or not 1 <= config.r <= _LARGEST_RANK:
        unheeded.append("r")
    if unheeded:
        raise OptionError(
            f"adapter.{unheeded[0]}",
            found=str(plain[unheeded[0]])[:80],
            expected="LoRA of linear layers alone, without dropout, whose first values need no weights of the base",
            remedy="leave it out",
        )
    return config, weights


def inject(
    skeleton: PreTrainedModel, adapter: Adapter, config: Any, weights: Path | None
) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Put peft's modules into a skeleton, whose parameters are on the meta device.

    Args:
        skeleton: Changed.
        adapter: What was asked for.
        config: Of ``peft_config``.
        weights: Of ``peft_config``.

    Returns:
        The new parameters' first values, float32, and the names of those that are trained.

    Raises:
        OptionError: if the config names modules that are not there, or nothing is trained.
        CheckpointError: if the values are another adapter's.
    """
    import peft

    try:
        with torch.random.fork_rng(devices=[]):  # layers are built with random weights, which go nowhere
            peft.inject_adapter_in_model(config, skeleton, adapter_name=_NAME)
    except Exception as error:  # any: what a config says surfaces inside peft's own code
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise OptionError(
            "adapter.target_modules" if "arget modules" in found else "adapter",
            found=found,
            expected="a config that peft can put into this model, with names of its linear layers",
            remedy="name layers that the model has, such as q_proj, or all-linear",
        ) from error
    output: Any = skeleton.get_output_embeddings
    for path, module in skeleton.named_modules():
        wrapped = getattr(module, "base_layer", None)
        if wrapped is not None and (type(wrapped) is not nn.Linear or module is output()):
            raise OptionError(
                "adapter.target_modules",
                found=f"{path}, {'the head' if module is output() else type(wrapped).__name__}",
                expected="linear layers before the head",
                remedy="name such layers, as q_proj",
            )
    skeleton.train(mode=False)
    names = [name for name, _ in skeleton.named_parameters() if _is_of_adapter(name)]
    if weights is None:
        values = _new_values(skeleton, names, config, adapter.seed)
    else:
        values = _read_values(skeleton, names, weights)
    trained = frozenset(name for name in names if not any(part in name for part in adapter.frozen))
    unmatched = [part for part in adapter.frozen if not any(part in name for name in names)]
    if not trained or unmatched:
        raise OptionError(
            "adapter.frozen",
            found=f"{unmatched or list(adapter.frozen)}, which {'no' if trained else 'each'} parameter's name has",
            expected="parts of the names of some of them, such as lora_A",
            remedy="leave it out to train all",
        )
    return values, trained


def _new_values(model: nn.Module, names: Sequence[str], config: Any, seed: int) -> dict[str, torch.Tensor]:
    """Values by peft's own initialisation."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # and no device's
        for name in names:
            _replace(model, name, torch.zeros(model.get_parameter(name).shape, dtype=torch.float32))
            linear = model.get_submodule(name.rpartition(".")[0])
            assert isinstance(linear, nn.Linear), "other layers were refused"
            linear.reset_parameters()  # with which it would have been built
        for module in model.modules():
            reset: Any = getattr(module, "reset_lora_parameters", None)
            if reset is not None:
                reset(_NAME, config.init_lora_weights)
    values = {name: model.get_parameter(name).detach() for name in names}
    for name, value in values.items():
        _replace(model, name, torch.empty_like(value, device="meta"))
    return values


def _read_values(model: nn.Module, names: Sequence[str], path: Path) -> dict[str, torch.Tensor]:
    """Values of a file that peft has written."""
    entries = parse_header(path)
    values: dict[str, torch.Tensor] = {}
    with closing(SafetensorsReader(entries)) as reader:
        for name in names:
            saved_name, shape = _saved_name(name), model.get_parameter(name).shape
            entry = entries.pop(saved_name, None)
            if entry is None or entry.shape != tuple(shape):
                raise CheckpointError(
                    f"{path}: {saved_name}",
                    found="no such tensor" if entry is None else f"shape {list(entry.shape)}",
                    expected=f"shape {list(shape)}, for this base and the adapter's config",
                    remedy="use the base that the adapter was made for",
                )
            values[name] = torch.empty(shape, dtype=torch.float32)
            reader.read_into(saved_name, values[name].view(-1))
            _replace(model, name, torch.empty(shape, dtype=torch.float32, device="meta"))
    if entries:
        raise CheckpointError(
            f"{path}: {min(entries)}",
            found=f"{len(entries)} tensor(s) that the model with this adapter does not have, this one first",
            expected="the adapter of adapter_config.json, for this base",
            remedy="use the base that the adapter was made for",
        )
    return values


def by_wrapped_names(model: nn.Module, values: Mapping[str, T]) -> dict[str, T]:
    """What is kept by the base's parameters, by the names that they have once peft has wrapped their layers."""
    names = (name for name, _ in model.named_parameters())
    return {name: values[plain] for name in names if (plain := name.replace(_BASE, ".")) in values}


def _is_of_adapter(name: str) -> bool:
    return f".{_NAME}." in name or name.endswith(f".{_NAME}")


def _saved_name(name: str) -> str:
    return _PREFIX + re.sub(rf"\.{_NAME}(?=\.|$)", "", name)


def _replace(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = nn.Parameter(value)


def _read_config(peft: Any, path: Path) -> Any:
    try:
        with open_regular(path) as file:
            values = json.loads(file.read(_LARGEST_CONFIG))
        return peft.LoraConfig(**values) if values.get("peft_type") == "LORA" else peft.PeftConfig.from_peft_type(**values)
    except Exception as error:  # any: what a config says surfaces inside peft's own code
        found = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {str(error)[:200]}"
        expected = f"{CONFIG_FILE} as peft writes it"
        raise CheckpointError(path, found=found, expected=expected, remedy="save the adapter again with peft") from error


def _plain(config: Any) -> dict[str, Any]:
    """A config as JSON values."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=_listed))
    return {**values, "inference_mode": True}


def _listed(value: object) -> object:
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)
