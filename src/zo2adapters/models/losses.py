"""Losses of causal language models: over chunks of tokens, of several streams that ran as one batch, and of routers.

Logits of several streams are computed together, and over chunks of tokens they are never in memory whole.

Of the logits of a mixture's routers transformers computes a loss that keeps the experts' loads even. It records the outputs
of modules of a class that the model declares, and computes the loss at the end of its forward. Here blocks run one at a
time, so the logits travel with the hidden state, and the stub of the last layer has a module of that class, which returns
them to transformers' own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from zo2adapters.models.batches import predictions, stack_rows
from zo2core import Batch
from zo2core.errors import OptionError, UnsupportedModelError

# Note: Losses one after another. A loss allocates its logits in float32, twice, and then a scalar. If that scalar were kept,
# it would lie behind the freed memory, and glibc, which aligns torch's allocations, could not reuse all of it for the next
# loss: 32 losses would take 32 times as much. So each scalar is copied into one tensor and freed.


class KeptLosses:
    """A fixed number of losses in one tensor. See the note: Losses one after another."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept = 0
        self._losses: torch.Tensor | None = None

    def keep(self, loss: torch.Tensor) -> None:
        """Store a copy of the next loss, 0-d."""
        if self._losses is None:
            self._losses = loss.new_empty(self._count)
        self._losses[self._kept] = loss
        self._kept += 1

    @property
    def losses(self) -> torch.Tensor:
        """All losses, 1-D."""
        assert self._losses is not None, "no loss was kept"
        assert self._kept == self._count, "a loss is missing"
        return self._losses


def whole_losses(
    batches: Sequence[Batch],
    targets: Sequence[str],
    logits: Callable[..., torch.Tensor],
    *,
    loss_function: Callable[..., torch.Tensor],
    vocab_size: int,
) -> list[torch.Tensor]:
    """Compute the losses from all logits at once."""
    joined = stack_rows(batches)
    assert joined is not None, "stacked batches can be joined"
    all_logits = logits(**{key: value for key, value in joined.items() if key not in targets})
    kept = KeptLosses(len(batches))
    for logits_of_stream, batch in zip(torch.split(all_logits, len(batches[0]["labels"])), batches, strict=True):
        kept.keep(loss_function(logits_of_stream, batch["labels"], vocab_size=vocab_size))
    return list(kept.losses.unbind())


def stacked_losses(
    hidden: torch.Tensor,
    batches: Sequence[Batch],
    chunk: int,
    *,
    logits: Callable[[torch.Tensor], torch.Tensor],
    loss_function: Callable[..., torch.Tensor],
    vocab_size: int,
) -> list[torch.Tensor]:
    """Compute each stream's mean loss over its labelled tokens; logits of unlabelled tokens are not computed."""
    states = torch.split(hidden, len(batches[0]["labels"]))
    predicted = [predictions(batch) for batch in batches]
    counts = [len(rows) for rows, _ in predicted]
    chunk = max(1, chunk // len(batches))
    terms = [KeptLosses(-(-count // chunk)) for count in counts]
    for start in range(0, max(counts), chunk):
        length = min(chunk, max(counts) - start)
        positions = []
        for rows, columns in predicted:
            at = torch.arange(start, start + length, device=rows.device).clamp(max=len(rows) - 1)
            positions.append((rows[at], columns[at]))
        selected = torch.cat([state[at] for state, at in zip(states, positions, strict=True)])
        for stream, chunk_logits in enumerate(torch.split(logits(selected), length)):
            count = max(0, min(length, counts[stream] - start))
            if count:  # a sum, divided by the labelled tokens of all chunks
                rows, columns = (index[:count] for index in positions[stream])
                targets = batches[stream]["labels"][:, 1:][rows, columns]
                options = {"shift_labels": targets, "num_items_in_batch": counts[stream]}
                terms[stream].keep(loss_function(chunk_logits[:count], None, vocab_size=vocab_size, **options))
    return [losses.losses.sum() for losses in terms]


_OPTION = "output_router_logits"  # of configs and forwards
_OUTPUT = "router_logits"


def without_router_losses(model: PreTrainedModel) -> Mapping[str, bool]:
    """The arguments with which a forward computes no router loss; none where the config does not ask for it."""
    asks = getattr(model.config.get_text_config(), _OPTION, False)
    return {_OPTION: False} if asks and _OPTION in inspect.signature(model.forward).parameters else {}


class RouterLogits:
    """The logits of all routers of a model whose config asks for their loss.

    Args:
        model: The skeleton, before its layers are replaced by stubs.
        layers: Its layers.

    Raises:
        UnsupportedModelError: if transformers does not record the routers of this model.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
        self.off = without_router_losses(model)
        self._routed: list[torch.Tensor | None] = []
        self.none: tuple[torch.Tensor | None, ...] = ()  # before the first block
        self._stand_in: nn.Module | None = None
        if self.off:
            self._recorder = recorder = _recorder(model)
            routers = [m for layer in layers for m in layer.modules() if isinstance(m, recorder.target_class)]
            for number, router in enumerate(routers):
                router.register_forward_hook(partial(self._record, number))
            self.none = (None,) * len(routers)
            self._stand_in = _stand_in(recorder)

    def require_asked(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a call of the model that asks for router logits which the config does not ask for."""
        if arguments.get(_OPTION) and not self.none:
            raise UnsupportedModelError(
                f"the model's argument {_OPTION}",
                found="true, for a model whose blocks do not keep them",
                expected=f"{_OPTION}: true in a mixture's config.json",
                remedy="set it there, or leave the argument out",
            )

    def require_none(self, where: str, found: str) -> None:
        """Refuse what computes the loss from logits alone."""
        if self.none:
            expected = f"the model's own loss as a whole, since {_OPTION} is true in config.json"
            raise OptionError(where, found=found, expected=expected, remedy="leave it out, or set it to false there")

    @contextmanager
    def recorded(self, routed: Sequence[torch.Tensor | None]) -> Iterator[list[torch.Tensor | None]]:
        """A context in which a layer runs, whose routers' logits are added to those of the layers before."""
        self._routed = added = list(routed)
        try:
            yield added
        finally:
            self._routed = []

    def join(self, stub: nn.Module) -> None:
        """Give the last layer's stub a router, where transformers looks for one."""
        if self._stand_in is not None:
            *path, name = (self._recorder.layer_name or "router").split(".")
            for part in path:  # a stub has the attributes of its layer, which ``add_module`` would not hide
                stub._modules[part] = stub = nn.Module()
            stub._modules[name] = self._stand_in

    def replay(self, routed: Sequence[torch.Tensor | None]) -> None:
        """Return the logits of all layers to transformers, in order, within its forward."""
        for logits in routed:
            assert self._stand_in is not None, "only recorded routers have logits"
            self._stand_in(logits)

    def _record(self, number: int, module: nn.Module, inputs: object, output: Any) -> None:
        if self._routed:
            self._routed[number] = output[self._recorder.index] if isinstance(output, tuple) else output


def _stand_in(recorder: OutputRecorder) -> nn.Module:
    """A router without weights, which returns what it is given."""
    router: nn.Module = recorder.target_class.__new__(recorder.target_class)
    nn.Module.__init__(router)
    router.forward = lambda logits: (*[None] * recorder.index, logits)
    return router


def _recorder(model: PreTrainedModel) -> OutputRecorder:
    """The declaration by which transformers records the routers."""
    for module in model.modules():
        declared = getattr(module, "_can_record_outputs", None) or {}
        if isinstance(module, PreTrainedModel) and isinstance(recorder := declared.get(_OUTPUT), OutputRecorder):
            return recorder
    raise UnsupportedModelError(
        f"model type {model.config.model_type}",
        found=f"{_OPTION}: true, and no routers that transformers records",
        expected="routers whose outputs the model's class declares",
        remedy=f"set {_OPTION} to false in config.json: the loss is then without that of the routers",
    )
