"""The engine of first-order steps: a runner that computes gradients one block at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zo2core.build import RunOptions, SharedSegments
from zo2core.engine.gradient_engine import GradientEngine
from zo2core.engine.present_runner import in_memory
from zo2core.methods.backprop import Backprop
from zo2core.methods.row_shards import AllRows, WorkerRows
from zo2core.optimizers import OptimizerFactory, copied_state, require_optimizer_state
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import Device, DifferentiableModel, Forward
from zo2core.sweep.gradient_memory import GradientMemory
from zo2core.sweep.trained_parameters import TrainedParameters
from zo2core.types import Batch
from zo2core.workers import Workers

TRAINED_COPIES = 4  # parameters, gradients, and two moments, as AdamW has them: no common optimizer keeps more


class BackpropEngine(GradientEngine[TrainedParameters]):
    """First-order fine-tuning, segment by segment, of parameters that stay in memory, with a base that is only read.

    A step is a sweep forward and backward: each block is read at most twice, and nothing is written. Losses, gradients and
    parameters are those of ``torch.autograd`` and the same optimizer on the whole model, bit for bit.

    Args:
        model: A model with an adapter, whose parameters are trained; all others are frozen.
        optimizer: Called with the trained parameters in registration order, returns an object with the interface of
            ``torch.optim.Optimizer``: ``partial(torch.optim.AdamW, lr=2e-4)``. None: for a custom training loop, which
            calls ``gradients`` and changes ``parameters`` itself.
        clip: Largest 2-norm of all gradients together; None does not clip.
        spill: Directory of a temporary file, for the inputs of blocks that have no room in memory between a step's forward
            and backward; with a GPU, neither in its memory nor in host memory. None: the system's directory for
            temporary files.
        device, memory, micro_batch_size, overlap, trace: As for ``Replayer``.
        workers: Processes that each compute the gradients of part of a step's rows; None: this process computes all.
        shared: As for ``ZOEngine``.

    Raises:
        OptionError: if a block owns a trained parameter, the optimizer needs a closure, or an option is out of its range.
        ZO2Error: as for ``Replayer``.
    """

    def __init__(
        self,
        model: DifferentiableModel,
        optimizer: OptimizerFactory | None,
        *,
        clip: float | None = None,
        device: Device | str = "cpu",
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        spill: Path | str | None = None,
        micro_batch_size: int | None = None,
        overlap: bool = True,
        trace: Trace | Path | str | None = None,
        workers: Workers | None = None,
        shared: SharedSegments | None = None,
    ) -> None:
        options = RunOptions(
            device=device,
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            overlap=overlap,
            trained_copies=trained_copies(workers),
            workers=workers,
            shared=shared,
        )
        self._open(model, optimizer, clip, options, tempfile.gettempdir() if spill is None else spill)

    def _open(
        self,
        model: DifferentiableModel,
        optimizer: OptimizerFactory | None,
        clip: float | None,
        options: RunOptions,
        spill: Path | str,
    ) -> None:
        """Build the parts of the run and the method."""
        super().__init__(model, options, in_memory, spill)
        self._factory = optimizer
        parts, trained = self._parts, self._trained
        with self._closed_if_refused():
            row_shards = AllRows() if parts.workers.size == 1 else WorkerRows(parts.workers, trained)
            self._method: Backprop = Backprop(
                optimizer,
                clip=clip,
                sweeps=self,
                model=model,
                trained=trained,
                visits=self._gradient_visits(_trained_leaves(model, trained)),
                row_shards=row_shards,
                micro_batch_size=options.micro_batch_size,
                commit=self._commit,
                memory=GradientMemory(budget=parts.activation_bytes, spare=parts.spare_bytes),
            )

    @property
    def optimizer(self) -> Any:
        """The optimizer that the factory returned, for learning rate schedules. The engine calls its ``step``."""
        return self._method.optimizer

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by name, in registration order, on the device. Only change them in place."""
        return MappingProxyType(self._trained.parameters)

    def gradients(self, batch: Batch | Sequence[Batch], forward: Forward | None = None) -> float:
        """Add the gradients of a batch's loss to ``grad`` of the parameters, as ``loss.backward()`` does.

        A custom training loop calls ``engine.gradients(batch)``, ``optimizer.step()`` and ``optimizer.zero_grad()``.

        Args:
            batch: As for ``step``.
            forward: As for ``step``.

        Returns:
            The loss.

        Raises:
            ZO2Error: as for ``step``, except that a loss that is not finite is returned. All gradients are cleared then.
        """
        self._use.require_open()
        try:
            return self._method.gradients(batch, forward)
        except BaseException:
            self._trained.clear_gradients()
            raise

    def _commit(self, loss: float, norm: float) -> None:
        """Record a step before the optimizer changes the parameters. If it raises an error, the step is not taken."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which later steps depend, as copies. See the base class."""
        parameters = {name: value.detach().cpu().clone() for name, value in self._trained.parameters.items()}
        return {
            "steps": self.steps,
            "parameters": parameters,
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a state. See the base class."""
        self._require_state(state)
        if self._factory is not None:
            require_optimizer_state(state["optimizer"], self._factory, list(self.parameters.values()))
            self.optimizer.load_state_dict(copied_state(state["optimizer"]))
        self.load_parameters(state["parameters"])
        self._method.steps = state["steps"]


def trained_copies(workers: Workers | None) -> int:
    """Copies of the trained parameters that a run keeps; several workers also have each other's gradients for a moment."""
    return TRAINED_COPIES + (0 if workers is None or workers.size == 1 else 1 + workers.size)


def _trained_leaves(model: DifferentiableModel, trained: TrainedParameters) -> list[dict[str, torch.Tensor]]:
    """Return the trained parameters of each segment's modules, by name, which then require gradients."""
    return [
        {name: leaf.requires_grad_() for name, leaf in model.leaves(index).items() if name in trained.parameters}
        for index in range(len(model.layouts))
    ]
