"""The declared architectures, by the config's model type. Other models' parts are derived by a dry run.

A declaration saves the dry run. Models that read images need one, since the dry run has no images. Their vision tower and
its projector run before the first layer, so they belong to the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping

from zo2adapters.models.architecture import Architecture


def _decoder(model_type: str, ignored: tuple[str, ...] = ()) -> Architecture:
    return Architecture(
        model_type=model_type,
        embedding=("model.embed_tokens",),
        blocks="model.layers",
        head=("model.norm", "lm_head"),
        ignored=ignored,
    )


def _vision(model_type: str, *vision: str) -> Architecture:
    return Architecture(
        model_type=model_type,
        embedding=(*vision, "model.language_model.embed_tokens"),
        blocks="model.language_model.layers",
        head=("model.language_model.norm", "lm_head"),
    )


_TEXT_MODELS = (
    # ``final_layer_norm`` (and, in 350m, ``project_out`` before ``project_in``) is registered before the layers, so MeZO
    # draws its noise before theirs although it runs after them. 350m has a narrower embedding with two projections.
    Architecture(
        model_type="opt",
        embedding=("model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"),
        blocks="model.decoder.layers",
        head=("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"),
        ignored=("decoder.version",),
    ),
    _decoder("llama", ignored=("rotary_emb.inv_freq",)),
    _decoder("qwen2", ignored=("rotary_emb.inv_freq",)),  # small sizes tie the head to the embedding
    _decoder("qwen3"),
)
_VISION_MODELS = (
    _vision("gemma3", "model.vision_tower", "model.multi_modal_projector"),
    _vision("llava", "model.vision_tower", "model.multi_modal_projector"),
    _vision("mistral3", "model.vision_tower", "model.multi_modal_projector"),
    _vision("qwen2_5_vl", "model.visual"),
)

TEXT_MODELS: Mapping[str, Architecture] = {declared.model_type: declared for declared in _TEXT_MODELS}
ARCHITECTURES: Mapping[str, Architecture] = {
    **TEXT_MODELS,
    **{declared.model_type: declared for declared in _VISION_MODELS},
}
