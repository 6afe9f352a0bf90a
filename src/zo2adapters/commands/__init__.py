"""The subcommands of ``zo2``."""
