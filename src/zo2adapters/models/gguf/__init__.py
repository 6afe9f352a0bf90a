"""Models in GGUF files: as a base, and as what a run is exported to."""
