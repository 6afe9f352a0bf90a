"""The replayer: evaluations and exports of a model that need not fit into the device's memory."""

from __future__ import annotations

from pathlib import Path

from zo2core.build import RunOptions, SharedSegments, build
from zo2core.engine.runner import Runner
from zo2core.journal import Journal
from zo2core.planning import MemoryPolicy, Replay
from zo2core.profiling import Trace
from zo2core.protocols import BlockModel, Device, NoiseGenerator
from zo2core.workers import Workers


class Replayer(Runner):
    """Evaluates and exports a model with all updates of a journal, and never trains it.

    Objects that the caller passes stay the caller's. The replayer closes what it opens (paths, devices by name) and the
    model's checkpoint. One replayer or engine at a time uses a model.

    Args:
        model: A model that is divided into embedding, blocks and head.
        journal: The updates to replay: a journal of a run, or its path. None is the base checkpoint without updates.
        device: "cpu", "cuda", "cuda:N" or a ``Device``.
        noise: Draws z; None: the generator that the journal names.
        memory: Memory that the process may use.
        micro_batch_size: Rows of the micro-batches into which a batch is split; None does not split batches.
        overlap: Whether transfers and disk reads overlap with compute. The bits are the same without.
        replay: For a device with its own memory: "device" replays there, "host" on the host, without offloads; "auto"
            chooses.
        trace: Records the work of every sweep: a trace, or the path of a new one.
        workers: Workers that evaluate the same weights and divide the batches; None: a run of one process.
        shared: As for ``ZOEngine``.

    Raises:
        BusyError: if another engine or replayer that is open uses the model.
        OptionError: if an option is out of its range, or would have no effect.
        MemoryBudgetError: if not even the smallest plan fits into the memory.
        JournalError: if the journal belongs to another base checkpoint, another model or other noise.
        CheckpointError: if the checkpoint cannot be read.
        DeviceError, OutputError: if the device is missing or too small, or the trace cannot be written.
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
        shared: SharedSegments | None = None,
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
            shared=shared,
        )
        super().__init__(model, build(model, None, options))
