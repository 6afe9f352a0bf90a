"""An own architecture: a model of transformers that zo2core has never seen, declared in four lines.

The declaration says where embedding, blocks and head are. The model's code runs as it is, cut at
these places, and the result equals that of the whole model, bit for bit.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from tiny import VOCABULARY, counting_batch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from zo2adapters import Architecture, MonolithicMeZO, open_checkpoint
from zo2core import Engine, MeZOSGD, ZerothOrder

STEPS = 3


class MixerConfig(PretrainedConfig):
    model_type = "tiny-mixer"
    vocab_size = VOCABULARY
    hidden_size = 32
    layers = 3


class Mixer(nn.Module):
    """Mixes each token with the mean of all tokens up to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixed = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        means = normed.cumsum(1) / torch.arange(1, normed.shape[1] + 1)[:, None]
        return hidden + self.mixed(torch.cat([normed, means], dim=-1)).relu()


class MixerForCausalLM(PreTrainedModel):
    config_class = MixerConfig

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(VOCABULARY, config.hidden_size)
        self.layers = nn.ModuleList(Mixer(config.hidden_size) for _ in range(config.layers))
        self.output = nn.Linear(config.hidden_size, VOCABULARY)
        self.post_init()

    def forward(self, input_ids: Any, labels: Any = None, **_: Any) -> CausalLMOutput:
        hidden = self.tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.output(hidden)
        loss = labels if labels is None else self.loss_function(logits, labels, VOCABULARY)
        return CausalLMOutput(loss=loss, logits=logits)


AutoConfig.register(MixerConfig.model_type, MixerConfig)
AutoModelForCausalLM.register(MixerConfig, MixerForCausalLM)

MIXER = Architecture(
    model_type=MixerConfig.model_type,
    embedding=("tokens",),
    blocks="layers",
    head=("output",),
    returned=0,  # a layer returns hidden states alone
)


def main(folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses block by block, and those of MeZO on the whole model."""
    torch.manual_seed(0)
    base = folder / "base"
    MixerForCausalLM(MixerConfig()).save_pretrained(base)

    model = open_checkpoint(base, architecture=MIXER)
    whole = MonolithicMeZO(AutoModelForCausalLM.from_pretrained(base), lr=1e-3, zo_eps=1e-3)
    ours: list[float] = []
    theirs: list[float] = []
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3), seed=1)) as engine:
        for step in range(STEPS):
            batch = counting_batch(step)
            result = engine.step(batch)
            ours += result.losses  # at the weights plus and minus the direction
            theirs += whole.step(batch, *result.seeds).losses
        engine.export(folder / "trained")
    print("block by block:", *ours)
    print("whole model:   ", *theirs)
    return ours, theirs


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
