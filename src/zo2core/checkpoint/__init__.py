"""Checkpoints: safetensors and GGUF, read by range; safetensors written as a stream.

A new format is a reader here that satisfies ``TensorReader``.
"""
