"""A step of a model that is divided among processes, beside its slowest stage alone."""

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Annotated, Any, TypeVar

import torch
from measuring import lora, spread
from torch import distributed

from benches.sums import free_port
from zo2adapters import Adapter, open_checkpoint
from zo2core import Engine, EngineOptions, FirstOrder, Workers

T = TypeVar("T")


class Recorded(Workers):
    """Workers that keep what a step receives, and give the same again without the others."""

    is_alone = False
    is_within = False  # another call of these methods

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kept: deque[Any] = deque()

    def _received(self, receive: Callable[[], T]) -> T:
        if self.is_within:
            return receive()
        if self.is_alone:
            kept: T = self.kept.popleft()
            return kept
        self.is_within = True
        try:
            result = receive()
        finally:
            self.is_within = False
        self.kept.append(result)
        return result

    def receive(self, rank: int, context: int) -> list[torch.Tensor]:
        return self._received(partial(super().receive, rank, context))

    def all_gather(self, value: Any, purpose: str = "values") -> list[Any]:
        return self._received(partial(super().all_gather, value, purpose))

    def all_gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._received(partial(super().all_gather_tensors, tensor))

    def sum_tensors(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._received(partial(super().sum_tensors, tensor))

    def broadcast(self, content: bytes, owner: int) -> bytes:
        return self._received(partial(super().broadcast, content, owner))

    def send(self, tensors: Sequence[torch.Tensor], rank: int, context: int) -> None:
        if not self.is_alone:
            super().send(tensors, rank, context)


def stages(
    model: str,
    *,
    micro_batches: Annotated[Sequence[int], "numbers of micro-batches of a step"] = (4, 8, 16),
    rows: Annotated[int, "rows of a micro-batch"] = 2,
    tokens: int = 64,
    rounds: int = 9,
    count: Annotated[int, "stages, each with a core of its own"] = 2,
) -> dict[str, Any]:
    """Compare LoRA's steps (AdamW, rank 8) of a divided model with its slowest stage alone.

        python tools/bench.py stages smollm2-135m --micro-batches 4 8 16

    Alone, each stage gets again what it has received before, and waits for nobody.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        context.Process(
            target=serve,
            args=(rank, count, port, model, micro_batches, rows, tokens, rounds, pipes[rank][1]),
        )
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    measured = {}
    for number in micro_batches:
        of_stages = [receiver.recv() for receiver, _ in pipes]
        together = [max(seconds) for seconds in zip(*(own[0] for own in of_stages), strict=True)]
        slowest = [max(seconds) for seconds in zip(*(own[1] for own in of_stages), strict=True)]
        alone = [own[1] for own in of_stages]
        equal = (number + count - 1) / number
        measured[f"{number} micro-batches"] = {
            "step": spread(together),
            **{f"stage {rank} alone": spread(seconds) for rank, seconds in enumerate(alone)},
            "step to the slowest": spread(
                [one / other for one, other in zip(together, slowest, strict=True)]
            ),
            "of equal stages, without any cost": equal,
        }
    for process in processes:
        process.join()
    return measured


def serve(
    rank: int,
    count: int,
    port: int,
    model: str,
    micro_batches: Sequence[int],
    rows: int,
    tokens: int,
    rounds: int,
    sender: Connection,
) -> None:
    """Take steps as one of the stages, in turn together with the others and alone."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, count, rank == 0
    )
    group = distributed.ProcessGroupGloo(store, rank, count, timedelta(seconds=600))
    workers = Recorded(group, split="blocks", neighbours=count)
    opened = open_checkpoint(model, adapter=Adapter(config=lora(), seed=0))
    method = FirstOrder(partial(torch.optim.AdamW, lr=1e-4))
    options = EngineOptions(workers=workers)
    with Engine(opened, method, micro_batch_size=rows, options=options) as engine:
        for number in micro_batches:
            ids = torch.randint(
                10, 1000, (rows * number, tokens), generator=torch.Generator().manual_seed(number)
            )
            batch = {"input_ids": ids, "labels": ids.clone()}
            engine.step(batch)  # takes memory that later steps use again
            together, alone = [], []
            for _ in range(rounds):
                workers.all_gather(None)  # to start together
                workers.kept.clear()
                together.append(seconds_of(partial(engine.step, batch)))
                workers.is_alone = True
                alone.append(seconds_of(partial(engine.step, batch)))
                workers.is_alone = False
            sender.send((together, alone))


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
