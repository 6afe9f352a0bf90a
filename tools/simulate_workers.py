"""Simulate workers behind home connections, on a scripted clock, with the real rounds, seals, reports and records.

    python tools/simulate_workers.py far --workers 10 100 1000 10000 100000
    python tools/simulate_workers.py near --workers 4 16

``far`` draws each worker's speed, latency, bandwidth and time of leaving, and lets a run of so many workers take steps.
Reports go up a tree of relays, which pass on what came before the step's deadline; the record comes down the same tree. The
tree and its relays are only simulated: the library has one collector. What is collected, checked, combined and written are
the library's own messages and records. A worker that leaves is replaced at once by one that first takes over all records so
far and replays them.

``near`` runs real workers over a real store on this machine, threads that sleep as long as their drawn compute takes, and
sets the time a step beside what the simulation says of the same draws, with no relays and no latency.

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
from zo2core.journal.update_record import encode
from zo2core.types import Evaluation
from zo2core.workers import Split
from zo2core.workers.exchange import TCPStore
from zo2core.workers.messages import Round, unbundled
from zo2core.workers.rendezvous import open_store
from zo2core.workers.report import Report, combined
from zo2core.workers.seal import Seal

MOST_DIRECTIONS = 64  # a step: each is replayed by every worker
STORE_BYTES = 49  # that the store adds to a message and its answer (measured at the socket)
KEY = b"a simulation guards no secret"


@dataclass(frozen=True, kw_only=True)
class World:
    """What is drawn for each worker; medians of lognormal distributions, and their spread."""

    evaluation_seconds: float = 1.0  # of one row
    evaluation_sigma: float = 0.5
    latency_seconds: float = 0.025  # one way
    latency_sigma: float = 0.6
    up_bits: float = 10e6  # a second
    down_bits: float = 50e6
    bandwidth_sigma: float = 0.7
    relay_bits: float = 1e9  # a second, of a relay
    session_seconds: float = 3600.0  # until a worker leaves, exponentially distributed
    replay_seconds: float = 0.02  # of one direction
    fan_out: int = 32  # children of a relay
    deadline: float = 3.0  # seconds that a step waits, in medians of what a worker's share takes


@dataclass
class Member:
    """A virtual worker."""

    speed: float  # of its computing: 2 takes twice as long
    up: float  # seconds to its relay, for a message of no size
    up_bits: float
    down_bits: float
    leaves: float  # moment
    free: float = 0.0  # moment from which it can compute

    @classmethod
    def drawn(cls, rng: random.Random, world: World, now: float) -> Member:
        """One that comes now."""
        return cls(
            speed=rng.lognormvariate(0.0, world.evaluation_sigma),
            up=world.latency_seconds * rng.lognormvariate(0.0, world.latency_sigma),
            up_bits=world.up_bits * rng.lognormvariate(0.0, world.bandwidth_sigma),
            down_bits=world.down_bits * rng.lognormvariate(0.0, world.bandwidth_sigma),
            leaves=now + rng.expovariate(1.0 / world.session_seconds),
        )


@dataclass
class Tally:
    """What became of a run."""

    clock: float = 0.0
    sent: int = 0  # bytes of all workers
    received: int = 0
    made: int = 0  # shares that were computed
    counted: int = 0
    left: int = 0  # workers
    record_bytes: int = 0  # of all steps


def split_of(size: int) -> Split:
    """As many groups for directions as there may be; the workers of a group share the rows."""
    groups = math.gcd(size, MOST_DIRECTIONS) if size >= MOST_DIRECTIONS else size
    return Split(groups, size // groups)


def simulated(size: int, steps: int, world: World, seed: int) -> dict[str, Any]:
    """A run of so many workers; each has one row of both sides of its directions."""
    rng, split, seal = random.Random(seed), split_of(size), Seal(KEY)
    directions = split.groups
    estimator = MultiQueryRGE(lr=1e-6, zo_eps=1e-3, q=directions, perturb_in_place=False)
    members = [Member.drawn(rng, world, 0.0) for _ in range(size)]
    share_seconds = 2 * world.evaluation_seconds
    deadline = world.deadline * share_seconds
    tally, lines = Tally(), 0
    useful: list[float] = []  # seconds from coming to the first share
    for step in range(steps):
        evaluations = estimator.evaluations(step, iter(range(step * directions, (step + 1) * directions)))
        name = f"losses {step}"
        begun, collected = tally.clock, Round(name, size, seal)
        arrivals: list[tuple[float, int, bytes]] = []
        for rank, member in enumerate(members):
            ready = max(begun, member.free) + share_seconds * member.speed
            if ready > member.leaves:
                came = max(member.leaves, begun)
                members[rank] = newcomer = Member.drawn(rng, world, came)
                newcomer.free = came + 8 * lines / newcomer.down_bits
                newcomer.free += step * directions * world.replay_seconds * newcomer.speed
                useful.append(newcomer.free - came)
                tally.left += 1
                continue
            tally.made += 1
            losses = tuple(1.0 + rng.gauss(0.0, 1e-3) for _ in range(2 * directions // split.groups))
            report = Report(1, step, losses, torch.float32)
            message = seal.sealed(report.packed(), name=name, sender=rank)
            tally.sent += len(message) + STORE_BYTES
            arrivals.append((ready + member.up + 8 * (len(message) + STORE_BYTES) / member.up_bits, rank, message))
            member.free = ready
        decided = relayed(arrivals, collected, begun + deadline, world, size)
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
    """Relays between a worker and the root."""
    return max(1, math.ceil(math.log(size, world.fan_out)))


def relayed(arrivals: Sequence[tuple[float, int, bytes]], collected: Round, end: float, world: World, size: int) -> float:
    """Pass messages up the tree: each level waits for its children, at most until the deadline. Returns when all is known.

    Every message is opened at its first relay and again at the root, as the library's collector does.
    """
    levels, queue = relay_levels(size, world), list(arrivals)
    heapq.heapify(queue)
    bytes_up, last = 0, 0.0
    while queue and queue[0][0] <= end:
        at, rank, message = heapq.heappop(queue)
        assert collected.offer(rank, message), "a message of this round and this run"
        bytes_up, last = bytes_up + len(message) + 8, at
    all_came = not queue and not collected.missing
    hop = world.latency_seconds + 8 * bytes_up / world.relay_bits  # the last one, into the root, is the fullest
    return (last if all_came else end) + levels * world.latency_seconds + hop


def update_of(
    estimator: MultiQueryRGE, step: int, evaluations: Sequence[Evaluation], reports: dict[int, Report], split: Split
) -> Update:
    """The record's update, as an engine makes it."""
    losses = combined(reports, split, len(evaluations), 2)
    made = [evaluations[place] for place in losses]
    return replace(estimator.update(step, made, list(losses.values()), 1e-6, []), workers=tuple(sorted(reports)))


def near(size: int, steps: int, seed: int, seconds: float) -> dict[str, Any]:
    """Real workers that sleep as long as a drawn share takes, and the time a step that the draws alone make."""
    rng = random.Random(seed)
    shares = [[seconds * rng.lognormvariate(0.0, 0.5) for _ in range(steps)] for _ in range(size)]
    predicted = statistics.fmean(max(own[step] for own in shares) for step in range(steps))
    store = open_store(None)
    clients = [store, *(TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(1, size))]
    taken: list[float] = []

    def work(rank: int) -> None:
        with Workers.joined(rank=rank, size=size, store=clients[rank], key=KEY) as workers:
            workers.all_gather(None)  # all are there
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
    """A line a run."""
    names = list(rows[0])
    shown = [[f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(names, *shown, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (names, *shown)]
    return "\n".join(lines)


def main() -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["far", "near"])
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.05, help="near: median of a share")
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
