"""The workers of a run, as one of them sees them."""

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

from zo2core.errors import NonFiniteLossError, OptionError, WorkerError, reason
from zo2core.io.shared_memory import SharedMemory
from zo2core.journal import Journal
from zo2core.protocols import NoiseGenerator
from zo2core.types import Batch, BlockLayout, Evaluation
from zo2core.workers.exchange import TIMEOUT, Exchange, TCPStore, silent
from zo2core.workers.journal_sync import require_agreement, sync_journals
from zo2core.workers.rendezvous import AnnouncedInFile, AnnouncedInStore, gather_workers, join_workers
from zo2core.workers.report import Report, batch_digest, combined, context_of, is_finite, require_same_context
from zo2core.workers.seal import Seal, require_key
from zo2core.workers.shards import Shard, Split, choose_split, evaluations_apart, require_split

T = TypeVar("T")


class Plan(NamedTuple):
    """How one step is shared out."""

    split: Split
    unit: int  # evaluations that stay together
    shard: Shard  # of this worker

    @classmethod
    def alone(cls, evaluations: int) -> Plan:
        """All of a step of so many evaluations, for one worker."""
        return cls(Split(1, 1), 1, Shard(range(evaluations)))

    def without_shard(self) -> Plan:
        """The same, with nothing for this worker to do."""
        return self._replace(shard=self.shard._replace(evaluations=range(0)))


class Gathered(NamedTuple):
    """What came of a step."""

    evaluations: tuple[Evaluation, ...]  # those that somebody's losses are there for
    losses: list[torch.Tensor]  # of these, 0-d, on the CPU
    ranks: tuple[int, ...]  # whose losses they are made of; none in a run of one worker


class Workers:
    """Takes part in a run as one of several workers, each with the whole model, its own journal and equal rows.

    A step's losses are shared out by its directions, its rows, or both; each worker tells the others its losses, and all
    make the same record of them. Journals are byte for byte the same on all workers, and so are weights bit for bit, where
    noise and kernels give the same numbers: with counter-based noise on machines of any kind.

    By directions, every loss is what one worker alone would compute, so the run is bit for bit that of one worker (of one
    worker on a GPU up to the rounding of the losses' difference, which is taken on the CPU here). By rows, losses are means
    of means, summed in double precision in the order of ranks: they differ from one worker's, and from those of another
    number of workers, by the order of summation only.

    Args:
        exchange: With the others.
        split: "directions", "rows", both as "2x3" (two groups for directions, three workers each for rows), or "auto": the
            one in which the busiest worker has the least to do, chosen for each step.
        deadline: Seconds that a step waits for slower workers once rank 0 is done. What comes later, or is not finite, does
            not count: the record says whose losses it is made of. None waits for all.

    Raises:
        OptionError: if an option is out of its range.
    """

    def __init__(self, exchange: Exchange, *, split: str = "auto", deadline: float | None = None) -> None:
        require_split(split)
        if deadline is not None and not 0 <= deadline < float("inf"):
            raise OptionError("deadline", found=repr(deadline), expected="seconds, at least 0", remedy="leave it out")
        self._exchange = exchange
        self._asked = split
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
        """Workers whose store the caller opened.

        Args:
            rank: Rank of this worker, counted from 0.
            size: Workers.
            store: A client of its own for this worker; the server in the process of rank 0. None for a worker alone.
            key: Secret of the run, the same for all workers and new for each start: 16 bytes at least. Messages of those
                who do not have it are refused. Only a worker alone may leave it out.
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
        """The workers that ``torchrun`` started, by what it put into the environment.

        Where all of them are on one host, their store listens on its loopback address alone.

        Args:
            key: Secret of the run, the same for all workers: 16 bytes at least. None takes a random one that the workers of
                one host leave each other in a file of this user; several hosts need a key.
            split: As in the constructor.
            deadline: As in the constructor.
            timeout: Seconds that a worker waits for the others.

        Raises:
            OptionError: if this process was not started by ``torchrun``, if an option is out of its range, or if workers on
                several hosts have no key.
            WorkerError: if the others are not there in time, or have another key.
        """
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise OptionError(
                "RANK",
                found="nothing in the environment",
                expected="what torchrun says there",
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
                meeting, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
                announcement, host = AnnouncedInStore(meeting, timeout), os.environ["MASTER_ADDR"]
            if rank == 0:
                store, seal = gather_workers(announcement, host, size, key, timeout)
            else:
                store, seal = join_workers(announcement, rank, key, timeout)
        except DistError as error:
            raise silent(0, timeout, error) from error
        return cls(Exchange(store, rank, size, seal, timeout=timeout), split=split, deadline=deadline)

    @property
    def rank(self) -> int:
        """Rank of this worker, counted from 0."""
        return self._exchange.rank

    @property
    def size(self) -> int:
        """Workers."""
        return self._exchange.size

    def neighbours(self) -> tuple[int, ...]:
        """Ranks of those on this host, this worker among them; all workers ask at the same time."""
        hosts = self._exchange.all_gather("hosts", {"host": _host()})
        return tuple(rank for rank, own in hosts.items() if own["host"] == hosts[self.rank]["host"])

    def shared_memory(self, nbytes: int) -> SharedMemory:
        """Memory that the workers of this host have together; all workers ask for it at the same time.

        Raises:
            WorkerError: if it cannot be made or reached.
        """
        first, made, refused = self.neighbours()[0], None, None
        try:
            made = SharedMemory.made(nbytes) if first == self.rank else None
        except OSError as error:
            refused = reason(error)
        own = {"process": os.getpid(), "descriptor": None if made is None else made.descriptor, "refused": refused}
        of_first = self._exchange.all_gather("memory", own)[first]
        try:
            if of_first["refused"] is not None:
                raise OSError(of_first["refused"])
            process, descriptor = of_first["process"], of_first["descriptor"]
            memory = SharedMemory.reached(process, descriptor, nbytes) if made is None else made
        except OSError as error:
            raise WorkerError(
                f"worker {first}",
                found=f"memory that cannot be shared ({reason(error)})",
                expected=f"{nbytes} bytes for all workers of this host",
                remedy="let the workers of a host run as one user, and free memory",
            ) from error
        self.all_gather(None)  # the first one's descriptor has been used by all
        return memory

    def sync_journal(self, journal: Journal) -> None:
        """Bring this worker's journal in line with the longest one: the run goes on where that one ends.

        Raises:
            WorkerError: if a journal is of another run.
            JournalError: if a record cannot be written.
        """
        sync_journals(journal, self._exchange)

    def require_agreement(
        self, journal: Journal, noise: NoiseGenerator, layouts: Sequence[BlockLayout], device: torch.device
    ) -> None:
        """Refuse a journal that is not rank 0's, and noise that is not.

        Args:
            journal: Journal of the run.
            noise: Noise of the run, as this machine draws it.
            layouts: Layouts of the model.
            device: Device that this worker computes on.

        Raises:
            JournalError: if the headers differ; each difference is spelled out.
            WorkerError: if the steps or the noise do.
        """
        require_agreement(journal, noise, layouts, device, self._exchange)

    def all_gather(self, value: Any) -> list[Any]:
        """Say something and hear what all say.

        Args:
            value: A JSON value; numbers keep all their bits.

        Returns:
            Values in the order of ranks, the same on all workers.

        Raises:
            WorkerError: if a worker leaves, is silent for too long, or is at something else.
        """
        return list(self._exchange.all_gather("values", value).values())

    def require_same(self, what: str, digest: int) -> None:
        """Refuse to go on where workers have different things.

        Args:
            what: In words.
            digest: Digest of what this worker has.

        Raises:
            WorkerError: naming the worker whose are not rank 0's.
        """
        said = self.all_gather([what, digest])
        for rank, own in enumerate(said):
            if own != said[0]:
                raise WorkerError(
                    f"worker {rank}",
                    found=f"other {what} than worker 0's",
                    expected="the same",
                    remedy="start all workers with the same command and the same rows",
                )

    def in_order(self, values: Sequence[T]) -> list[T]:
        """What the workers made of things that they took in turns, in the order of the things.

        Args:
            values: This worker's values, in the order of its items, which are those at rank, rank + size, ...

        Raises:
            WorkerError: if the workers did not take the same things.
        """
        of_ranks = self.all_gather(list(values))
        count = sum(map(len, of_ranks))
        for rank, own in enumerate(of_ranks):
            if len(own) != len(range(rank, count, self.size)):
                raise WorkerError(
                    f"worker {rank}",
                    found=f"{len(own)} results of {count}",
                    expected=f"{len(range(rank, count, self.size))}, every {self.size}th",
                    remedy="start all workers with the same rows",
                )
        return [of_ranks[place % self.size][place // self.size] for place in range(count)]

    def plan(self, evaluations: Sequence[Evaluation], rows: int | None) -> Plan:
        """Share a step out.

        Args:
            evaluations: Evaluations of the step.
            rows: Rows of the batch; None where they cannot be sharded.

        Raises:
            OptionError: if some worker would have nothing to do, or directions cannot be left out and there is a deadline.
        """
        unit = evaluations_apart(evaluations, whole=self._deadline is not None)
        split = choose_split(self._asked, self.size, len(evaluations) // unit, rows)
        return Plan(split, unit, split.shard(self.rank, len(evaluations), unit))

    @property
    def has_deadline(self) -> bool:
        """Whether a step goes on without slow workers."""
        return self._deadline is not None

    @property
    def is_decided(self) -> bool:
        """Whether the present step has gone on without this worker: there is no use in making its share."""
        return self.has_deadline and self._exchange.is_decided

    def digest(self, batches: Sequence[Batch]) -> int:
        """A digest of batches, to compare with other workers'.

        Raises:
            BatchError: if one of them holds something else than tensors.
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
        """Send the losses of this worker's share, and gather those of all.

        Args:
            plan: Plan of the step.
            evaluations: All evaluations of the step.
            losses: Losses of this worker's shard, 0-d; none if they were not made, since the step has been decided.
            tokens: Labelled ones of the share's rows.
            journal: Journal of the run.
            batch: Digest of the batch; None where it is not known.

        Raises:
            WorkerError: if a worker is silent, or works on another step.
            NonFiniteLossError: if there is a deadline, and no worker's losses count.
        """
        split, unit, _ = plan
        context = context_of(journal.checksum, evaluations, batch, split)
        own = Report.of(losses, tokens=tokens, context=context)
        counts = is_finite if self.has_deadline else _always
        payloads = self._exchange.gather(own.packed(), "losses", deadline=self._deadline, counts=counts)
        reports = {rank: Report.unpacked(payload, rank) for rank, payload in payloads.items()}
        require_same_context(reports, context)
        by_place = combined(reports, split, len(evaluations), unit)
        if not by_place:
            raise NonFiniteLossError(
                f"step {len(journal.updates)}",
                found="no loss of any worker that is finite and came in time",
                expected="one worker's at least",
                remedy="lower `lr` or `zo_eps`, or allow more time; no step was taken",
            )
        made = tuple(evaluations[place] for place in by_place)
        return Gathered(made, list(by_place.values()), tuple(reports) if self.size > 1 else ())

    def close(self, why: str | None = None) -> None:
        """Leave. May be called twice.

        Args:
            why: What went wrong here, for the others; None: nothing did, and all others leave as well now.
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
    """What processes have in common that can share memory: a running system, and a view of its processes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(8)
