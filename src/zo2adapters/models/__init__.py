"""Hugging Face models in segments: checkpoints, architectures, the monolithic reference."""
