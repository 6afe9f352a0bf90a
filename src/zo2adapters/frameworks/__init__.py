"""Mixins and modules that take streamed steps inside the loops of other trainers."""
