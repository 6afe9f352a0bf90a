"""The training loop behind ``zo2 train``, its options and its directory."""
