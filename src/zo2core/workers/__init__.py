"""Data-parallel workers on ``torch.distributed``: each computes a shard of a step, and all combine the results alike."""

from zo2core.workers.sync import require_agreement as require_agreement
from zo2core.workers.sync import sync_journals as sync_journals
from zo2core.workers.sync import sync_snapshots as sync_snapshots
from zo2core.workers.workers import Plan as Plan
from zo2core.workers.workers import Shard as Shard
from zo2core.workers.workers import Split as Split
from zo2core.workers.workers import Workers as Workers
