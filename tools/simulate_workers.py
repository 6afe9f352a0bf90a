"""Simulate workers behind home connections, on a virtual clock, with the library's own messages and records.

    python tools/simulate_workers.py far --workers 10 100 1000 10000 100000
    python tools/simulate_workers.py near --workers 4 16

``far`` draws each worker's speed, latency, bandwidth and time of leaving, and lets a run of ``--workers`` workers take
steps. Reports go up a tree of relays, which forward those that arrive before the step's deadline; the record goes down the
same tree. Tree and relays are simulated: the library has one collector. Messages and records are the library's own. A worker
that leaves is replaced at once by one that first fetches all records and replays them.

``near`` runs real workers with a real store on this machine, as threads that sleep for their drawn seconds of compute, and
compares the time of a step with that of the simulation for the same draws, without relays and latency.

Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench_overlap import keep

from zo2core import MultiQueryRGE, Update, Workers
from zo2core.io.record_log import to_line
from zo2core.journal.step_records import encode
from zo2core.types import Evaluation
from zo2core.workers import Split
from zo2core.workers.exchange import TCPStore
from zo2core.workers.messages import AllGather, unbundled
from zo2core.workers.rendezvous import open_store
from zo2core.workers.report import Report, combined
from zo2core.workers.seal import Seal

MOST_DIRECTIONS = 64  # directions of a step; each is replayed by every worker
STORE_BYTES = 49  # bytes that the store adds to a message and its answer, measured at the socket
KEY = b"a simulation guards no secret"


@dataclass(frozen=True, kw_only=True)
class World:
    """The distributions of workers: medians and spreads (sigma) of lognormal distributions."""

    evaluation_seconds: float = 1.0  # seconds of evaluating one row
    evaluation_sigma: float = 0.5
    latency_seconds: float = 0.025  # latency in one direction
    latency_sigma: float = 0.6
    up_bits: float = 10e6  # bits a second from a worker
    down_bits: float = 50e6  # bits a second to a worker
    bandwidth_sigma: float = 0.7
    relay_bits: float = 1e9  # bits a second of a relay
    session_seconds: float = 3600.0  # mean time until a worker leaves, exponentially distributed
    replay_seconds: float = 0.02  # seconds of replaying one direction
    fan_out: int = 32  # number of children of a relay
    deadline: float = 3.0  # time that a step waits, in units of a worker's median time for its shard


@dataclass
class Member:
    """A virtual worker."""

    speed: float  # factor of its computing time: 2 takes twice as long
    up: float  # latency to its relay in seconds
    up_bits: float
    down_bits: float
    leaves: float  # time at which it leaves
    free: float = 0.0  # time from which it can compute

    @classmethod
    def drawn(cls, rng: random.Random, world: World, now: float) -> Member:
        """Draw a worker that joins now."""
        return cls(
            speed=rng.lognormvariate(0.0, world.evaluation_sigma),
            up=world.latency_seconds * rng.lognormvariate(0.0, world.latency_sigma),
            up_bits=world.up_bits * rng.lognormvariate(0.0, world.bandwidth_sigma),
            down_bits=world.down_bits * rng.lognormvariate(0.0, world.bandwidth_sigma),
            leaves=now + rng.expovariate(1.0 / world.session_seconds),
        )


@dataclass
class Tally:
    """The counts of a run."""

    clock: float = 0.0  # virtual seconds
    sent: int = 0  # bytes that all workers sent
    received: int = 0  # bytes that all workers received
    made: int = 0  # shards that were computed
    counted: int = 0  # shards that arrived before their deadline
    left: int = 0  # workers that left
    record_bytes: int = 0  # bytes of all steps' records


def split_of(size: int) -> Split:
    """The split with the most groups of directions; the workers of a group share the rows."""
    groups = math.gcd(size, MOST_DIRECTIONS) if size >= MOST_DIRECTIONS else size
    return Split(groups, size // groups)


def simulated(size: int, steps: int, world: World, seed: int) -> dict[str, Any]:
    """Simulate a run; each worker evaluates one row on both sides of its group's directions.

    Args:
        size: Number of workers.
        steps: Number of steps.
        world: The distributions of workers.
        seed: Seed of the draws.
    """
    rng, split, seal = random.Random(seed), split_of(size), Seal(KEY)
    directions = split.groups
    estimator = MultiQueryRGE(lr=1e-6, zo_eps=1e-3, q=directions, perturb_in_place=False)
    members = [Member.drawn(rng, world, 0.0) for _ in range(size)]
    share_seconds = 2 * world.evaluation_seconds
    deadline = world.deadline * share_seconds
    tally, lines = Tally(), 0
    useful: list[float] = []  # seconds from a worker's joining to its first shard
    for step in range(steps):
        evaluations = estimator.evaluations(step, iter(range(step * directions, (step + 1) * directions)))
        name = f"losses {step}"
        start, collected = tally.clock, AllGather(name, size, seal)
        arrivals: list[tuple[float, int, bytes]] = []
        for rank, member in enumerate(members):
            ready = max(start, member.free) + share_seconds * member.speed
            if ready > member.leaves:
                joined = max(member.leaves, start)
                members[rank] = newcomer = Member.drawn(rng, world, joined)
                newcomer.free = joined + 8 * lines / newcomer.down_bits
                newcomer.free += step * directions * world.replay_seconds * newcomer.speed
                useful.append(newcomer.free - joined)
                tally.left += 1
                continue
            tally.made += 1
            losses = tuple(1.0 + rng.gauss(0.0, 1e-3) for _ in range(2 * directions // split.groups))
            report = Report(1, step, losses, torch.float32)
            message = seal.sealed(report.packed(), name=name, sender=rank)
            tally.sent += len(message) + STORE_BYTES
            arrivals.append((ready + member.up + 8 * (len(message) + STORE_BYTES) / member.up_bits, rank, message))
            member.free = ready
        decided = relayed(arrivals, collected, start + deadline, world, size)
        payloads = unbundled(collected.bundle(), name, seal)
        assert payloads is not None, "a bundle of this round and this run"
        reports = {rank: Report.unpacked(payload, rank) for rank, payload in payloads.items()}
        tally.counted += len(reports)
        update = update_of(estimator, step, evaluations, reports, split)
        line = len(to_line(encode(update)))
        lines += line
        levels = relay_levels(size, world)
        down = levels * (world.latency_seconds + world.fan_out * 8 * line / world.relay_bits)
        for member in members:
            arrives = decided + down + member.up + 8 * line / member.down_bits
            member.free = max(member.free, arrives) + directions * world.replay_seconds * member.speed
        tally.received += size * line
        tally.clock = decided + down
        tally.record_bytes = lines
    seconds = tally.clock / steps
    return {
        "workers": size,
        "split": f"{split.groups}x{split.parts}",
        "steps_an_hour": 3600 / seconds,
        "rows_a_second": tally.counted * 2 * directions / split.groups / tally.clock,
        "sent_bytes_a_worker_and_step": tally.sent / size / steps,
        "received_bytes_a_worker_and_step": tally.received / size / steps,
        "lost_share": 1 - tally.counted / max(tally.made + tally.left, 1),
        "left": tally.left,
        "seconds_until_a_late_one_is_useful": statistics.median(useful) if useful else None,
        "after_1000_steps": 8 * 1000 * lines / steps / world.down_bits + 1000 * directions * world.replay_seconds,
    }


def relay_levels(size: int, world: World) -> int:
    """The number of relays between a worker and the root."""
    return max(1, math.ceil(math.log(size, world.fan_out)))


def relayed(
    arrivals: Sequence[tuple[float, int, bytes]], collected: AllGather, end: float, world: World, size: int
) -> float:
    """Pass messages up the tree, in which each level waits for its children until the deadline at most.

    Every message is opened at its first relay and again at the root, as in the library's collector.

    Returns:
        The time at which the root has all messages.
    """
    levels, queue = relay_levels(size, world), list(arrivals)
    heapq.heapify(queue)
    bytes_up, last = 0, 0.0
    while queue and queue[0][0] <= end:
        at, rank, message = heapq.heappop(queue)
        assert collected.add(rank, message), "a message of this all-gather and this run"
        bytes_up, last = bytes_up + len(message) + 8, at
    all_arrived = not queue and not collected.missing
    hop = world.latency_seconds + 8 * bytes_up / world.relay_bits  # the last hop, to the root, carries the most bytes
    return (last if all_arrived else end) + levels * world.latency_seconds + hop


def update_of(
    estimator: MultiQueryRGE, step: int, evaluations: Sequence[Evaluation], reports: dict[int, Report], split: Split
) -> Update:
    """Make the update of a step as an engine does."""
    losses = combined(reports, split, len(evaluations), 2)
    made = [evaluations[place] for place in losses]
    return replace(estimator.update(step, made, list(losses.values()), 1e-6, []), workers=tuple(sorted(reports)))


def near(size: int, steps: int, seed: int, seconds: float) -> dict[str, Any]:
    """Run real workers that sleep for drawn times; return the time of a step, and that of the draws alone."""
    rng = random.Random(seed)
    shares = [[seconds * rng.lognormvariate(0.0, 0.5) for _ in range(steps)] for _ in range(size)]
    predicted = statistics.fmean(max(own[step] for own in shares) for step in range(steps))
    store = open_store(None)
    clients = [store, *(TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(1, size))]
    taken: list[float] = []

    def work(rank: int) -> None:
        with Workers.joined(rank=rank, size=size, store=clients[rank], key=KEY) as workers:
            workers.all_gather(None)  # waits until all workers have started
            began = time.perf_counter()
            for step in range(steps):
                time.sleep(shares[rank][step])
                workers.all_gather([1.0, 1.0])
            if rank == 0:
                taken.append((time.perf_counter() - began) / steps)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"workers": size, "step_seconds": taken[0], "predicted": predicted, "ratio": taken[0] / predicted}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the results, one line for each run."""
    names = list(rows[0])
    shown = [[f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(names, *shown, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (names, *shown)]
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["far", "near"])
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.05, help="near: median seconds of a worker's shard")
    for name, value in vars(World()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--output", type=Path, default=None, help="file for the JSON")
    options = parser.parse_args()
    world = World(**{name: getattr(options, name) for name in vars(World())})
    if options.what == "near":
        rows = [near(size, options.steps, options.seed, options.seconds) for size in options.workers]
    else:
        rows = [simulated(size, options.steps, world, options.seed) for size in options.workers]
    print(table(rows), file=sys.stderr)
    keep({"what": options.what, "steps": options.steps, "world": vars(world), "runs": rows}, options.output)


if __name__ == "__main__":
    main()
