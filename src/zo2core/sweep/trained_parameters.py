"""The parameters that an optimizer changes: a few, in memory for good. Their segments take the values when visited.

The optimizer's parameters are the only place where present values are kept. A segment that owns some of them holds copies,
of the version that its bucket says; bringing it to the present version is copying again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zo2core.errors import OptionError
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import Forward, Store, Stores, Streams, TensorReader
from zo2core.sweep.activation_offload import ActivationOffload
from zo2core.sweep.update_loss import UpdateLoss
from zo2core.sweep.visitor import SegmentVisitor
from zo2core.sweep.visits import Groups
from zo2core.sweep.work_buffer import WorkBuffer
from zo2core.types import BlockLayout, Evaluation


class TrainedParameters:
    """Values, gradients, and the version that segments are brought to.

    Args:
        layouts: Segments in visiting order. Those that own trained parameters are resident.
        weights: What the values begin with.
        device: The device that values and gradients are on.

    Raises:
        OptionError: if a block owns a trained parameter, or nothing is trained.
        CheckpointError: if the values cannot be read.
    """

    def __init__(self, layouts: Sequence[BlockLayout], weights: TensorReader, device: torch.device) -> None:
        owned = [
            (index, place, spec) for index, layout in enumerate(layouts) for place, spec in enumerate(layout.parameters)
        ]
        trained = sorted((one for one in owned if not one[2].frozen), key=lambda one: one[2].index)
        in_blocks = [spec.name for index, _, spec in trained if not layouts[index].resident]
        if in_blocks or not trained:
            raise OptionError(
                "model",
                found=f"{in_blocks[0]}, a trained parameter of a block" if in_blocks else "no trained parameter",
                expected="trained parameters that stay in memory, beside blocks that are only read",
                remedy="open the model with an adapter, or train all parameters with ZOEngine",
            )
        self.version = 0  # of the segments' copies; another one for each sweep
        self.parameters: dict[str, nn.Parameter] = {}  # by name, in registration order
        self._owned: dict[int, list[tuple[int, nn.Parameter]]] = {}  # by segment: the place in its store, and the parameter
        for index, place, spec in trained:
            values = torch.empty(spec.shape, dtype=spec.dtype)
            weights.read_into(spec.name, values.view(-1))
            parameter = nn.Parameter(values.to(device))
            self.parameters[spec.name] = parameter
            self._owned.setdefault(index, []).append((place, parameter))

    def begin_sweep(self) -> None:
        """Have the segments' copies taken again: not every optimizer leaves a trace of having changed the values."""
        self.version += 1

    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment's copies to the present values.

        Returns:
            The version after; that before, of a segment that owns none.
        """
        if index not in self._owned or version == self.version:
            return version
        for place, parameter in self._owned[index]:
            store[place].copy_(parameter.detach().view(-1))
        return self.version

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add to a parameter's gradient, in its dtype, as ``torch.autograd`` accumulates."""
        parameter = self.parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad += gradient.to(parameter.dtype)

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None


class PresentWeights:
    """A perturber that perturbs nothing: it brings the present weights to where forwards read them.

    Args:
        trained: The values that change.
        buffer: Where forwards read weights.
    """

    def __init__(self, trained: TrainedParameters, buffer: WorkBuffer) -> None:
        self._trained = trained
        self._buffer = buffer

    @property
    def seeds(self) -> Collection[int]:
        """None: nothing is drawn."""
        return ()

    @property
    def version(self) -> int:
        """The present version."""
        return self._trained.version

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment's store to the present version. See the contract."""
        return self._trained.replay(index, stores[index], version)

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Bring frozen weights to the work buffer. See the contract."""
        self._buffer.load_frozen(index, stores)

    def perturb(self, index: int, stores: Stores, before: Evaluation | None, evaluation: Evaluation | None) -> None:
        """Bring trained weights to the work buffer. See the contract."""
        assert (before, evaluation) == (None, None), "nothing is perturbed"
        self._buffer.load(index, stores)

    def finish(self) -> None:
        """Do nothing: there is no second thread."""


@dataclass(frozen=True, kw_only=True)
class PresentVisits:
    """Makes visitors that run the present weights: those of evaluations, exports and flushes."""

    layouts: Sequence[BlockLayout]
    trained: TrainedParameters
    weights: PresentWeights
    activations: ActivationOffload
    streams: Streams
    timeline: Timeline
    update_loss: UpdateLoss

    def visitor(self, version: int, groups: Groups, forward: Forward) -> SegmentVisitor:
        """The visitor of one sweep. See the contract."""
        self.trained.begin_sweep()
        return SegmentVisitor(
            self.layouts,
            forward,
            self.weights,
            groups,
            activations=self.activations,
            streams=self.streams,
            timeline=self.timeline,
            update_loss=self.update_loss,
        )
