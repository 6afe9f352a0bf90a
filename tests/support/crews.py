"""Workers of a run: threads of this process, connected by gloo, or processes."""

import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from command_lines import Apart, Ended, Forker

from zo2core import Workers

T = TypeVar("T")
distributed: Any = torch.distributed  # exports its stores and gloo at run time only
SECONDS = 60.0  # that a worker waits for the others; a test takes a fraction of them


def group_of(store: Any, rank: int, size: int) -> Any:
    """The gloo connections of a worker, over the loopback interface."""
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=SECONDS)
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return distributed.ProcessGroupGloo(store, rank, size, options)


def worked(size: int, work: Callable[[Workers], T], **options: Any) -> list[T]:
    """What so many workers make, in the order of ranks; the first failure of one is raised."""
    ended = attempted(size, work, **options)
    for outcome in ended:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in ended if not isinstance(outcome, BaseException)]


def attempted(size: int, work: Callable[[Workers], T], **options: Any) -> list[T | BaseException]:
    """As ``worked``, with what each worker raised in its place."""
    store = distributed.HashStore()
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            with Workers(group_of(store, rank, size), neighbours=size, **options) as workers:
                outcomes[rank] = work(workers)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


class Crew:
    """Processes that run a command together, as if ``torchrun`` had started them: which takes many
    times as long.

    What each is told of the others stands in its environment, as ``torchrun`` puts it there.
    """

    def __init__(self, forker: Forker, folder: Path, size: int) -> None:
        folders = [folder / str(rank) for rank in range(size)]
        for own in folders:
            own.mkdir(parents=True)
        self._members = [Apart(forker, own) for own in folders]

    def run(self, *arguments: object) -> list[Ended]:
        """What became of the command, in the order of ranks."""
        return self.run_each([arguments] * len(self._members))

    def run_each(self, commands: Sequence[Sequence[object]]) -> list[Ended]:
        """As ``run``, with a command for each member."""
        self._start(commands, {})
        return [member.finish() for member in self._members]

    def killed(self, rank: int, patch: str, *arguments: object) -> list[Ended]:
        """As ``run``, with a member that dies: the others are told to stop, as ``torchrun`` tells
        them.
        """
        self._start([arguments] * len(self._members), {rank: patch})
        dead = self._members[rank].finish()
        others = [member for member in self._members if member is not self._members[rank]]
        for member in others:
            member.send(signal.SIGTERM)
        ended = [member.finish() for member in others]
        ended.insert(rank, dead)
        return ended

    def _start(self, commands: Sequence[Sequence[object]], patches: Mapping[int, str]) -> None:
        size = len(self._members)
        told = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        told |= {"LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "crew"}
        for rank, member in enumerate(self._members):
            own = {
                name: str(value)
                for name, value in {**told, "RANK": rank, "LOCAL_RANK": rank}.items()
            }
            patch = f"import os; os.environ.update({own!r})\n{patches.get(rank, '')}"
            member.start(*commands[rank], patch=patch)


def all_equal(values: Sequence[object]) -> bool:
    """Whether all are equal to the first one."""
    return all(value == values[0] for value in values)
