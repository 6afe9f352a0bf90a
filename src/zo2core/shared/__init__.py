"""One base for several runs."""

from zo2core.shared.shared_base import SharedBase as SharedBase
