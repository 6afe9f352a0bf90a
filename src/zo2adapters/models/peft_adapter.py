"""Parameter-efficient training: a few new parameters in peft's modules, and a base that is only read.

Peft inserts its modules into the skeleton, names their parameters and makes their initial values. The embedding's segment
owns all of these parameters and blocks borrow theirs, so that blocks never change. Each kind of adapter is a class in
``peft_kinds``.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from zo2adapters.models.peft_kinds import (
    CONFIG_FILE,
    SAVED,
    WEIGHTS_FILE,
    AdapterKind,
    FirstValues,
    LoRAKind,
    OpenBase,
    OpenedAdapter,
    base_form,
    base_values,
    put_value,
)
from zo2adapters.models.peft_prefix import PrefixKind
from zo2adapters.optional_package import optional_package
from zo2core.checkpoint.shards import SafetensorsReader, parse_header, require_own_file
from zo2core.errors import CheckpointError, OptionError, ZO2Warning, reason
from zo2core.io.durable import open_regular
from zo2core.ranges import require_whole

_FACTORED = {"r", "alpha", "rank_pattern", "alpha_pattern"}
_INIT = {"init_weights"}
_KINDS = (
    LoRAKind(),
    PrefixKind(),
    AdapterKind("IA3", "IA3Config", {"feedforward_modules", "fan_in_fan_out"}, {"init_ia3_weights"}, "ia3_l"),
    AdapterKind("LOHA", "LoHaConfig", _FACTORED, _INIT, "hada_w1_a", is_mixed=False),
    AdapterKind(
        "LOKR", "LoKrConfig", {*_FACTORED, "decompose_both", "decompose_factor", "use_effective_conv2d"}, _INIT, "lokr_w1"
    ),
    AdapterKind("HRA", "HRAConfig", {"r", "apply_GS"}, _INIT, "hra_u"),
    AdapterKind("MISS", "MissConfig", {"r", "mini_r"}, _INIT, "miss_block"),
)
KINDS: Mapping[str, AdapterKind] = {kind.peft_type: kind for kind in _KINDS}
_NEUTRAL = {  # options of every config that do not change a run
    *("peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"),
}
_DROPOUT = {"lora_dropout", "rank_dropout", "module_dropout"}  # options that change training only

_LARGEST_CONFIG = 1 << 20  # bytes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter to train. The base's weights do not change.

    Args:
        config: A config of peft, of a kind in ``KINDS``; a JSON file of one; or a directory with an adapter saved by peft,
            whose values the run starts from.
        frozen: Parameters whose names contain one of these texts are not trained, such as ``("lora_A",)`` for LoRA-FA
            (arXiv 2308.03303).
        seed: Seed of a new adapter's initial values.
        base: Path or hub id of the base, which an exported config names if ``config`` names none.
        is_trained: Whether it will be trained. An adapter that is only read may have been trained with dropout.
    """

    config: Any
    frozen: Sequence[str] = ()
    seed: int = 0
    base: str | None = None
    is_trained: bool = True

    def __post_init__(self) -> None:
        require_whole("adapter.seed", self.seed, 0)


class ChosenConfig(NamedTuple):
    """An adapter's config, its kind, and the file of its values."""

    kind: AdapterKind
    config: Any  # peft's config
    weights: Path | None  # file of its values; None: it is new


def peft_config(adapter: Adapter) -> ChosenConfig:
    """Read and check an adapter's config."""
    peft = optional_package("peft", install="zo2core[peft]")
    config, weights = deepcopy(adapter.config), None  # peft writes into it
    if isinstance(config, (str, Path)):
        path = Path(config)
        if path.is_dir():
            weights = path / WEIGHTS_FILE
            for file in (weights, path / CONFIG_FILE):
                require_own_file(file, path)
        config = _read_config(peft, path / CONFIG_FILE if path.is_dir() else path)
    name = str(getattr(config, "peft_type", type(config).__name__)).removeprefix("PeftType.")
    kind = KINDS.get(name)
    if kind is None or not isinstance(config, getattr(peft, kind.config_class)):
        classes = ", ".join(known.config_class for known in KINDS.values())
        raise OptionError(
            "adapter", found=name, expected=f"one of {', '.join(KINDS)} as peft_type", remedy=f"use one of {classes}"
        )
    plain, defaults = config.to_dict(), type(config)().to_dict()
    known = kind.decisive | kind.supported | _NEUTRAL | (set() if adapter.is_trained else _DROPOUT)
    unused_options = [key for key, value in plain.items() if key not in known and value != defaults.get(key)]
    unused_options += kind.unused_options(config)
    if unused_options:
        raise OptionError(
            f"adapter.{unused_options[0]}",
            found=str(plain[unused_options[0]])[:80],
            expected=kind.accepted,
            remedy="leave it out",
        )
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = adapter.base
    return ChosenConfig(kind, config, weights)


def inject(skeleton: PreTrainedModel, adapter: Adapter, chosen: ChosenConfig, base: OpenBase) -> OpenedAdapter:
    """Insert peft's modules into a skeleton. Their parameters are on the meta device."""
    kind, config, weights = chosen
    try:
        inserted = kind.insert(skeleton, config)
    except OptionError as error:
        if weights is None:
            raise
        raise CheckpointError(
            weights.with_name(CONFIG_FILE),
            found=f"{error.where}: {error.found}",
            expected=error.expected,
            remedy="use the base that the adapter was made for",
        ) from error
    tensors = {  # a module's copy has the dtype of the module, as in peft
        name: torch.empty(parameter.shape, dtype=parameter.dtype if SAVED in name else torch.float32, device="meta")
        for name, parameter in skeleton.named_parameters()
        if name in inserted.parameters
    }
    if weights is None:
        values = kind.first_values(skeleton, config, adapter.seed, base)
        copies = [name for name in tensors if SAVED in name]
        values = partial(_with_copies, values, tensors, copies, base) if copies else values
    else:
        values = partial(dict, read_values(weights, inserted.parameters, tensors))
    for name, tensor in tensors.items():
        put_value(skeleton, name, tensor)
    trained = frozenset(name for name in tensors if not any(part in name for part in adapter.frozen))
    unmatched = [part for part in adapter.frozen if not any(part in name for name in tensors)]
    if not trained or unmatched:
        raise OptionError(
            "adapter.frozen",
            found=f"{unmatched or list(adapter.frozen)}, which {'no' if trained else 'every'} parameter's name contains",
            expected=f"parts of the names of some of them, such as {kind.part_of_names}",
            remedy="leave it out to train all",
        )
    return OpenedAdapter(kind, config, inserted, tensors, trained, values, where=str(weights or "the new adapter"))


def _with_copies(
    values: FirstValues, tensors: Mapping[str, torch.Tensor], copies: Sequence[str], base: OpenBase
) -> Mapping[str, torch.Tensor]:
    """Initial values of an adapter. Copies of whole modules start with the base's values."""
    read = base_values(base(), map(base_form, copies))
    started = {name: value.to(tensors[name].dtype) for name, (_, value) in zip(copies, read, strict=True)}
    return {**values(), **started}


def read_values(path: Path, names: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read an adapter's values from a file of peft, given the names there and the shapes and dtypes."""
    entries, values = parse_header(path), {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
    found = {name: f"shape {list(entry.shape)}" for name, entry in entries.items()}
    expected = {names[name]: f"shape {list(value.shape)}" for name, value in values.items()}
    wrong = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    if wrong:
        raise CheckpointError(
            f"{path}: {wrong[0]}",
            found=found.get(wrong[0], "no such tensor"),
            expected=f"{expected.get(wrong[0], 'no such tensor')}, for this base and the adapter's config",
            remedy="use the base that the adapter was made for",
        )
    with closing(SafetensorsReader(entries)) as reader:
        for name, value in values.items():
            reader.read_into(names[name], value.view(-1))
    return values


def by_wrapped_names(model: nn.Module, values: Mapping[str, T]) -> dict[str, T]:
    """A mapping by the base's names, with the names that peft's wrapping gives these parameters as keys."""
    names = (name for name, _ in model.named_parameters())
    return {name: values[plain] for name in names if SAVED not in name and (plain := base_form(name)) in values}


def _read_config(peft: Any, path: Path) -> Any:
    try:
        with open_regular(path) as file:
            values = json.loads(file.read(_LARGEST_CONFIG))
        kind = KINDS.get(values.get("peft_type"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings for the author of the config
            if kind is None:
                return peft.PeftConfig.from_peft_type(**values)
            config_class = getattr(peft, kind.config_class)
            unknown = sorted(values.keys() - inspect.signature(config_class).parameters.keys())
            config = config_class(**{key: value for key, value in values.items() if key not in unknown})
    except Exception as error:  # any: an invalid config leads to errors inside peft
        found = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {str(error)[:200]}"
        expected = f"{CONFIG_FILE} as peft writes it"
        raise CheckpointError(path, found=found, expected=expected, remedy="save the adapter again with peft") from error
    if unknown:
        warnings.warn(
            f"{path}: {', '.join(unknown)} ignored, which the installed peft {peft.__version__} does not have, either",
            ZO2Warning,
            stacklevel=2,
        )
    return config
