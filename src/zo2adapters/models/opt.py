"""OPT, all sizes.

Special: ``final_layer_norm`` (and, in 350m, ``project_out`` before ``project_in``) is registered before the layers, so MeZO
draws its noise before theirs although it runs after them. 350m has a narrower embedding with two projections and norms
after the residual instead of a final one. The head is tied to the embedding.
"""

from zo2adapters.models.architecture import Architecture

OPT = Architecture(
    model_type="opt",
    embedding=("model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"),
    blocks="model.decoder.layers",
    head=("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"),
    ignored=("decoder.version",),
)
