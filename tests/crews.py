"""Workers of a run as threads of this process, each with a client of the store of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zo2core import Workers
from zo2core.workers.exchange import TCPStore

T = TypeVar("T")
SECONDS = 60.0  # that a worker waits for the others; a test takes a fraction of them


def opened_store() -> Any:
    """A store of this process."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client_of(store: Any) -> Any:
    """Another client of a store."""
    return TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)


def worked(size: int, work: Callable[[Workers], T], **options: Any) -> list[T]:
    """What so many workers make, in the order of ranks; the first failure of one is raised.

    Args:
        size: Workers.
        work: What each does.
        options: Of ``Workers.joined``; a list has one value for each worker.
    """
    ended = attempted(size, work, **options)
    for outcome in ended:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in ended if not isinstance(outcome, BaseException)]


def attempted(size: int, work: Callable[[Workers], T], **options: Any) -> list[T | BaseException]:
    """As ``worked``, with what each worker raised in its place."""
    store = opened_store()
    clients = [store, *(client_of(store) for _ in range(1, size))]
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        own = {name: value[rank] if isinstance(value, list) else value for name, value in options.items()}
        try:
            with Workers.joined(rank=rank, size=size, store=clients[rank], **{"timeout": SECONDS, **own}) as workers:
                outcomes[rank] = work(workers)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def all_equal(values: Sequence[object]) -> bool:
    """Whether all are equal to the first one."""
    return all(value == values[0] for value in values)
