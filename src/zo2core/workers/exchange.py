"""How workers hear each other: rounds over a store of ``torch.distributed``, collected by the worker of rank 0.

A round costs each worker one message and one answer, which holds what all have said. The store's server is in the process of
rank 0: it ends with it, and then nobody waits for an answer in vain.
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
from zo2core.workers.messages import Round, unbundled
from zo2core.workers.seal import SEAL_BYTES, Seal

TIMEOUT = 1800.0  # seconds that a worker waits for the others, unless told otherwise
_POLL = 1e-3  # seconds between two looks where there is a deadline
_GOODBYE = 10.0  # seconds that the collector waits at the end for a sign of those who have not read the last answer
_GOODBYE_POLL = 0.01  # seconds between two looks for one
_LEAVES = -2  # senders from here downwards say that a worker leaves, and why
_WHY = 300  # bytes of that

_FIRST_NAME = 0x21  # of a queue, a character: one byte up to 47 workers

T = TypeVar("T")


class Exchange:
    """One worker's place in the rounds.

    All workers take part in the same rounds in the same order.

    Args:
        store: Store of rank 0; only this object uses it.
        rank: Rank of this worker.
        size: Workers.
        seal: Seal of the run.
        timeout: Seconds that it waits for the others.
    """

    def __init__(self, store: TCPStore | None, rank: int, size: int, seal: Seal, *, timeout: float = TIMEOUT) -> None:
        self.rank = rank
        self.size = size
        self._store: Any = store
        self._seal = seal
        self._timeout = timeout
        self._number = 0  # of the next round
        self._closed = False
        self._missed = False  # the last round went on without this worker's message
        self._late: list[deque[str]] = [deque() for _ in range(size)]  # such rounds of each worker
        self._gathered = time.monotonic()  # when the last round ended
        self._longest = 0.0  # seconds from the end of a round to that of the next, if that had a deadline
        self._thread = _Caller() if size > 1 else None
        if store is not None:
            store.set_timeout(timedelta(seconds=timeout))

    @property
    def is_decided(self) -> bool:
        """Whether the next round has gone on without this worker's message: there is no use in making it."""
        self._require_open()
        return self._missed and bool(self._call(lambda: self._store.queue_len(_down(self.rank))) > 0)

    def gather(
        self,
        payload: bytes,
        kind: str,
        *,
        deadline: float | None = None,
        counts: Callable[[bytes], bool] = lambda payload: True,
    ) -> Mapping[int, bytes]:
        """Say something and hear what all say.

        Args:
            payload: What this worker says.
            kind: What the round is about, the same for all.
            deadline: Seconds that the collector waits for the others once it has said what it says; who has said nothing
                by then is left out. None waits for all.
            counts: Whether somebody's payload counts; only the collector's word decides.

        Returns:
            Payloads in the order of ranks, the same on all workers.

        Raises:
            WorkerError: if a worker leaves, is silent for too long, or says what is not sealed for this round and run.
            ClosedError: after ``close``.
        """
        self._require_open()
        if self.size == 1:
            return {0: payload}
        name, self._number = f"{kind} {self._number}", self._number + 1
        message = self._seal.sealed(payload, name=name, sender=self.rank)
        if self.rank > 0:
            bundle = self._answer(message)
        else:
            bundle = self._collected(Round(name, self.size, self._seal, counts), message, name, deadline)
        payloads = unbundled(bundle, name, self._seal)
        if payloads is None:
            raise self._refusal(0, bundle)
        self._missed = self.rank not in payloads
        ended = time.monotonic()
        if deadline is not None:
            self._longest = max(self._longest, ended - self._gathered)
        self._gathered = ended
        return payloads

    def all_gather(self, kind: str, value: Any) -> dict[int, Any]:
        """As ``gather``, for JSON values."""
        said = self.gather(json.dumps(value).encode(), kind)
        return {rank: json.loads(payload) for rank, payload in said.items()}

    def close(self, why: str | None = None) -> None:
        """Leave. May be called twice.

        Args:
            why: What went wrong here, for the others, who may wait for this worker. None: nothing did, and all others leave
                as well, after the same rounds. The collector then waits for them, since the last answer is lost with it. It
                gives up on a worker that has shown no sign for ten seconds, or for as long as the longest step took where
                that worker fell behind: it may still be at its share of a step.

        Warns:
            ZO2Warning: naming the workers that the collector gave up.
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
        said = "" if why is None else (why or "an error")
        name = f"leaves {self.rank}"
        message = self._seal.sealed(said.encode()[:_WHY], name=name, sender=_LEAVES - self.rank)
        # Who was interrupted while it waits has a thread that waits on: it holds the client until something comes.
        is_held = self._thread is not None and self._thread.is_busy
        store = self._store.clone() if is_held else self._store
        if self.rank > 0:
            store.queue_push(_up(self.rank), message)
            return
        if why is not None:
            for rank in range(1, self.size):
                store.queue_push(_down(rank), message)
            return
        silent_ranks = self._unheard_goodbyes(store)
        if silent_ranks:
            named = ", ".join(map(str, silent_ranks))
            warnings.warn(
                f"worker {named}: found no sign that it has ended; expected all workers to end after the same steps. "
                "What to do: if its journal lacks the last steps, start the workers again: it takes them from the others.",
                ZO2Warning,
                stacklevel=4,
            )

    def _unheard_goodbyes(self, store: Any) -> list[int]:
        """Wait for the others' goodbyes; the ranks of those from whom nothing has come for too long."""
        now = time.monotonic()
        patience = {rank: max(_GOODBYE, self._longest if self._late[rank] else 0.0) for rank in range(1, self.size)}
        ends = {rank: now + seconds for rank, seconds in patience.items()}
        given_up: list[int] = []
        while ends:
            now = time.monotonic()
            for rank in list(ends):
                try:
                    message = bytes(store.queue_pop(_up(rank), block=False))
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

    def _answer(self, message: bytes) -> bytes:
        store, down = self._store, _down(self.rank)

        def ask() -> Any:
            store.queue_push(_up(self.rank), message)
            return store.queue_pop(down)

        try:
            return bytes(self._call(ask))
        except DistError as error:
            raise silent(0, self._timeout, error) from error

    def _collected(self, collected: Round, message: bytes, name: str, deadline: float | None) -> bytes:
        collected.offer(0, message)
        end = None if deadline is None else time.monotonic() + deadline
        while missing := collected.missing:
            for rank in missing if end is not None else missing[:1]:
                came = self._popped(rank, wait=end is None)
                if came is not None and not collected.offer(rank, came) and not self._was_late(rank, came):
                    raise self._refusal(rank, came)
            if end is not None and collected.missing:
                if time.monotonic() >= end:
                    break
                time.sleep(_POLL)
        for rank in collected.missing:
            self._late[rank].append(name)
        bundle = collected.bundle()
        for rank in range(1, self.size):
            self._store.queue_push(_down(rank), bundle)
        return bundle

    def _popped(self, rank: int, *, wait: bool) -> bytes | None:
        """The next message of a worker; None if there is none, and it is not waited for."""
        store = self._store
        try:
            return bytes(self._call(lambda: store.queue_pop(_up(rank), wait)))
        except QueueEmptyError:
            return None
        except DistError as error:
            raise silent(rank, self._timeout, error) from error

    def _was_late(self, rank: int, message: bytes) -> bool:
        """Whether a message is that of a round which went on without it."""
        late = self._late[rank]
        for name in list(late):
            if self._seal.opened(message, name=name, sender=rank) is not None:
                while late.popleft() != name:  # what is older was never sent: the worker saw that it was decided
                    pass
                return True
        return False

    def _reason_of(self, rank: int, message: bytes) -> str | None:
        """Why a worker says that it leaves; None if it says something else."""
        if len(message) < SEAL_BYTES:
            return None
        said = self._seal.opened(message, name=f"leaves {rank}", sender=_LEAVES - rank)
        return None if said is None else said.decode(errors="replace")

    def _refusal(self, rank: int, message: bytes) -> WorkerError:
        """Why a message cannot be taken."""
        why = self._reason_of(rank, message)
        if why is not None:
            return WorkerError(
                f"worker {rank}",
                found=f"that it has left: {why}" if why else "that it has ended",
                expected="what all workers say in this round",
                remedy="mend that, and start the workers again: they go on where the longest journal ends",
            )
        return WorkerError(
            f"worker {rank}",
            found="a message that is not sealed for this round with this run's key",
            expected="one of a worker of this run that takes the same steps and evaluations in the same order",
            remedy="give all workers the same key and command, and let nobody else reach their network",
        )

    def _call(self, function: Callable[[], T]) -> T:
        """Call in a thread of its own: the store waits in a way in which no signal is handled."""
        assert self._thread is not None
        return self._thread.call(function)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("Workers", found="closed ones", expected="open ones", remedy="use them within their context")


class _Caller:
    """A thread that waits in somebody else's place. It may wait for ever: the process ends without it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._is_busy = False
        threading.Thread(target=self._run, name="zo2-exchange", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether it is at a call that has not ended: its caller was interrupted."""
        return self._is_busy

    def call(self, function: Callable[[], T]) -> T:
        """Wait for what the thread gets."""
        future: Future[T] = Future()
        self._is_busy = True
        self._calls.put((function, future))
        return future.result()

    def close(self) -> None:
        """Let the thread end once it waits no more."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                result = function()
            except BaseException as error:
                self._is_busy = False
                future.set_exception(error)
            else:
                self._is_busy = False
                future.set_result(result)


def silent(rank: int, timeout: float, error: Exception) -> WorkerError:
    """The error for a worker from whom nothing comes."""
    said = (str(error).splitlines() or [type(error).__name__])[0][:120]
    return WorkerError(
        f"worker {rank}",
        found=f"nothing that it says ({said})",
        expected=f"a message within {timeout:g} seconds",
        remedy="start the workers again: they go on where the longest journal ends",
    )


def _up(rank: int) -> str:
    """The queue of what a worker says; short, since its name travels with each message."""
    return chr(_FIRST_NAME + 2 * rank)


def _down(rank: int) -> str:
    """The queue of what it is answered."""
    return chr(_FIRST_NAME + 2 * rank + 1)
