"""The engine of first-order steps: a runner that takes gradients over the stream of blocks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zo2core.build import RunOptions, build
from zo2core.engine.adapter_runner import AdapterRunner
from zo2core.errors import OptionError
from zo2core.methods.backprop import Backprop, OptimizerFactory
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import Device, DifferentiableModel, Forward
from zo2core.sweep.gradient_memory import GradientMemory
from zo2core.sweep.gradient_visitor import GradientVisits
from zo2core.sweep.input_file import InputFile
from zo2core.sweep.input_offload import InputOffload
from zo2core.sweep.kept_inputs import KeptInputs
from zo2core.sweep.memory_limit import MemoryLimit
from zo2core.sweep.trained_parameters import TrainedParameters
from zo2core.types import Batch, GradientStepResult

TRAINED_COPIES = 4  # parameters, gradients, and two moments, as AdamW has them: no common optimizer keeps more


class BackpropEngine(AdapterRunner):
    """First-order fine-tuning, segment by segment, of parameters that stay in memory, over a base that is only read.

    A step passes the blocks forward and back: each is read at most twice, and nothing is written. Losses, gradients and
    parameters are those of ``torch.autograd`` and the same optimizer on the whole model, bit for bit.

    Args:
        model: Cut into embedding, blocks and head, with an adapter: its parameters are trained, all others frozen.
        optimizer: Called with the trained parameters, in registration order; returns what has the interface of
            ``torch.optim.Optimizer``: ``partial(torch.optim.AdamW, lr=2e-4)``. None for a training loop of your own, which
            calls ``gradients`` and changes ``parameters`` itself.
        clip: Largest 2-norm of all gradients together; None does not clip.
        spill: Directory of a temporary file, for the inputs of blocks that have no room in memory between a step's forward
            and backward. None: the system's directory for temporary files. On a GPU they are in host memory instead.
        device, memory, micro_batch_size, overlap, trace: as for ``Replayer``.

    Raises:
        OptionError: if the model's blocks are trained themselves, the optimizer wants a closure, or an option is out of its
            range.
        ZO2Error: as ``Replayer`` says.
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
    ) -> None:
        options = RunOptions(
            device=device,
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            overlap=overlap,
            trained_copies=TRAINED_COPIES,
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
        """Build the parts of the run that the options name, and the method."""
        if not isinstance(model, DifferentiableModel):
            raise OptionError(
                "model",
                found=f"a {type(model).__name__}, which has no `leaves`",
                expected="a DifferentiableModel",
                remedy="add the method, or use ZOEngine",
            )
        parts = build(model, None, options)
        super().__init__(model, parts)
        device, timeline = parts.device, parts.timeline
        inputs = KeptInputs(InputFile(Path(spill), timeline) if device.in_place else InputOffload(device, timeline))
        parts.opened.callback(inputs.close)
        try:
            self._method = Backprop(
                optimizer,
                clip=clip,
                sweeps=self,
                model=model,
                trained=self._trained,
                visits=GradientVisits(
                    layouts=model.layouts,
                    present=self._present_weights,
                    trained=self._trained,
                    leaves=_trained_leaves(model, self._trained),
                    weights=parts.work_buffer.bound,
                    inputs=inputs,
                    limit=MemoryLimit(parts.host_limit if device.in_place else None),
                    streams=parts.device.streams,
                    timeline=parts.timeline,
                ),
                micro_batch_size=options.micro_batch_size,
                commit=self._commit,
                memory=GradientMemory(room=parts.activation_bytes, spare=parts.spare_bytes),
            )
        except BaseException:
            self._close_refused()
            raise

    @property
    def optimizer(self) -> Any:
        """What the factory returned: for schedules, and to look at. The engine calls its ``step``."""
        return self._method.optimizer

    @property
    def version(self) -> int:
        """Steps taken so far."""
        return self.steps

    @property
    def steps(self) -> int:
        """Steps taken so far, those before a ``load_state_dict`` among them."""
        return self._method.steps

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None = None) -> GradientStepResult:
        """Take one first-order step: one sweep forward and back, then one step of the optimizer.

        Args:
            batch: What the forward takes; for the model's own, with labels. Several are accumulated and count as one batch:
                the loss is the mean over the labelled tokens of all. All pass a block before the next block comes.
            forward: Ends in a number that ``torch.autograd`` can differentiate; by default the model itself, which ends in
                its loss.

        Returns:
            The step's report.

        Raises:
            BatchError: if the model cannot take the batch.
            NonFiniteLossError: if the loss or a gradient is not finite.
            OptionError: if the loss has no gradient, or the model's blocks cannot be differentiated one at a time.
            CheckpointError: if a block cannot be read.
            ScratchError: if inputs of blocks have no room in memory, and cannot be written to disk.
            BusyError, ClosedError: during an iteration over ``parameters_now``, or after ``close``.
            In all these cases the step was not taken.
        """
        self._use.require_open()
        if self.optimizer is None:
            raise OptionError(
                "optimizer",
                found="None, and a call of step",
                expected="an optimizer, whose step it is",
                remedy="pass one to the engine, or call gradients and then your optimizer's step",
            )
        self._begin_step()
        return self._method.step(batch, forward)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by name, in registration order, on the device. Change them in place, as optimizers do."""
        return MappingProxyType(self._trained.parameters)

    def gradients(self, batch: Batch | Sequence[Batch], forward: Forward | None = None) -> float:
        """Add the gradients of a batch's loss to ``grad`` of the parameters, as ``loss.backward()`` does.

        With an optimizer of your own: ``engine.gradients(batch)``, ``optimizer.step()``, ``optimizer.zero_grad()``.

        Args:
            batch: As for ``step``.
            forward: As for ``step``.

        Returns:
            The loss.

        Raises:
            ZO2Error: as ``step`` says, but for a loss that is not finite, which is returned. All gradients are gone then.
        """
        self._use.require_open()
        try:
            return self._method.gradients(batch, forward)
        except BaseException:
            self._trained.clear_gradients()
            raise

    def _begin_step(self) -> None:
        """Called before a step begins."""

    def _commit(self, loss: float, norm: float) -> None:
        """Called before the optimizer changes the parameters; what it raises refuses the step."""

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on besides the base: a copy of the parameters, the optimizer's state, and the steps.

        ``load_state_dict`` of another engine of the same model and optimizer goes on with the same bits.
        """
        parameters = {name: value.detach().cpu().clone() for name, value in self._trained.parameters.items()}
        return {
            "steps": self.steps,
            "parameters": parameters,
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned.

        Args:
            state: State of an engine of the same model and the same optimizer.

        Raises:
            CheckpointError: if it is of other parameters; nothing was changed then.
        """
        self.require_parameters(state["parameters"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.load_parameters(state["parameters"])
        self._method.steps = state["steps"]


def _trained_leaves(model: DifferentiableModel, trained: TrainedParameters) -> list[dict[str, torch.Tensor]]:
    """For each segment, the tensors that its modules read trained parameters from; gradients are taken for them."""
    leaves = []
    for index in range(len(model.layouts)):
        own = {name: leaf for name, leaf in model.leaves(index).items() if name in trained.parameters}
        leaves.append({name: leaf.requires_grad_() for name, leaf in own.items()})
    return leaves
