"""The interface of a kind of adapter: the options it supports, its parameters, and their initial values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from zo2adapters.models.hf import HFBlockModel

ADAPTER_NAME = "default"  # the adapter's name in the model, peft's default
NEUTRAL = frozenset(  # options of every config that do not change a run
    {"peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
)

DROPOUT = frozenset({"lora_dropout", "rank_dropout", "module_dropout"})  # options that change training only

OpenBase = Callable[[], HFBlockModel]  # opens the base without the adapter
FirstValues = Callable[[], Mapping[str, torch.Tensor]]  # returns initial values by parameter, in its dtype


@dataclass(frozen=True)
class Inserted:
    """An adapter's modules in a skeleton. Its parameters are on the meta device."""

    parameters: Mapping[str, str]  # names in peft's files, by names in the skeleton
    embedding: tuple[str, ...] = ()  # modules that run before the layers
    forward_bytes: int = 0  # memory that a layer's forward needs in addition to the base's
    wrapper: Any = None  # peft's model around the skeleton, if the adapter only works through it; else None


class AdapterKind(ABC):
    """A kind of peft's adapters. To add one, write a subclass and add it to ``KINDS`` in ``peft_model``."""

    peft_type: str  # the kind's name in peft's files
    title: str  # name in messages
    config_class: str  # name of peft's class of configs
    decisive: frozenset[str]  # supported options that change the forward; they are part of a run's description
    supported: frozenset[str]  # other supported options: they change only initial values, parameters or files
    accepted: str  # the supported configs in words, for messages
    part_of_names: str  # a part of the names of some parameters, as an example in messages
    model_classes: ClassVar[Mapping[type[HFBlockModel], Callable[..., HFBlockModel]]]
    """Classes of models with an adapter, by the class without one. They take an ``OpenedAdapter`` before its arguments."""

    def unused_options(self, config: Any) -> list[str]:
        """Names of options whose value is not supported."""
        return []

    def why_not_stacked(self, config: Any) -> str | None:
        """Name of these adapters in the error that refuses low-rank perturbations; None: they are supported."""
        return self.title

    def why_not_mixed(self, config: Any) -> str | None:
        """Name of these adapters in the error that refuses mixed precision; None: it is supported."""
        return self.title

    @abstractmethod
    def insert(self, skeleton: PreTrainedModel, config: Any) -> Inserted:
        """Put peft's modules into a skeleton."""

    @abstractmethod
    def first_values(self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase) -> FirstValues:
        """Prepare the initial values of a new adapter."""


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter in a skeleton, with its initial values."""

    kind: AdapterKind
    config: Any  # peft's config
    inserted: Inserted
    shapes: Mapping[str, Sequence[int]]  # shapes by parameter
    dtypes: Mapping[str, torch.dtype]  # dtypes by parameter
    trained: frozenset[str]  # names of the trained parameters
    values: FirstValues
    where: str  # name of the adapter in messages
