"""Llama, all generations that share the architecture (1, 2, 3, 3.1, 3.2 text)."""

from zo2adapters.models.architecture import Architecture

LLAMA = Architecture(
    model_type="llama",
    embedding=("model.embed_tokens",),
    blocks="model.layers",
    head=("model.norm", "lm_head"),
    ignored=("rotary_emb.inv_freq",),
)
