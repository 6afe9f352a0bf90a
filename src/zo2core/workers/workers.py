"""The workers of a run, from the view of one of them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from zo2core.checkpoint import Snapshot, Snapshots
from zo2core.errors import NonFiniteLossError, OptionError, WorkerError, reason
from zo2core.io.shared_memory import SharedMemory
from zo2core.journal import Journal
from zo2core.protocols import NoiseGenerator
from zo2core.ranges import require_number
from zo2core.types import Batch, BlockLayout, Evaluation
from zo2core.workers.exchange import TIMEOUT, Exchange, TCPStore, silent_worker
from zo2core.workers.journal_sync import require_agreement, sync_journals
from zo2core.workers.rendezvous import AnnouncedInFile, AnnouncedInStore, gather_workers, join_workers
from zo2core.workers.report import Report, batch_digest, combined, context_of, is_finite, require_same_context
from zo2core.workers.seal import Seal, require_key
from zo2core.workers.shards import Shard, Split, choose_split, evaluations_apart, require_split
from zo2core.workers.snapshot_sync import sync_snapshots
from zo2core.workers.tensor_exchange import TensorExchange

T = TypeVar("T")


class Plan(NamedTuple):
    """How one step is sharded."""

    split: Split
    unit: int  # number of consecutive evaluations that stay together
    shard: Shard  # shard of this worker

    @classmethod
    def alone(cls, evaluations: int) -> Plan:
        """The plan of a single worker, for a step of ``evaluations`` evaluations."""
        return cls(Split(1, 1), 1, Shard(range(evaluations)))

    def without_shard(self) -> Plan:
        """The same plan with an empty shard for this worker."""
        return self._replace(shard=self.shard._replace(evaluations=range(0)))


class Gathered(NamedTuple):
    """The losses of a step."""

    evaluations: tuple[Evaluation, ...]  # evaluations that have losses
    losses: list[torch.Tensor]  # their losses, 0-d, on the CPU
    ranks: tuple[int, ...]  # workers whose losses were used; empty in a run of one worker


class Workers:
    """One of several workers of a run, each with the whole model, its own journal and the same rows.

    The evaluations of a step are sharded by directions, by rows, or both; the workers gather all losses and write the same
    record. Journals are byte for byte the same on all workers, and so are weights bit for bit, where noise and kernels give
    the same numbers: with counter-based noise on machines of any kind.

    Sharding by directions gives bit for bit the run of a single worker (of one on a GPU up to the rounding of the losses'
    difference, which is taken on the CPU here). Sharding by rows, losses are means of means, summed in double precision in
    the order of ranks: they differ between numbers of workers by the order of summation only.

    Args:
        exchange: All-gathers with the other workers.
        split: "directions", "rows", both as "2x3" (two groups for directions, three workers each for rows), or "auto": the
            split in which the busiest worker has the least to compute, chosen for each step.
        deadline: Seconds that a step waits for slower workers once rank 0 is done. Losses that arrive later or are not
            finite are left out, and the record lists the workers whose losses were used. None waits for all.

    Raises:
        OptionError: if an option is out of its range.
    """

    def __init__(self, exchange: Exchange, *, split: str = "auto", deadline: float | None = None) -> None:
        require_split(split)
        if deadline is not None:
            require_number("deadline", deadline, least=0, remedy="pass such a number of seconds, or leave it out")
        self._exchange = exchange
        self.split = split
        self._deadline = deadline

    @classmethod
    def joined(
        cls,
        *,
        rank: int,
        size: int,
        store: TCPStore | None,
        key: bytes | None = None,
        split: str = "auto",
        deadline: float | None = None,
        timeout: float = TIMEOUT,
    ) -> Self:
        """Workers that use a store which the caller opened.

        Args:
            rank: Rank of this worker, counted from 0.
            size: Number of workers.
            store: A client that only this worker uses; the server runs in the process of rank 0. None for a single worker.
            key: Secret of the run, at least 16 bytes, the same on all workers and new for each start. Messages that are not
                sealed with it are refused. Only a single worker may leave it out.
            split: As in the constructor.
            deadline: As in the constructor.
            timeout: Seconds that a worker waits for the others.

        Raises:
            OptionError: if an option is out of its range, or several workers have no key.
        """
        if key is not None or size > 1:
            require_key(key)
        return cls(Exchange(store, rank, size, Seal(key or b""), timeout=timeout), split=split, deadline=deadline)

    @classmethod
    def from_torchrun(
        cls, *, key: bytes | None = None, split: str = "auto", deadline: float | None = None, timeout: float = TIMEOUT
    ) -> Self:
        """The workers that ``torchrun`` started, read from its environment variables.

        Where all of them run on one host, their store listens on the loopback address alone.

        Args:
            key: Secret of the run, at least 16 bytes, the same on all workers. None takes a random key, which the workers
                of one host pass on in a file that only this user can read; several hosts need a key.
            split: As in the constructor.
            deadline: As in the constructor.
            timeout: Seconds that a worker waits for the others.

        Raises:
            OptionError: if this process was not started by ``torchrun``, if an option is out of its range, or if workers on
                several hosts have no key.
            WorkerError: if the other workers do not connect in time, or have another key.
        """
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise OptionError(
                "RANK",
                found="nothing in the environment",
                expected="the variables that torchrun sets",
                remedy="start with torchrun --nproc-per-node N -m zo2adapters ...",
            )
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        is_one_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == size
        if key is not None or not is_one_host:
            require_key(key)
        if size == 1:
            return cls(Exchange(None, 0, 1, Seal(b"")), split=split, deadline=deadline)
        try:
            announcement: AnnouncedInFile | AnnouncedInStore
            if is_one_host:
                announcement, host = AnnouncedInFile.of_start(), None
            else:
                launcher_store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
                announcement, host = AnnouncedInStore(launcher_store, timeout), os.environ["MASTER_ADDR"]
            if rank == 0:
                store, seal = gather_workers(announcement, host, size, key, timeout)
            else:
                store, seal = join_workers(announcement, rank, key, timeout)
        except DistError as error:
            raise silent_worker(0, timeout, error) from error
        return cls(Exchange(store, rank, size, seal, timeout=timeout), split=split, deadline=deadline)

    @property
    def rank(self) -> int:
        """Rank of this worker, counted from 0."""
        return self._exchange.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._exchange.size

    def neighbours(self) -> tuple[int, ...]:
        """Ranks of the workers on this host, with this worker; a collective call, which all workers make together."""
        hosts = self._exchange.all_gather("hosts", {"host": _host()})
        return tuple(rank for rank, value in hosts.items() if value == hosts[self.rank])

    def shared_memory(self, nbytes: int) -> SharedMemory:
        """Memory shared by the workers of this host; a collective call, which all workers make together.

        Raises:
            WorkerError: if the memory cannot be created or mapped.
        """
        first, created, refused = self.neighbours()[0], None, None
        try:
            created = SharedMemory.create(nbytes) if first == self.rank else None
        except OSError as error:
            refused = reason(error)
        local = {"process": os.getpid(), "descriptor": None if created is None else created.descriptor, "refused": refused}
        source = self._exchange.all_gather("memory", local)[first]
        try:
            if source["refused"] is not None:
                raise OSError(source["refused"])
            process, descriptor = source["process"], source["descriptor"]
            memory = SharedMemory.attach(process, descriptor, nbytes) if created is None else created
        except OSError as error:
            raise WorkerError(
                f"worker {first}",
                found=f"memory that cannot be shared ({reason(error)})",
                expected=f"{nbytes} bytes for all workers of this host",
                remedy="let the workers of a host run as one user, and free memory",
            ) from error
        self.all_gather(None)  # returns once all workers have used the descriptor
        return memory

    def tensors(self) -> TensorExchange:
        """Connect to the other workers for all-gathers of tensors; a collective call, which all workers make together.

        Raises:
            WorkerError: if a worker cannot be reached.
        """
        return TensorExchange(self._exchange, is_one_host=len(self.neighbours()) == self.size)

    def sync_snapshots(self, snapshots: Snapshots) -> Snapshot | None:
        """Return the newest snapshot that a worker of the run has, which all workers then have.

        Raises:
            CheckpointError: if this worker has snapshots, but all are damaged.
            OutputError: if another worker's snapshot cannot be written.
        """
        return sync_snapshots(snapshots, self._exchange)

    def sync_journal(self, journal: Journal) -> None:
        """Append the steps that the longest journal has and this worker's lacks: the run continues where that one ends.

        Raises:
            WorkerError: if a journal belongs to another run.
            JournalError: if a record cannot be written.
        """
        sync_journals(journal, self._exchange)

    def require_agreement(
        self, journal: Journal, noise: NoiseGenerator, layouts: Sequence[BlockLayout], device: torch.device
    ) -> None:
        """Refuse a journal or noise that differs from rank 0's.

        Args:
            journal: Journal of the run.
            noise: Noise of the run, as this machine draws it.
            layouts: The model's segments in visiting order.
            device: Device that this worker computes on.

        Raises:
            JournalError: if the headers differ, with each difference.
            WorkerError: if the steps or the noise differ.
        """
        require_agreement(journal, noise, layouts, device, self._exchange)

    def all_gather(self, value: Any) -> list[Any]:
        """Send a value and return the values of all workers.

        Args:
            value: A JSON value; numbers keep all their bits.

        Returns:
            Values in the order of ranks, the same on all workers.

        Raises:
            WorkerError: if a worker leaves, sends nothing for too long, or makes another call.
        """
        return list(self._exchange.all_gather("values", value).values())

    def require_same(self, what: str, digest: int) -> None:
        """Refuse to go on where workers have different data.

        Args:
            what: Name of the data, for the error.
            digest: Digest of this worker's data.

        Raises:
            WorkerError: naming a worker whose digest differs from rank 0's.
        """
        digests = self.all_gather([what, digest])
        for rank, value in enumerate(digests):
            if value != digests[0]:
                raise WorkerError(
                    f"worker {rank}",
                    found=f"other {what} than worker 0's",
                    expected="the same",
                    remedy="start all workers with the same command and the same rows",
                )

    def in_order(self, values: Sequence[T]) -> list[T]:
        """Gather the results of items that were sharded round-robin, in the order of the items.

        Args:
            values: Results of this worker's items, which are those at the indices rank, rank + size, ...

        Raises:
            WorkerError: if the workers did not compute the same list of items.
        """
        gathered = self.all_gather(list(values))
        count = sum(map(len, gathered))
        for rank, results in enumerate(gathered):
            if len(results) != len(range(rank, count, self.size)):
                raise WorkerError(
                    f"worker {rank}",
                    found=f"{len(results)} results of {count}",
                    expected=f"{len(range(rank, count, self.size))}, every {self.size}th",
                    remedy="start all workers with the same rows",
                )
        return [gathered[index % self.size][index // self.size] for index in range(count)]

    def plan(self, evaluations: Sequence[Evaluation], rows: int | None) -> Plan:
        """Shard a step.

        Args:
            evaluations: Evaluations of the step.
            rows: Rows of the batch; None where they cannot be sharded.

        Raises:
            OptionError: if some worker would have nothing to compute, or the deadline needs another estimator.
        """
        unit = evaluations_apart(evaluations, whole=self._deadline is not None)
        split = choose_split(self.split, self.size, len(evaluations) // unit, rows)
        return Plan(split, unit, split.shard(self.rank, len(evaluations), unit))

    @property
    def has_deadline(self) -> bool:
        """Whether a step continues without slow workers."""
        return self._deadline is not None

    @property
    def is_decided(self) -> bool:
        """Whether the present step has ended without this worker, whose losses are then of no use."""
        return self.has_deadline and self._exchange.is_decided

    def digest(self, batches: Sequence[Batch]) -> int:
        """A digest of batches, to compare among workers.

        Raises:
            BatchError: if a batch holds something other than tensors.
        """
        return batch_digest(batches)

    def gathered(
        self,
        plan: Plan,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        *,
        tokens: int,
        journal: Journal,
        batch: int | None,
    ) -> Gathered:
        """Send the losses of this worker's shard and gather those of all workers.

        Args:
            plan: Plan of the step.
            evaluations: All evaluations of the step.
            losses: Losses of this worker's shard, 0-d; empty if it did not compute them, since the step was decided.
            tokens: Labelled tokens of the shard's rows.
            journal: Journal of the run.
            batch: Digest of the batch; None where it is not known.

        Raises:
            WorkerError: if a worker sends nothing, or works on another step.
            NonFiniteLossError: if there is a deadline, and all losses were left out.
        """
        split, unit, _ = plan
        context = context_of(journal.checksum, evaluations, batch, split)
        report = Report.of(losses, tokens=tokens, context=context)
        accepts = is_finite if self.has_deadline else _always
        payloads = self._exchange.gather(report.packed(), "losses", deadline=self._deadline, accepts=accepts)
        reports = {rank: Report.unpacked(payload, rank) for rank, payload in payloads.items()}
        require_same_context(reports, context)
        by_index = combined(reports, split, len(evaluations), unit)
        if not by_index:
            raise NonFiniteLossError(
                f"step {len(journal.updates)}",
                found="no finite loss that arrived in time",
                expected="the losses of at least one worker",
                remedy="lower `lr` or `zo_eps`, or allow more time; no step was taken",
            )
        used = tuple(evaluations[index] for index in by_index)
        return Gathered(used, list(by_index.values()), tuple(reports) if self.size > 1 else ())

    def close(self, why: str | None = None) -> None:
        """Leave the run. May be called twice.

        Args:
            why: The error that ended this worker, for the others; None if there was none and all others leave as well.
        """
        self._exchange.close(why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(None if kind is None else f"{kind.__name__}: {error}")


def _always(payload: bytes) -> bool:
    return True


def _host() -> str:
    """Identifies the processes that can share memory: those of one boot of a machine in one process namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(8)
