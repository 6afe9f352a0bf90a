"""Sources: where segments are stored between visits. Each satisfies ``BlockSource``.

``SegmentStore`` keeps them in memory or reads them from disk, with a file of slots for those
that changed; ``LowBitSource`` wraps it for transfers in 8 bits. A new one is a file here, with
a row in ``SOURCES`` of ``tests/core/test_sources.py``.
"""

from zo2core.sources.segment_store import SegmentStore as SegmentStore
