"""Timelines of what every lane did when, and trace files of them."""
