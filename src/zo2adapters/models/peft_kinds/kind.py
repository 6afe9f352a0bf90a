"""What a kind of adapter says of itself: which options of peft's config it heeds, its parameters, and their first values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from zo2adapters.models.hf import HFBlockModel

ADAPTER_NAME = "default"  # of the adapter within the model, as peft calls it
NEUTRAL = frozenset(  # options of every config that decide nothing of a run
    {"peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
)

DROPOUT = frozenset({"lora_dropout", "rank_dropout", "module_dropout"})  # options that decide training alone

OpenBase = Callable[[], HFBlockModel]  # the base as it is without the adapter
FirstValues = Callable[[], Mapping[str, torch.Tensor]]  # by parameter, in its dtype


@dataclass(frozen=True)
class Inserted:
    """An adapter's modules in a skeleton. Its parameters are on the meta device."""

    parameters: Mapping[str, str]  # name in the skeleton, to name in peft's files
    embedding: tuple[str, ...] = ()  # modules that run before the layers
    forward_bytes: int = 0  # of memory that a layer's forward takes beside the base's
    wrapper: Any = None  # peft's model around the skeleton, where the skeleton's own forward does not see the adapter


class AdapterKind(ABC):
    """A kind of peft's adapters: a further one is a subclass, and a row of ``KINDS`` in ``peft_model``."""

    peft_type: str  # in peft's files
    title: str  # in messages
    config_class: str  # of peft
    decisive: frozenset[str]  # options that decide forwards: a run's description has them
    supported: frozenset[str]  # options that decide first values, parameters or files, which speak for themselves
    accepted: str  # in words: what is
    part_of_names: str  # of some of its parameters, as an example
    model_classes: ClassVar[Mapping[type[HFBlockModel], Callable[..., HFBlockModel]]]
    """By the class of a model without an adapter: what takes an ``OpenedAdapter``, and what that class takes."""

    def unused_options(self, config: Any) -> list[str]:
        """Name the options that have a value, beside the default, that is not accepted."""
        return []

    def why_not_stacked(self, config: Any) -> str | None:
        """What such adapters are called where directions cannot be beside their activations; None: they can."""
        return self.title

    def why_not_mixed(self, config: Any) -> str | None:
        """What such adapters are called where mixed precision would give other bits than autocast; None: it does not."""
        return self.title

    @abstractmethod
    def insert(self, skeleton: PreTrainedModel, config: Any) -> Inserted:
        """Put peft's modules into a skeleton.

        Raises:
            OptionError: if the config does not go with the model.
        """

    @abstractmethod
    def first_values(self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase) -> FirstValues:
        """Prepare a new adapter's values.

        Args:
            skeleton: After ``insert``. Only now is it used: when the values are asked for, a run may have it.
            config: The same.
            seed: Seed of what is drawn.
            base: Called when the values are asked for, if they need the base's weights.
        """


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter in a skeleton, with the values that it begins with."""

    kind: AdapterKind
    config: Any  # peft's
    inserted: Inserted
    shapes: Mapping[str, Sequence[int]]  # by parameter
    dtypes: Mapping[str, torch.dtype]  # by parameter
    trained: frozenset[str]  # parameters
    values: FirstValues
    where: str  # what it is called in messages
