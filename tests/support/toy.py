"""A decoder that is no Hugging Face model: plain modules, its own cut, its own files.

The core knows nothing else of it.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn

from zo2core.checkpoint.shards import SafetensorsReader, parse_header
from zo2core.types import Batch, BlockLayout, ParameterSpec, SegmentKind


class Layer(nn.Module):
    """A residual feed-forward layer with a norm of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layernorm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + torch.tanh(self.mix(self.layernorm(hidden)))
        return out


class Toy(nn.Module):
    """Embedding, layers, output.

    The output is registered before the layers, and may be tied to the embedding.
    """

    def __init__(self, vocab: int, width: int, layers: int, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.out = nn.Linear(width, vocab, bias=not tied)
        if tied:
            self.out.weight = self.table.weight
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(loss=self.loss(hidden, labels))

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.out(hidden)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)


class ToyBlockModel:
    """The toy, cut."""

    def __init__(
        self, vocab: int, width: int, layers: int, *, tied: bool, dtype: torch.dtype, file: Path
    ) -> None:
        self.toy = make_toy(vocab, width, layers, tied=tied, dtype=dtype)
        specs = [
            ParameterSpec(
                name, tuple(p.shape), p.dtype, i, "bias" not in name and "layernorm" not in name
            )
            for i, (name, p) in enumerate(self.toy.named_parameters())
        ]
        save_file({name: p.data for name, p in self.toy.named_parameters()}, file)
        table = [spec for spec in specs if spec.name.startswith("table")]
        out = [spec for spec in specs if spec.name.startswith("out")]
        blocks = [
            BlockLayout(
                f"block {i}",
                SegmentKind.BLOCK,
                tuple(s for s in specs if s.name.startswith(f"layers.{i}.")),
            )
            for i in range(layers)
        ]
        self.layouts = (
            BlockLayout("embedding", SegmentKind.EMBEDDING, tuple(table)),
            *blocks,
            BlockLayout("head", SegmentKind.HEAD, tuple(out), tuple(table) if tied else ()),
        )
        self.weights = SafetensorsReader(parse_header(file))
        self.companions: Mapping[str, Path | bytes] = {}
        self.export_dtype: torch.dtype | None = None
        self.description: Mapping[str, object] = {}
        self._tied = tied

    def bind(self, index: int, parameters: Mapping[str, torch.Tensor]) -> None:
        for name, view in parameters.items():
            path, _, leaf = name.rpartition(".")
            module = (
                self.toy.out
                if self._tied and index == len(self.layouts) - 1
                else self.toy.get_submodule(path)
            )
            module._parameters[leaf] = nn.Parameter(view, requires_grad=False)

    def prepared(self, batch: Batch) -> Batch:
        return batch

    def embed(self, batch: Batch) -> torch.Tensor:
        out: torch.Tensor = self.toy.table(batch["input_ids"])
        return out

    def block(self, index: int, activations: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.toy.layers[index](activations)
        return out

    def head(self, batch: Batch, activations: torch.Tensor) -> torch.Tensor:
        return self.toy.loss(activations, batch["labels"])

    def forward_bytes(self, batch: Batch) -> int:
        out = self.toy.out
        return batch["input_ids"].numel() * out.out_features * out.weight.element_size()

    def held_bytes(self, batch: Batch) -> int:
        return (
            batch["input_ids"].numel()
            * self.toy.table.embedding_dim
            * self.toy.table.weight.element_size()
        )


def make_toy(vocab: int, width: int, layers: int, *, tied: bool, dtype: torch.dtype) -> Toy:
    """The whole toy with weights that depend on the sizes only."""
    with torch.random.fork_rng(devices=[]):
        toy = Toy(vocab, width, layers, tied=tied).to(dtype)
    generator = torch.Generator().manual_seed(vocab)
    for parameter in toy.parameters():
        parameter.data.copy_(torch.empty(parameter.shape).normal_(0.0, 0.4, generator=generator))
    return toy
