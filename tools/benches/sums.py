"""Sums of the workers' gradients: by slices, beside gathering whole gradients."""

import multiprocessing
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
from measuring import Rounds, alternate, spread, times_faster
from torch import distributed

from zo2core import Workers


def gathered(workers: Workers, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all workers' tensors in the order of ranks, of which each gets all."""
    total, *others = workers.all_gather_tensors(tensor)
    for other in others:
        total += other
    return total


SIDES = {"gathered": gathered, "by slices": Workers.sum_tensors}


def sums(
    *,
    workers: Annotated[Sequence[int], "numbers of processes"] = (2, 4),
    megabytes: Annotated[Sequence[int], "sizes of the gradients"] = (10, 125),
    rounds: int = 9,
) -> dict[str, Any]:
    """Compare two ways to add up the gradients of processes on this host, over gloo.

        python tools/bench.py sums --workers 2 4 --megabytes 10 125

    Both have the same bits. Sides alternate; seconds are those of the first process.
    """
    context = multiprocessing.get_context("spawn")
    measured: dict[str, Any] = {}
    for size in workers:
        port = free_port()
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(target=serve, args=(rank, size, port, megabytes, rounds, sender))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for megabyte in megabytes:
            measured[f"{size} workers, {megabyte} MB"] = receiver.recv()
        for process in processes:
            process.join()
    return measured


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def serve(
    rank: int,
    size: int,
    port: int,
    megabytes: Sequence[int],
    rounds: int,
    sender: Connection,
) -> None:
    """Run both sides in one of the processes; the first one sends what it has measured."""
    torch.set_num_threads(1)
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, size, rank == 0
    )
    group = distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=600))
    crew = Workers(group)
    for megabyte in megabytes:
        tensor = torch.randn(megabyte * 250_000, generator=torch.Generator().manual_seed(rank))
        sides = {name: partial(ends_of, add, crew, tensor) for name, add in SIDES.items()}
        results = alternate(sides, rounds)
        if rank == 0:
            sender.send(compared(results))
    whole, in_slices = (add(crew, tensor) for add in SIDES.values())
    assert torch.equal(whole, in_slices)


def ends_of(add: Any, workers: Workers, tensor: torch.Tensor) -> torch.Tensor:
    """Two numbers of a sum, since the sums of all rounds would not fit into memory."""
    total: torch.Tensor = add(workers, tensor)
    return total[[0, -1]]


def compared(results: dict[str, Rounds]) -> dict[str, Any]:
    """Seconds of each side, and how many times faster it is than gathering."""
    return {
        name: {
            "seconds": spread(side.seconds),
            "times faster": times_faster(results, name, "gathered"),
        }
        for name, side in results.items()
    }
