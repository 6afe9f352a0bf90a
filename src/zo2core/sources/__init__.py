"""Block sources: where segments live between visits."""

from zo2core.sources.pinned import PinnedSource as PinnedSource
from zo2core.sources.streamed import StreamedSource as StreamedSource
