"""Qwen2 (and 2.5) and Qwen3, dense. Small sizes tie the head to the embedding; Qwen2 may mix sliding and full attention."""

from zo2adapters.models.architecture import Architecture

QWEN2 = Architecture(
    model_type="qwen2",
    embedding=("model.embed_tokens",),
    blocks="model.layers",
    head=("model.norm", "lm_head"),
    ignored=("rotary_emb.inv_freq",),
)

QWEN3 = Architecture(
    model_type="qwen3",
    embedding=("model.embed_tokens",),
    blocks="model.layers",
    head=("model.norm", "lm_head"),
)
