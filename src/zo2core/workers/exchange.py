"""All-gathers over a store of ``torch.distributed``, collected by the worker of rank 0.

An all-gather costs each worker one message and one answer, which holds the messages of all workers. The store's server runs
in the process of rank 0 and ends with it; the waits of the other workers then fail.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, QueueEmptyError
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

from zo2core.errors import ClosedError, WorkerError, ZO2Warning
from zo2core.workers.messages import AllGather, unbundled
from zo2core.workers.seal import SEAL_BYTES, Seal

TIMEOUT = 1800.0  # default seconds that a worker waits for the others
_POLL = 1e-3  # seconds between two polls of the queues under a deadline
_GOODBYE = 10.0  # seconds without a message after which the closing collector gives up on a worker
_GOODBYE_POLL = 0.01  # seconds between two polls for goodbyes
_LEAVES = -2  # sender of rank 0's goodbye; that of rank r is _LEAVES - r
_REASON_BYTES = 300  # most bytes of a goodbye's reason

_FIRST_QUEUE = 0x21  # character that names the first queue: names take one byte up to 47 workers

T = TypeVar("T")


class Exchange:
    """One worker's end of the all-gathers, which all workers do in the same order.

    Args:
        store: Client of rank 0's store, used by this object alone; None for a single worker.
        rank: Rank of this worker.
        size: Number of workers.
        seal: Seal of the run.
        timeout: Seconds that this worker waits for the others.
    """

    def __init__(self, store: TCPStore | None, rank: int, size: int, seal: Seal, *, timeout: float = TIMEOUT) -> None:
        self.rank = rank
        self.size = size
        self._store: Any = store
        self._seal = seal
        self.timeout = timeout
        self._number = 0  # number of the next all-gather
        self._closed = False
        self._missed = False  # whether the last all-gather ended without this worker's message
        self._late: list[deque[str]] = [deque() for _ in range(size)]  # rank -> all-gathers that ended without its message
        self._last_end = time.monotonic()  # when the last all-gather ended
        self._longest = 0.0  # most seconds between the ends of two all-gathers of which the second had a deadline
        self._thread = _StoreThread() if size > 1 else None
        if store is not None:
            store.set_timeout(timedelta(seconds=timeout))

    @property
    def is_decided(self) -> bool:
        """Whether the next all-gather has already ended without this worker's message, which is then of no use."""
        self._require_open()
        return self._missed and bool(self.call(lambda: self._store.queue_len(_answer_queue(self.rank))) > 0)

    def gather(
        self,
        payload: bytes,
        kind: str,
        *,
        deadline: float | None = None,
        accepts: Callable[[bytes], bool] = lambda payload: True,
    ) -> Mapping[int, bytes]:
        """Send a payload and return the payloads of all workers.

        Args:
            payload: This worker's payload.
            kind: Purpose of the all-gather, the same on all workers.
            deadline: Seconds that the collector waits for the others once its own payload is ready; the result leaves
                out workers whose payloads have not arrived by then. None waits for all.
            accepts: Predicate on a payload, evaluated by the collector; the result leaves out rejected payloads.

        Returns:
            Payloads in the order of ranks, the same on all workers.

        Raises:
            WorkerError: if a worker leaves, sends nothing for too long, or sends a message that is not sealed for this
                all-gather of this run.
            ClosedError: after ``close``.
        """
        self._require_open()
        if self.size == 1:
            return {0: payload}
        name, self._number = f"{kind} {self._number}", self._number + 1
        message = self._seal.sealed(payload, name=name, sender=self.rank)
        if self.rank > 0:
            bundle = self._answer_to(message)
        else:
            bundle = self._collect(AllGather(name, self.size, self._seal, accepts), message, name, deadline)
        payloads = unbundled(bundle, name, self._seal)
        if payloads is None:
            raise self._refusal(0, bundle)
        self._missed = self.rank not in payloads
        ended = time.monotonic()
        if deadline is not None:
            self._longest = max(self._longest, ended - self._last_end)
        self._last_end = ended
        return payloads

    def all_gather(self, kind: str, value: Any) -> dict[int, Any]:
        """``gather`` for JSON values."""
        payloads = self.gather(json.dumps(value).encode(), kind)
        return {rank: json.loads(payload) for rank, payload in payloads.items()}

    def store_client(self) -> TCPStore:
        """Another client of rank 0's store."""
        client: TCPStore = self._store.clone()
        return client

    def call(self, function: Callable[[], T]) -> T:
        """Call in the store's thread: a wait of the store in the main thread would keep signals from being handled."""
        assert self._thread is not None
        return self._thread.call(function)

    def close(self, why: str | None = None) -> None:
        """Leave the run. May be called twice.

        Args:
            why: The error that ended this worker, for the others, which may be waiting for it. None if there was none and
                all others leave after the same all-gathers. The collector then waits for them, since the last answer is
                lost with it. It gives up on a worker that has sent nothing for ten seconds; for a worker that fell behind
                and may still be computing, for as long as the longest step took.

        Warns:
            ZO2Warning: naming the workers that the collector gave up on.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._store is not None:
                with contextlib.suppress(DistError, RuntimeError):
                    self._say_goodbye(why)
        finally:
            if self._thread is not None:
                self._thread.close()

    def _say_goodbye(self, why: str | None) -> None:
        content = "" if why is None else (why or "an error")
        name = f"leaves {self.rank}"
        message = self._seal.sealed(content.encode()[:_REASON_BYTES], name=name, sender=_LEAVES - self.rank)
        # After an interrupted wait the thread goes on waiting and holds the client until a message arrives.
        is_held = self._thread is not None and self._thread.is_busy
        store = self._store.clone() if is_held else self._store
        if self.rank > 0:
            store.queue_push(_message_queue(self.rank), message)
            return
        if why is not None:
            for rank in range(1, self.size):
                store.queue_push(_answer_queue(rank), message)
            return
        missing = self._await_goodbyes(store)
        if missing:
            ranks = ", ".join(map(str, missing))
            warnings.warn(
                f"worker {ranks}: found no sign that it has ended; expected all workers to end after the same steps. "
                "What to do: if its journal lacks the last steps, start the workers again: it takes them from the others.",
                ZO2Warning,
                stacklevel=4,
            )

    def _await_goodbyes(self, store: Any) -> list[int]:
        """Wait for the others' goodbyes; returns the ranks of workers that have sent nothing for too long."""
        now = time.monotonic()
        patience = {rank: max(_GOODBYE, self._longest if self._late[rank] else 0.0) for rank in range(1, self.size)}
        ends = {rank: now + seconds for rank, seconds in patience.items()}
        given_up: list[int] = []
        while ends:
            now = time.monotonic()
            for rank in list(ends):
                try:
                    message = bytes(store.queue_pop(_message_queue(rank), block=False))
                except QueueEmptyError:
                    if now >= ends[rank]:
                        given_up.append(rank)
                        del ends[rank]
                    continue
                if self._reason_of(rank, message) is not None:
                    del ends[rank]
                elif self._was_late(rank, message):
                    ends[rank] = now + patience[rank]
            if ends:
                time.sleep(_GOODBYE_POLL)
        return given_up

    def _answer_to(self, message: bytes) -> bytes:
        """Send a message to the collector; returns its answer."""
        store = self._store

        def push_and_pop() -> Any:
            store.queue_push(_message_queue(self.rank), message)
            return store.queue_pop(_answer_queue(self.rank))

        try:
            return bytes(self.call(push_and_pop))
        except DistError as error:
            raise silent_worker(0, self.timeout, error) from error

    def _collect(self, all_gather: AllGather, message: bytes, name: str, deadline: float | None) -> bytes:
        """Collect the messages of all workers and answer each; returns the answer."""
        all_gather.add(0, message)
        end = None if deadline is None else time.monotonic() + deadline
        while missing := all_gather.missing:
            for rank in missing if end is not None else missing[:1]:
                received = self._pop(rank, wait=end is None)
                if received is not None and not all_gather.add(rank, received) and not self._was_late(rank, received):
                    raise self._refusal(rank, received)
            if end is not None and all_gather.missing:
                if time.monotonic() >= end:
                    break
                time.sleep(_POLL)
        for rank in all_gather.missing:
            self._late[rank].append(name)
        bundle = all_gather.bundle()
        for rank in range(1, self.size):
            self._store.queue_push(_answer_queue(rank), bundle)
        return bundle

    def _pop(self, rank: int, *, wait: bool) -> bytes | None:
        """A worker's next message; None if there is none and ``wait`` is false."""
        store = self._store
        try:
            return bytes(self.call(lambda: store.queue_pop(_message_queue(rank), wait)))
        except QueueEmptyError:
            return None
        except DistError as error:
            raise silent_worker(rank, self.timeout, error) from error

    def _was_late(self, rank: int, message: bytes) -> bool:
        """Whether a message belongs to an all-gather that ended without it."""
        late = self._late[rank]
        for name in list(late):
            if self._seal.opened(message, name=name, sender=rank) is not None:
                while late.popleft() != name:  # older ones were never sent: the worker saw that they were decided
                    pass
                return True
        return False

    def _reason_of(self, rank: int, message: bytes) -> str | None:
        """The reason in a worker's goodbye; None if the message is not a goodbye."""
        if len(message) < SEAL_BYTES:
            return None
        content = self._seal.opened(message, name=f"leaves {rank}", sender=_LEAVES - rank)
        return None if content is None else content.decode(errors="replace")

    def _refusal(self, rank: int, message: bytes) -> WorkerError:
        """The error for a message that does not belong to the present all-gather."""
        why = self._reason_of(rank, message)
        if why is not None:
            return WorkerError(
                f"worker {rank}",
                found=f"that it has left: {why}" if why else "that it has ended",
                expected="its message for this all-gather",
                remedy="fix that error and restart the workers: they continue where the longest journal ends",
            )
        return WorkerError(
            f"worker {rank}",
            found="a message that is not sealed for this all-gather with this run's key",
            expected="a worker of this run that takes the same steps and evaluations in the same order",
            remedy="give all workers the same key and command, and keep other machines off their network",
        )

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("Workers", found="a closed object", expected="an open one", remedy="use it within its context")


class _StoreThread:
    """A daemon thread that makes the store's blocking calls, so that the calling thread can be interrupted."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._is_busy = False
        threading.Thread(target=self._run, name="zo2-exchange", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether a call has not ended; between calls, only because its caller was interrupted."""
        return self._is_busy

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the thread; returns its result."""
        future: Future[T] = Future()
        self._is_busy = True
        self._calls.put((function, future))
        return future.result()

    def close(self) -> None:
        """Let the thread end after its present call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._run_call(*call)
            del call  # a result, such as a connection, is its caller's alone

    def _run_call(self, function: Callable[[], Any], future: Future[Any]) -> None:
        try:
            result = function()
        except BaseException as error:
            self._is_busy = False
            future.set_exception(error)
        else:
            self._is_busy = False
            future.set_result(result)


def silent_worker(rank: int, timeout: float, error: Exception) -> WorkerError:
    """The error for a worker that sends nothing."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0][:120]
    return WorkerError(
        f"worker {rank}",
        found=f"no message ({first_line})",
        expected=f"a message within {timeout:g} seconds",
        remedy="restart the workers: they continue where the longest journal ends",
    )


def _message_queue(rank: int) -> str:
    """Name of the queue of a worker's messages; short, since it is sent with each message."""
    return chr(_FIRST_QUEUE + 2 * rank)


def _answer_queue(rank: int) -> str:
    """Name of the queue of the collector's answers to a worker."""
    return chr(_FIRST_QUEUE + 2 * rank + 1)
