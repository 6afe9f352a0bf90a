"""How workers that ``torchrun`` started share a run: what a user may say of it, and what they have to agree on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zo2adapters.trainers.run_directory import OPTIONS
from zo2core import OptionError, Workers
from zo2core.errors import reason
from zo2core.io.durable import open_regular
from zo2core.planning.host_budget import free_memory, resident_memory

_SHARE = 0.9  # of the free memory

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # a command line is read without transformers
    from zo2adapters.trainers.options import Storage, TrainOptions


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How workers that torchrun started share the work."""

    split: str = "auto"
    """What workers share of a step: directions, rows, or both, as 2x3: two groups for directions, three workers each for
    rows. auto is what leaves the busiest worker the least to do. By directions every bit stays as it is."""
    step_deadline: float | None = None
    """Seconds that a step waits for slower workers once the first one is done. What comes later does not count, and the
    journal says whose losses a step is made of. By default it waits for all."""
    key_file: Path | None = None
    """File with a secret, the same for all workers, by which they know each other. Workers on several hosts need one; on one
    host they make a secret of their own for each start."""

    @contextmanager
    def workers(self) -> Iterator[Workers | None]:
        """The workers that this process is one of; None if nobody else works on the run.

        Raises:
            OptionError: if an option is out of its range, or there are no workers for it.
            WorkerError: if the others are not there in time.
        """
        if own_rank() is None:
            for option in fields(self):
                if getattr(self, option.name) != option.default:
                    raise OptionError(
                        option.name,
                        found=str(getattr(self, option.name)),
                        expected="none without other workers",
                        remedy="start with torchrun --nproc-per-node N -m zo2adapters ..., or leave it out",
                    )
            yield None
            return
        with Workers.from_torchrun(key=self._key(), split=self.split, deadline=self.step_deadline) as workers:
            yield workers

    def _key(self) -> bytes | None:
        if self.key_file is None:
            return None
        try:
            with open_regular(self.key_file) as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise OptionError(
                        "key_file",
                        found=f"{self.key_file}, which other users of this host may read or change",
                        expected="a file of this user alone",
                        remedy=f"chmod 600 {self.key_file}; if others could read it, make another key",
                    )
                return file.read()
        except OSError as error:
            raise OptionError(
                "key_file", found=f"{self.key_file}: {reason(error)}", expected="a readable file", remedy="check the path"
            ) from error


def own_rank() -> int | None:
    """The rank of this process among those that ``torchrun`` started; None if it did not start it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def is_first(workers: Workers | None) -> bool:
    """Whether this process is the one that speaks to the user, and writes what is written once."""
    return workers is None or workers.rank == 0


def own_directory(output: Path) -> Path:
    """Where this process keeps its journal: the run's directory, or one beside it for each worker but the host's first.

    The place among the workers of a host stays when hosts join or leave, which ranks do not.
    """
    place = int(os.environ.get("LOCAL_RANK", "0")) if own_rank() is not None else 0
    return output if place == 0 else output.with_name(f"{output.name}.worker-{place}")


def directory_to_resume(output: Path) -> Path:
    """The directory whose options are those of a run: a worker's own, or the run's where it has none yet."""
    own = own_directory(output)
    return own if (own / OPTIONS).exists() else output


def holds_run(output: Path) -> bool:
    """Whether a run has begun that this process can go on with, or join."""
    return (directory_to_resume(output) / OPTIONS).exists()


def own_trace(trace: Path | None, workers: Workers | None) -> Path | None:
    """Where a worker traces its sweeps: each has a file of its own."""
    if trace is None or is_first(workers):
        return trace
    assert workers is not None
    return trace.with_name(f"{trace.stem}.worker-{workers.rank}{trace.suffix}")


def require_same_steps(steps: int, workers: Workers | None) -> None:
    """Refuse another number of steps than the first worker's: it would wait for steps that nobody takes.

    Raises:
        OptionError: if it is.
    """
    agreed = steps if workers is None else workers.all_gather(steps)[0]
    if agreed != steps:
        raise OptionError(
            "steps", found=str(steps), expected=f"{agreed}, as the first worker has", remedy="give all workers the same"
        )


def alone_on(storage: Storage, workers: Workers | None) -> Storage:
    """Where a run lives that one of several workers makes alone: on its own device, with its part of what is free."""
    if workers is None:
        return storage
    neighbours, memory = len(workers.neighbours()), storage.memory
    if memory == "auto" and neighbours > 1:
        memory = str(resident_memory() + int(_SHARE * free_memory() / neighbours))
    return replace(storage, device=local_device(storage.device, workers), memory=memory)


def local_device(device: str, workers: Workers | None) -> str:
    """The device of this process: of several on a host, each has a GPU of its own."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if workers is not None and device == "cuda" else device


def device_kinds(device: str, workers: Workers | None) -> str:
    """The kinds of devices that a run is computed on, of all workers."""
    kind = device.partition(":")[0]
    return kind if workers is None else "+".join(sorted({*workers.all_gather(kind)}))


def settled_alike(
    options: TrainOptions, workers: Workers | None, opened: Callable[[TrainOptions], HFBlockModel]
) -> tuple[HFBlockModel, TrainOptions]:
    """Open the model, with what is chosen for a machine chosen by the first worker's.

    Args:
        options: Options of the run.
        workers: Others that work on it.
        opened: Opens the model.
    """
    if workers is not None and workers.rank > 0:
        [dtype, loss_chunk], *_ = workers.all_gather(None)
        model_options = replace(options.model_options, dtype=dtype)
        options = replace(options, model_options=model_options, batching=replace(options.batching, loss_chunk=loss_chunk))
    model = opened(options)
    options = options.settled(model)
    if workers is not None and workers.rank == 0:
        workers.all_gather([options.model_options.dtype, options.batching.loss_chunk])
    return model, options
