"""The replayer: evaluations and exports of a model that is never whole in its device's memory."""

from __future__ import annotations

from pathlib import Path

from zo2core.build import RunOptions, build
from zo2core.engine.runner import Runner
from zo2core.journal import Journal
from zo2core.planning import MemoryPolicy, Replay
from zo2core.profiling import Trace
from zo2core.protocols import BlockModel, Device, NoiseGenerator
from zo2core.workers import Workers


class Replayer(Runner):
    """A model at the version that a journal ends with: evaluated, looked at and exported, never trained.

    What the caller passes stays the caller's; what the replayer opens (paths, devices by name) it closes, and with it the
    model's checkpoint. One replayer or engine at a time uses a model: the last one made has bound its modules.

    Args:
        model: Cut into embedding, blocks and head; of an adapter, or your own.
        journal: The updates to replay: a journal that was begun, or the path of one. None is the base checkpoint as it is.
        device: "cpu", "cuda", "cuda:N" or a ``Device``.
        noise: Draws z; by default the generator that the journal was begun with.
        memory: How much memory the process may take.
        micro_batch_size: Rows of the micro-batches into which a batch is split; None: batches run whole.
        overlap: False does one thing after the other, to compare with; the bits are the same.
        replay: Who replays for a device with memory of its own: itself, "device", or "host": then nothing comes back.
        trace: Takes down what every sweep did when: a trace, or the path of a new one.
        workers: Others that evaluate the same weights, and take batches in turns with this one; None: there are none.

    Raises:
        OptionError: if an option is out of its range, or nothing would heed it.
        MemoryBudgetError: if not even the smallest plan fits into the memory there is.
        JournalError: if the journal belongs to another base checkpoint, another model or other noise.
        CheckpointError: if the checkpoint cannot be read.
        DeviceError, OutputError: if the device is not there or too small, or the trace cannot be made.
    """

    def __init__(
        self,
        model: BlockModel,
        journal: Journal | Path | str | None = None,
        *,
        device: Device | str = "cpu",
        noise: NoiseGenerator | None = None,
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        micro_batch_size: int | None = None,
        overlap: bool = True,
        replay: Replay = "auto",
        trace: Trace | Path | str | None = None,
        workers: Workers | None = None,
    ) -> None:
        options = RunOptions(
            journal=journal,
            device=device,
            noise=noise,
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            overlap=overlap,
            replay=replay,
            workers=workers,
        )
        super().__init__(model, build(model, None, options))
