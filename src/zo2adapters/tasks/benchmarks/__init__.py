"""Benchmarks by name: MeZO's eleven tasks and P-RGE's."""

from collections.abc import Mapping

from zo2adapters.tasks.benchmarks.benchmark import Benchmark
from zo2adapters.tasks.benchmarks.boolq import BOOLQ
from zo2adapters.tasks.benchmarks.cb import CB
from zo2adapters.tasks.benchmarks.copa import COPA
from zo2adapters.tasks.benchmarks.drop import DROP
from zo2adapters.tasks.benchmarks.mrpc import MRPC
from zo2adapters.tasks.benchmarks.multirc import MULTIRC
from zo2adapters.tasks.benchmarks.qnli import QNLI
from zo2adapters.tasks.benchmarks.qqp import QQP
from zo2adapters.tasks.benchmarks.record import RECORD
from zo2adapters.tasks.benchmarks.rte import RTE
from zo2adapters.tasks.benchmarks.squad import SQUAD
from zo2adapters.tasks.benchmarks.sst2 import SST2
from zo2adapters.tasks.benchmarks.wic import WIC
from zo2adapters.tasks.benchmarks.winogrande import WINOGRANDE
from zo2adapters.tasks.benchmarks.wnli import WNLI
from zo2adapters.tasks.benchmarks.wsc import WSC

BENCHMARKS: Mapping[str, Benchmark] = {
    known.name: known
    for known in (BOOLQ, CB, COPA, DROP, MRPC, MULTIRC, QNLI, QQP, RECORD, RTE, SQUAD, SST2, WIC, WINOGRANDE, WNLI, WSC)
}
