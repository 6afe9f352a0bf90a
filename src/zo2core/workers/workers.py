"""Data-parallel workers on ``torch.distributed``: each computes a shard of a step, and all combine
the results alike.

A shard is part of the evaluations, on part of the rows.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, NamedTuple, Self, TypeVar

import torch
import xxhash
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from zo2core.errors import ClosedError, OptionError, WorkerError
from zo2core.io.direct_file import byte_view
from zo2core.io.system_calls import loopback_interface
from zo2core.types import Batch, require_tensors


class Split(NamedTuple):
    """Groups of workers shard the evaluations of a step; the workers of a group shard the rows.

    Worker ``rank`` is in group ``rank // parts`` and has the rows of part ``rank % parts``.
    """

    groups: int
    parts: int

    def evaluations(self, rank: int, count: int) -> range:
        """Indices of a worker's evaluations in a step of so many."""
        group = rank // self.parts
        return range(group * count // self.groups, (group + 1) * count // self.groups)

    def rows(self, rank: int, count: int) -> slice:
        """A worker's rows of a batch of ``count`` rows: parts differ by one row at most."""
        part = rank % self.parts
        return slice(part * count // self.parts, (part + 1) * count // self.parts)


BLOCKS = "blocks"  # the split in which each worker has some of the model's blocks


def require_split(name: str) -> None:
    """Refuse a name that is not the name of a split."""
    if name not in ("auto", "rows", "directions", BLOCKS) and not re.fullmatch(
        r"[1-9]\d{0,5}x[1-9]\d{0,5}", name
    ):
        raise OptionError(
            "split",
            found=repr(name),
            expected=(
                "auto, rows, directions, or both as 2x3: two groups for directions, three workers "
                "each for rows; or blocks"
            ),
            remedy="pass one of these",
        )


def choose_split(name: str, size: int, evaluations: int, rows: int | None) -> Split:
    """The named split of a step among workers; for "auto", the one in which the busiest worker has
    the least to compute.

    Of equally good splits "auto" takes the one with the most groups: sharding directions leaves
    every bit of the result as it is, while losses over parts of the rows are summed in another
    order.
    """
    require_split(name)
    most_parts = 1 if rows is None else rows
    if name == "auto":
        splits = [
            Split(groups, size // groups) for groups in range(size, 0, -1) if size % groups == 0
        ]
    elif "x" in name:
        splits = [Split(*map(int, name.split("x")))]
    else:
        splits = [Split(size, 1) if name == "directions" else Split(1, size)]
    fitting = [
        split for split in splits if split.groups <= evaluations and split.parts <= most_parts
    ]
    if not fitting or fitting[0].groups * fitting[0].parts != size:
        row_count = "rows that cannot be sharded" if rows is None else f"{rows} rows"
        raise OptionError(
            "split",
            found=f"{name}, {size} workers for {evaluations} evaluations and {row_count}",
            expected="an evaluation and a row for every worker",
            remedy="start fewer workers, or use more queries or rows per step",
        )
    return min(
        fitting, key=lambda split: -(-evaluations // split.groups) * -(-most_parts // split.parts)
    )


class Report(NamedTuple):
    """A worker's losses, as JSON values."""

    # checksum over what all workers have to agree on: journal, evaluations, digest of the batch,
    # split
    context: int
    tokens: int  # labelled tokens of the worker's rows: the weight of its losses in means over rows
    dtype: str  # in which the model computed the losses; doubles hold all of their bits
    losses: list[float]  # one per evaluation of the worker's shard


def combined(reports: Sequence[Report], split: Split, evaluations: int) -> list[torch.Tensor]:
    """The losses of a step, 0-d, on the CPU."""
    parts: list[list[tuple[float, int]]] = [[] for _ in range(evaluations)]
    for rank, report in enumerate(reports):
        shard = split.evaluations(rank, evaluations)
        if report.context != reports[0].context:
            raise mismatch(
                rank,
                "losses of another journal, other directions or another batch",
                "losses of the same step",
            )
        if len(report.losses) != len(shard):
            raise mismatch(
                rank,
                f"{len(report.losses)} losses",
                f"{len(shard)}, one per evaluation of its shard",
            )
        if split.parts == 1 and report.dtype != reports[0].dtype:
            raise mismatch(rank, f"losses in {report.dtype}", f"{reports[0].dtype}, as worker 0's")
        for index, loss in zip(shard, report.losses, strict=True):
            parts[index].append((loss, report.tokens))
    if split.parts == 1:
        return [torch.tensor(loss, dtype=getattr(torch, reports[0].dtype)) for [(loss, _)] in parts]
    return [torch.tensor(_mean(of_evaluation), dtype=torch.float64) for of_evaluation in parts]


def _mean(parts: Sequence[tuple[float, int]]) -> float:
    """The mean of (loss, labelled tokens) over tokens, in double precision and in this order."""
    total, tokens = 0.0, 0
    for loss, weight in parts:
        total = total + loss * weight
        tokens = tokens + weight
    return total / tokens if tokens else math.nan


def mismatch(rank: int, found: str, expected: str) -> WorkerError:
    """The error for a worker that does something else than the others."""
    return WorkerError(
        f"worker {rank}", found, expected, "start all workers with the same command, model and rows"
    )


def require_equal(digests: Sequence[object], what: str) -> None:
    """Refuse to go on where a worker's data differ from those of rank 0."""
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise mismatch(rank, f"other {what} than worker 0's", "the same")


_TAG = 1  # of tensors from one worker to another
_HEADER = 32  # numbers that describe such tensors: context, number, and dtypes and shapes
_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
TIMEOUT = 1800.0  # seconds that a worker waits for the others
T = TypeVar("T")


class Workers:
    """The workers of a run.

    They share only the losses of a step, or gradients, and combine them in the order of ranks.

    All workers have the same model, rows and options, and make the same calls in the same order.
    Where directions are split, the result has the bits of a single worker's. Losses over parts of
    the rows differ from a single worker's by the order of summation only.

    Args:
        group: Process group of ``torch.distributed``, with a backend for CPU tensors. It stays the
            caller's. None: this process is the only worker.
        split: "directions", "rows", both as "2x3" (two groups for directions, three workers each
            for rows), or "auto": the split in which the busiest worker has the least to compute,
            chosen for each step. "blocks": each worker has a part of the model (``Stage``).
        neighbours: Number of workers on this host, which divide its free memory.

    Raises:
        OptionError: if ``split`` is not a split.
    """

    def __init__(self, group: Any = None, *, split: str = "auto", neighbours: int = 1) -> None:
        require_split(split)
        self._group, self._owns_group = group, False
        self.split, self.neighbours = split, neighbours
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        # in flight, with the tensors that are sent
        self._sends: list[tuple[Any, torch.Tensor]] = []

    @classmethod
    def from_torchrun(cls, *, split: str = "auto", timeout: float = TIMEOUT) -> Self:
        """Connect to the workers that ``torchrun`` started: by gloo, and by NCCL between GPUs.

        Where all of them run on one host, gloo uses the loopback interface unless
        ``GLOO_SOCKET_IFNAME`` names another one.

        Args:
            split: As in the constructor.
            timeout: Seconds that a worker waits for the others.

        Raises:
            OptionError: if this process was not started by ``torchrun``, or ``split`` is not a
                split.
            WorkerError: if the other workers do not connect in time.
        """
        require_split(split)
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise OptionError(
                "RANK",
                found="nothing in the environment",
                expected="the variables that torchrun sets",
                remedy="start with torchrun --nproc-per-node N -m zo2adapters ...",
            )
        size = int(os.environ["WORLD_SIZE"])
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if size == 1:
            return cls(split=split)
        if neighbours == size:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        backend = (
            "cpu:gloo,cuda:nccl"
            if torch.cuda.is_available() and distributed.is_nccl_available()
            else "gloo"
        )
        wait = timedelta(seconds=timeout)
        _connected(lambda: _call_within(timeout, lambda: _join(backend, wait)))
        workers = cls(distributed.group.WORLD, split=split, neighbours=neighbours)
        workers._owns_group = True
        return workers

    def all_gather(self, value: Any, purpose: str = "values") -> list[Any]:
        """Send a value and return the values of all workers.

        Args:
            value: A JSON value; numbers keep all their bits.
            purpose: What the value is, the same on all workers.

        Returns:
            Values in the order of ranks, the same on all workers.

        Raises:
            WorkerError: if a worker has ended, sends nothing for too long, or makes another call.
        """
        if self.size == 1:
            return [value]
        content = json.dumps([purpose, value]).encode()
        sizes = [int(size) for size in self.all_gather_tensors(torch.tensor([len(content)]))]
        message = torch.frombuffer(bytearray(content.ljust(max(sizes))), dtype=torch.uint8)
        received = [
            json.loads(bytes(content.numpy())) for content in self.all_gather_tensors(message)
        ]
        for rank, (sent, _) in enumerate(received):
            if sent != received[0][0]:
                raise mismatch(
                    rank,
                    f"{sent} where worker 0 sent {received[0][0]}",
                    "the same calls in the same order",
                )
        return [value for _, value in received]

    def all_gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Send a tensor and return the tensors of all workers, in the order of ranks.

        Args:
            tensor: Contiguous, of the same shape and dtype on all workers, on the CPU or a GPU of
                this process's own.

        Raises:
            WorkerError: if a worker has ended, or sends nothing for too long.
        """
        if self.size == 1:
            return [tensor]
        received = [torch.empty_like(tensor) for _ in range(self.size)]
        _connected(lambda: self._open_group().allgather([received], [tensor]).wait())
        return received

    def sum_tensors(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all workers' tensors, whose elements are added in the order of ranks.

        Each worker adds up one slice and sends the result to all: a worker sends two tensors at
        most, however many workers there are.

        Args:
            tensor: 1-D, of the same shape and dtype on all workers, on the CPU or a GPU of this
                process's own.

        Raises:
            WorkerError: if a worker has ended, or sends nothing for too long.
        """
        if self.size == 1:
            return tensor
        width = -(-len(tensor) // self.size)
        slices = tensor.new_empty(self.size * width)
        slices[: len(tensor)] = tensor
        slices[len(tensor) :] = 0
        received = torch.empty_like(slices)
        _connected(lambda: self._open_group().alltoall_base(received, slices, [], []).wait())
        total, *others = received.view(self.size, width)
        for other in others:
            total += other
        sums = list(slices.view(self.size, width).unbind())  # which are no longer needed
        _connected(lambda: self._open_group().allgather([sums], [total]).wait())
        return slices[: len(tensor)]

    def broadcast_tensor(self, tensor: torch.Tensor, owner: int) -> None:
        """Replace the content of a tensor by that of the worker of rank ``owner``.

        Args:
            tensor: Contiguous, of the same shape and dtype on all workers, on the CPU or a GPU of
                this process's own.
            owner: The worker.

        Raises:
            WorkerError: if a worker has ended, or sends nothing for too long.
        """
        if self.size == 1 or not tensor.numel():
            return
        content = tensor.detach().view(-1).view(torch.uint8)
        _connected(lambda: self._open_group().broadcast(content, owner).wait())

    def send(self, tensors: Sequence[torch.Tensor], rank: int, context: int) -> None:
        """Start sending tensors to another worker, and return at once.

        Args:
            tensors: On any device; not to be changed before ``end_sends``.
            rank: The worker, which calls ``receive`` for each call in the same order.
            context: A number of 64 bits on which both have to agree.

        Raises:
            WorkerError: if the worker has ended.
        """
        header = [context - 2**63, len(tensors)]
        for tensor in tensors:
            header += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        described = torch.zeros(_HEADER, dtype=torch.int64)
        described[: len(header)] = torch.tensor(header)
        contents = [tensor.detach().cpu().contiguous().view(-1) for tensor in tensors]
        for content in (described, *(content.view(torch.uint8) for content in contents)):
            _connected(partial(self._start_send, content, rank))

    def _start_send(self, content: torch.Tensor, rank: int) -> None:
        self._sends.append((self._open_group().send([content], rank, _TAG), content))

    def receive(self, rank: int, context: int) -> list[torch.Tensor]:
        """Wait for the next tensors that another worker sends; they are on the CPU.

        Args:
            rank: The worker.
            context: The number with which it sends them.

        Raises:
            WorkerError: if the worker has ended, sends nothing for too long, or sends something
                else.
        """
        described = torch.zeros(_HEADER, dtype=torch.int64)
        self._receive_into(described, rank)
        sent_context, count, *header = described.tolist()
        if sent_context != context - 2**63:
            raise mismatch(rank, "hidden states of another batch", "those of the same batch")
        tensors = []
        for _ in range(count):
            dtype, dims, *header = header
            tensor = torch.empty(header[:dims], dtype=_DTYPES[dtype])
            header = header[dims:]
            self._receive_into(tensor.view(-1).view(torch.uint8), rank)
            tensors.append(tensor)
        return tensors

    def _receive_into(self, tensor: torch.Tensor, rank: int) -> None:
        _connected(lambda: self._open_group().recv([tensor], rank, _TAG).wait())

    def end_sends(self) -> None:
        """Wait until everything is sent.

        Raises:
            WorkerError: if a worker has ended, or receives nothing for too long.
        """
        while self._sends:
            work, _ = self._sends.pop(0)
            _connected(work.wait)

    def broadcast(self, content: bytes, owner: int) -> bytes:
        """Return the content that the worker of rank ``owner`` passes.

        Raises:
            WorkerError: if a worker has ended, or sends nothing for too long.
        """
        message = torch.zeros(self.all_gather(len(content))[owner], dtype=torch.uint8)
        if self.size == 1 or not len(message):
            return content if owner == self.rank else b""
        if owner == self.rank:
            message = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        _connected(lambda: self._open_group().broadcast(message, owner).wait())
        return bytes(message.numpy())

    def require_same(self, what: str, digest: int) -> None:
        """Refuse to go on where workers have different data.

        Args:
            what: Name of the data, for the error.
            digest: Digest of this worker's data.

        Raises:
            WorkerError: naming a worker whose digest differs from rank 0's.
        """
        require_equal(self.all_gather(digest, what), what)

    def in_order(self, values: Sequence[T]) -> list[T]:
        """Gather the results of items that were sharded round-robin, in the order of the items,
        which all workers agree on.

        Args:
            values: Results of this worker's items, which are those at the indices rank, rank +
                size, ...

        Raises:
            WorkerError: if a worker has ended, sends nothing for too long, or makes another call.
        """
        gathered = self.all_gather(list(values))
        return [
            gathered[index % self.size][index // self.size]
            for index in range(sum(map(len, gathered)))
        ]

    def split_of(self, evaluations: int, rows: int | None) -> Split:
        """Choose how the workers share a step.

        Args:
            evaluations: Number of evaluations.
            rows: Rows of the batch; None where they cannot be sharded.

        Raises:
            OptionError: if some worker would have nothing to compute.
        """
        return (
            Split(1, 1)
            if self.size == 1
            else choose_split(self.split, self.size, evaluations, rows)
        )

    def digest(self, batches: Sequence[Batch]) -> int:
        """A digest of batches (names, shapes, dtypes, bytes), to compare among workers; 0 for a
        single worker.

        Raises:
            BatchError: if a batch holds something other than tensors.
        """
        if self.size == 1:
            return 0
        digest = xxhash.xxh3_64()
        for batch in batches:
            require_tensors(batch)
            for name, tensor in sorted(batch.items()):
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
                on_host = tensor.detach().cpu().contiguous()
                digest.update(byte_view(on_host))
        return digest.intdigest()

    def gathered(
        self,
        split: Split,
        evaluations: int,
        losses: Sequence[torch.Tensor],
        *,
        tokens: int,
        context: object,
    ) -> list[torch.Tensor]:
        """Send this worker's losses and return those of all evaluations of a step, 0-d.

        Args:
            split: How the workers share the step.
            evaluations: Number of evaluations of the step.
            losses: Losses of this worker's evaluations, 0-d. A single worker's are returned as they
                are.
            tokens: Labelled tokens of this worker's rows.
            context: What all workers have to agree on.

        Raises:
            WorkerError: if a worker has ended, works on another step, or makes another call.
        """
        if self.size == 1:
            return list(losses)
        dtype = str(losses[0].dtype if losses else torch.float64).removeprefix("torch.")
        report = Report(
            zlib.crc32(repr(context).encode()),
            tokens,
            dtype,
            [float(loss.item()) for loss in losses],
        )
        reports = [Report(*received) for received in self.all_gather(report, "losses")]
        return combined(reports, split, evaluations)

    def _open_group(self) -> Any:
        if self._group is None:
            raise ClosedError(
                "Workers", "a closed object", "an open one", "use it within its context"
            )
        return self._group

    def close(self) -> None:
        """Leave the run. May be called twice."""
        self._group = None
        if self._owns_group:
            self._owns_group = False
            distributed.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _call_within(seconds: float, call: Callable[[], object]) -> None:
    """Call in a thread: gloo never stops waiting for a worker that was killed while it
    connected.
    """
    result: Future[object] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # any: raised below, where it is expected
            result.set_exception(error)

    Thread(target=run, name="zo2-connect", daemon=True).start()
    try:
        result.result(seconds)
    except TimeoutError as error:
        raise RuntimeError(f"no connection within {seconds:g} seconds") from error


def _join(backend: str, wait: timedelta) -> None:
    """Join the group of all workers that were started together.

    Workers that are started again find the same store, where the addresses of those that were
    stopped still stand: keys are told apart by the attempt. Without that, gloo connects to closed
    ports, attempt after attempt.
    """
    store, rank, size = next(rendezvous("env://", timeout=wait))
    store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)


def _connected(call: Callable[[], object]) -> None:
    """Call ``torch.distributed``."""
    try:
        call()
    except RuntimeError as error:
        raise WorkerError(
            "another worker",
            found=f"a broken connection ({_reason_of_gloo(error)})",
            expected="an answer from all workers",
            remedy="read what the other workers print, and start all of them again: they continue "
            "where they stopped",
        ) from error


def _reason_of_gloo(error: RuntimeError) -> str:
    """What gloo says, without the place in its source and its advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.partition("/gloo/")[2].partition("] ")[2].partition(". This is")[0] or line[:200]
