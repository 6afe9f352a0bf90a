"""Data-parallel workers: each computes a shard of a step's losses, and only scalars are gathered."""

from zo2core.workers.exchange import Exchange as Exchange
from zo2core.workers.shards import Shard as Shard
from zo2core.workers.shards import Split as Split
from zo2core.workers.solo import SoloWorker as SoloWorker
from zo2core.workers.tensor_exchange import TensorExchange as TensorExchange
from zo2core.workers.workers import Plan as Plan
from zo2core.workers.workers import Workers as Workers
