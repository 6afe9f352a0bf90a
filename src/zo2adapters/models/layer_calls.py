"""The arguments that a model's forward passes to its layers besides the hidden state: masks, positions, caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

LayerCall: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]  # positional and keyword arguments


@dataclass(frozen=True)
class _Layers:
    """Which call each layer has. No container, so that those who take nested activations apart pass it on as it is."""

    calls: tuple[int, ...]


class LayerCalls(NamedTuple):
    """The calls of all layers. Most layers of most models get the very same objects, and share one entry."""

    distinct: Sequence[LayerCall]
    layers: _Layers

    @classmethod
    def of(cls, calls: Iterable[LayerCall]) -> LayerCalls:
        """Join the calls of all layers, in order."""
        distinct: list[LayerCall] = []
        layers = []
        for call in calls:
            same = (number for number, known in enumerate(distinct) if _same_objects(known, call))
            number = next(same, len(distinct))
            if number == len(distinct):
                distinct.append(call)
            layers.append(number)
        return cls(distinct, _Layers(tuple(layers)))

    def layer(self, index: int) -> LayerCall:
        """The call of one layer."""
        return self.distinct[self.layers.calls[index]]

    def by_layer(self) -> Iterator[LayerCall]:
        """The calls of all layers, in order."""
        return (self.distinct[number] for number in self.layers.calls)


def _same_objects(one: LayerCall, other: LayerCall) -> bool:
    (args, kwargs), (other_args, other_kwargs) = one, other
    return (
        len(args) == len(other_args)
        and kwargs.keys() == other_kwargs.keys()
        and all(a is b for a, b in zip(args, other_args, strict=True))
        and all(value is other_kwargs[name] for name, value in kwargs.items())
    )
