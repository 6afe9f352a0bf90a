"""Plans of a run: its host and device memory, and how often segments are written back."""
