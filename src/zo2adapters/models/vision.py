"""Models that read images and text, and the entries of a batch that are images."""

from __future__ import annotations

import torch

from zo2adapters.models.branch_cache import BranchCache
from zo2adapters.models.footprint import expected_held_bytes, vision_bytes
from zo2adapters.models.hf import Activations, HFBlockModel
from zo2adapters.models.packing import is_padded
from zo2core import Batch, ZO2Error
from zo2core.errors import BatchError

_IMAGES = ("pixel_values", "image_sizes", "image_grid_thw")  # entries of a batch that are not by row
_KINDS = ("token_type_ids", "mm_token_type_ids")  # entries that mark the tokens of images


class HFVisionModel(HFBlockModel):
    """A Hugging Face language model that also reads images; batches may have none."""

    def embed(self, batch: Batch) -> Activations:
        """Run the vision tower, and HF's forward up to the first layer. See the contract."""
        try:
            return super().embed(batch)
        except (ZO2Error, torch.OutOfMemoryError):
            raise
        except (ValueError, IndexError, RuntimeError) as error:
            if not any(name in batch for name in _IMAGES) or "alloc" in str(error) or "CUDA" in str(error):
                raise
            raise BatchError(
                "batch['pixel_values']",
                found=f"images that cannot be embedded with these rows ({' '.join(str(error).split())[:200]})",
                expected="the output of the model's processor for these rows, images in the order of rows",
                remedy="pass such batches; if a row has not exactly one image, use no micro-batches and do not split rows",
            ) from error

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Run norm, head and loss, without the vision tower."""
        if self.loss_chunk is not None:
            return super().head(batch, activations)
        text = {name: value for name, value in batch.items() if name not in (*_IMAGES, *_KINDS)}
        with BranchCache():
            return self._epilogue(activations, "loss", **text)

    def forward_bytes(self, batch: Batch) -> int:
        """Estimate the bytes by formula, including the vision tower's. See the contract."""
        images = batch.get("pixel_values")
        return max(super().forward_bytes(batch), 0 if images is None else vision_bytes(self.config, images))

    def held_bytes(self, batch: Batch) -> int:
        """Estimate the bytes by formula; images need masks and positions. See the contract."""
        rows, tokens = batch["input_ids"].shape
        has_images = "pixel_values" in batch
        rope = getattr(self.config.get_text_config(), "rope_parameters", None) or {}
        return expected_held_bytes(
            self.config,
            rows,
            tokens,
            is_padded=has_images or is_padded(batch),
            position_rows=rows if "mrope_section" in rope else None,  # rows with their own positions
        )
