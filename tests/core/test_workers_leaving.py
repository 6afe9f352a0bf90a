"""How workers end: the collector waits for those that still show signs, and names those that do not."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence

import pytest
from crews import KEY, SECONDS, client_of, opened_store, worked

from zo2core import Workers, ZO2Warning
from zo2core.workers import exchange
from zo2core.workers.exchange import Exchange
from zo2core.workers.seal import Seal


def went_on(workers: Workers | Exchange) -> list[int]:
    """Ranks whose messages counted in a round that waited for none."""
    own = workers._exchange if isinstance(workers, Workers) else workers
    return sorted(own.gather(b"", "losses", deadline=0.0))


def test_a_worker_that_died_in_a_run_with_a_deadline_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_GOODBYE", 0.1)
    ended = threading.Event()

    def run(workers: Workers) -> None:
        if workers.rank == 1:
            workers._exchange._closed = True  # it is gone without a word
            return
        went_on(workers)
        if workers.rank == 2:
            workers.close()
            ended.set()
        assert ended.wait(SECONDS)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        worked(3, run)
    [warning] = [entry for entry in told if issubclass(entry.category, ZO2Warning)]
    assert str(warning.message).startswith("worker 1: found no sign that it has ended")


class Clock:
    """A clock that goes on by six seconds whenever the collector waits, and then lets something happen."""

    def __init__(self, happens: Sequence[Callable[[], object]]) -> None:
        self.now = 0.0
        self._happens = list(happens)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        del seconds
        self.now += 6.0
        if self._happens:
            self._happens.pop(0)()


@pytest.mark.parametrize("what", ["catches up", "is slow", "is silent", "is drowned by a stranger"])
def test_a_worker_that_fell_behind_is_waited_for_as_long_as_it_shows_signs(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store, seal = opened_store(), Seal(KEY)
    client = client_of(store)
    late = [seal.sealed(b"", name=f"losses {number}", sender=1) for number in range(3)]
    goodbye = seal.sealed(b"", name="leaves 1", sender=-3)
    nothing = b"not one of the run's messages"
    messages: dict[str, Sequence[bytes | None]] = {
        "catches up": [*late, goodbye],  # each in less than ten seconds
        "is slow": [None, None, goodbye],  # in less than the longest step took
        "is silent": [],
        "is drowned by a stranger": [nothing] * 9,
    }

    def happening(message: bytes | None) -> Callable[[], object]:
        return lambda: None if message is None else client.queue_push("#", message)

    clock = Clock([happening(message) for message in messages[what]])
    monkeypatch.setattr(exchange, "time", clock)
    collector = Exchange(store, 0, 2, seal, timeout=SECONDS)
    for _ in late:
        if what == "is slow":
            clock.now += 20.0
        assert went_on(collector) == [0]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        collector.close()
    named = [str(warning.message) for warning in told if issubclass(warning.category, ZO2Warning)]
    assert bool(named) == (what in {"is silent", "is drowned by a stranger"}), named
