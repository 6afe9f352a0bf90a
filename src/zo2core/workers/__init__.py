"""Several workers on one run: each makes a share of a step's losses, all tell each other scalars, nothing else."""

from zo2core.workers.exchange import Exchange as Exchange
from zo2core.workers.shards import Shard as Shard
from zo2core.workers.shards import Split as Split
from zo2core.workers.solo import SoloWorker as SoloWorker
from zo2core.workers.workers import Plan as Plan
from zo2core.workers.workers import Workers as Workers
