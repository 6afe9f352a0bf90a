"""All-gathers of tensors between workers, such as their gradients.

The bytes go through gloo (``torch.distributed``), since the store of ``Exchange`` moves some 30 MB a second. Gloo does not
authenticate its peers, so each sender seals a digest of its bytes, and every other worker compares it with what arrived.
"""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed

from zo2core.errors import WorkerError
from zo2core.io.direct_file import byte_view
from zo2core.workers.exchange import Exchange

_LOOPBACK = "127.0.0.1"
_PATIENCE = 5.0  # seconds that the collector waits for other workers after a connection has broken


class GatheredTensor(NamedTuple):
    """A worker's tensor, and what it says about it."""

    tensor: torch.Tensor  # 1-d, on the CPU
    note: Any  # a JSON value


class TensorExchange:
    """All-gathers of tensors, which all workers do in the same order. Making it is a collective call.

    Args:
        exchange: All-gathers of messages with the other workers. Belongs to the caller.
        is_one_host: Whether all workers are on one host; only the loopback address is used then.

    Raises:
        WorkerError: if the workers cannot be connected.
    """

    def __init__(self, exchange: Exchange, *, is_one_host: bool) -> None:
        self._exchange = exchange
        distributed: Any = torch.distributed  # exports these two at run time only
        gloo, rank, size = distributed.ProcessGroupGloo, exchange.rank, exchange.size
        store = distributed.PrefixStore("tensors", exchange.store_client())
        options = gloo._Options()
        options._timeout = timedelta(seconds=exchange.timeout)
        options._devices = [gloo.create_device(hostname=_LOOPBACK) if is_one_host else gloo.create_default_device()]
        try:
            self._group: Any = exchange.call(lambda: gloo(store, rank, size, options))
        except RuntimeError as error:
            raise _broken("another worker", error) from error

    def all_gather(self, tensor: torch.Tensor, note: Any) -> list[GatheredTensor]:
        """Send a tensor and return the tensors of all workers.

        Args:
            tensor: 1-d, on the CPU, contiguous, of the same dtype and size on all workers.
            note: A JSON value that belongs to it.

        Returns:
            Tensors and notes in the order of ranks, the same on all workers.

        Raises:
            WorkerError: if a worker leaves, sends nothing for too long, or its bytes are not those that it sealed.
        """
        tensors = [torch.empty_like(tensor) for _ in range(self._exchange.size)]
        broken: RuntimeError | None = None
        try:  # first, since gloo notices at once that another worker has ended
            self._exchange.call(lambda: self._group.allgather([tensors], [tensor]).wait())
        except RuntimeError as error:
            broken = error
        local = {"digest": _digest(tensor), "note": note, "broken": broken is not None}
        patience = None if broken is None else _PATIENCE
        payloads = self._exchange.gather(json.dumps(local).encode(), "tensors", deadline=patience)  # a goodbye says why
        messages = {rank: json.loads(payload) for rank, payload in payloads.items()}
        lost = [rank for rank in range(self._exchange.size) if rank not in messages]
        if lost or any(message["broken"] for message in messages.values()):
            raise _broken(f"worker {lost[0]}" if lost else "another worker", broken) from broken
        for rank, message in messages.items():
            if rank != self._exchange.rank and _digest(tensors[rank]) != message["digest"]:
                raise WorkerError(
                    f"worker {rank}",
                    found="other bytes of a tensor than those that it sealed",
                    expected="the same bytes",
                    remedy="keep other machines off the workers' network, and start the workers again",
                )
        return [GatheredTensor(tensors[rank], message["note"]) for rank, message in messages.items()]

    def close(self) -> None:
        """Close the connections; workers that wait for this one then go no further. May be called twice."""
        self._group = None


def _broken(where: str, error: RuntimeError | None) -> WorkerError:
    first_line = "" if error is None else f" ({(str(error).splitlines() or [''])[0][-120:]})"
    return WorkerError(
        where,
        found=f"a broken connection{first_line}",
        expected="an open connection between all workers",
        remedy="look at the output of the other workers, and start them again: they continue from the last snapshot",
    )


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(byte_view(tensor)).hexdigest()
