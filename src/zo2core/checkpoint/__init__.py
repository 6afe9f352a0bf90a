"""Checkpoints in safetensors or GGUF: read by range, written as a stream."""
