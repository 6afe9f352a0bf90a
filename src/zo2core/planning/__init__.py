"""Sizes and speeds: what a run takes in host and device memory, and how often it pays to write back."""
