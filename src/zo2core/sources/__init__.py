"""Block sources: where segments live between visits."""

from zo2core.sources.segment_store import SegmentStore as SegmentStore
