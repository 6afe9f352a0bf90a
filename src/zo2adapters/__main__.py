"""``python -m zo2adapters`` is ``zo2``, for launchers that start modules: ``torchrun ... -m
zo2adapters train ...``.
"""

from zo2adapters.cli import main

main()
