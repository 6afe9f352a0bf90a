"""First-order training of an adapter in ``transformers.Trainer`` and trainers derived from it.

The trainer keeps its loop, data, optimizer, schedule, clipping, logs, evaluation, callbacks and checkpoints. Only forward
and backward run in ``Engine``: a step streams the blocks of the base once forward and once back. The base is only
read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zo2adapters.frameworks.streamed_trainer import StreamedTrainerMixin
from zo2adapters.frameworks.supported import FIRST_ORDER
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds.block_model import PeftBlockModel
from zo2adapters.models.peft_kinds.files import WEIGHTS_FILE
from zo2adapters.models.peft_kinds.reader import read_values
from zo2adapters.models.peft_model import Adapter
from zo2core import Batch, Engine, FirstOrder, MemoryPolicy
from zo2core.errors import OptionError

_SUPPORTED: Mapping[str, str | None] = {
    **FIRST_ORDER,
    "optimizer_cls_and_kwargs": None,
    "optim_target_modules": "leave it out: the adapter's config names the modules",
    "ref_model": "leave it out: the reference is the model with the adapter that training starts from",
    "sync_ref_model": "leave it out: the reference is always the model with the adapter that training starts from",
    "model_init_kwargs": "pass model=open_checkpoint(model, adapter=...), with its options, and no peft_config",
}
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")  # as in transformers.Trainer


class BackpropTrainerMixin(StreamedTrainerMixin):
    """Trains an adapter by gradients: ``class FirstOrderTrainer(BackpropTrainerMixin, Trainer): pass``.

    Made for the same trainers as ``ZOTrainerMixin``. Losses, gradients and adapters are, bit for bit, those of the trainer
    with the whole model and peft. With gradient accumulation all batches of a step run through a block before the next block
    is loaded. Modules run in evaluation mode, without dropout. Checkpoints have the adapter as peft writes it and the
    trainer's own files. DPO's reference is the model with the adapter that training started from.

    Args:
        model: A model directory, a hub id, or what ``open_checkpoint(model, adapter=...)`` returned.
        args: The trainer's arguments.
        peft_config: The adapter's config, or ``Adapter``; None where ``model`` was opened with one.
        memory: How much memory the process may use.
        options: Other options of the trainer, by name.

    Raises:
        OptionError: if there is no adapter or there are two, or an argument is not supported.
        ZO2Error: as ``open_checkpoint`` and ``Engine`` say.
    """

    _operations = 6  # two forward passes, and the gradients of activations

    def __init__(
        self,
        model: HFBlockModel | Path | str,
        args: Any = None,
        *,
        peft_config: Any = None,
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        **options: Any,
    ) -> None:
        if (peft_config is None) == isinstance(model, (str, Path)):
            raise OptionError(
                "peft_config",
                found="none" if peft_config is None else f"one with an opened {type(model).__name__}",
                expected="an adapter's config with a path, and none with an opened model",
                remedy="pass model=PATH, peft_config=LoraConfig(...), or model=open_checkpoint(PATH, adapter=...) alone",
            )
        adapter = peft_config
        if adapter is not None and not isinstance(adapter, Adapter):
            adapter = Adapter(config=peft_config, seed=getattr(args, "seed", 0))
        self._memory = memory
        self._engine: Engine | None = None
        self._initial: dict[str, torch.Tensor] = {}  # the adapter's parameters when training began, by name
        super().__init__(model, args, options, adapter=adapter, supported=_SUPPORTED)
        skeleton: Any = self.block_model.skeleton
        skeleton.parameters = lambda recurse=True: iter(self.engine.parameters.values())
        skeleton.named_parameters = lambda *_, **__: iter(self.engine.parameters.items())

    @property
    def engine(self) -> Engine:
        """Engine that computes the gradients, with the adapter's present values."""
        if self._engine is None:
            self._engine = Engine(self.block_model, FirstOrder(None), device=str(self.args.device), memory=self._memory)
            self._initial = {name: value.detach().clone() for name, value in self._engine.parameters.items()}
        return self._engine

    def _take_step(self, batches: list[Batch], num_items: Any) -> float:
        """Add the step's gradients to those of the adapter. See the base class."""
        if callable(to_training := getattr(self.optimizer, "train", None)):  # schedule-free optimizers
            to_training()
        return self.engine.gradients(batches, self._trainer_loss(num_items))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the adapter's parameters that decay: those of neither biases nor norms."""
        return [name for name in self.engine.parameters if not _NO_DECAY.search(name.lower())]

    @contextmanager
    def _reference(self) -> Iterator[Engine]:
        engine = self.engine
        present = {name: value.detach().clone() for name, value in engine.parameters.items()}
        engine.load_parameters(self._initial)
        try:
            yield engine
        finally:
            engine.load_parameters(present)

    def _load(self, checkpoint: Path) -> None:
        """Load the adapter of a checkpoint."""
        model, engine = self.block_model, self.engine
        assert isinstance(model, PeftBlockModel), "the constructor has required an adapter"
        shapes = {name: torch.Size(shape) for name, shape in model.adapter.shapes.items()}
        values = read_values(checkpoint / WEIGHTS_FILE, model.adapter.inserted, shapes, model.adapter.dtypes)
        engine.load_parameters({name: values[name] for name in engine.parameters})
