"""Checkpoints in safetensors or GGUF: read by range, written as a stream."""

from zo2core.checkpoint.gguf import GGUFFile as GGUFFile
from zo2core.checkpoint.gguf import Scalar as Scalar
from zo2core.checkpoint.gguf import StoredArray as StoredArray
from zo2core.checkpoint.gguf import StoredText as StoredText
from zo2core.checkpoint.gguf import is_gguf as is_gguf
from zo2core.checkpoint.gguf import read_gguf as read_gguf
from zo2core.checkpoint.shards import CustomExport as CustomExport
from zo2core.checkpoint.shards import Piece as Piece
from zo2core.checkpoint.shards import SafetensorsReader as SafetensorsReader
from zo2core.checkpoint.shards import TensorEntry as TensorEntry
from zo2core.checkpoint.shards import check_float as check_float
from zo2core.checkpoint.shards import find_tensors as find_tensors
from zo2core.checkpoint.shards import parse_header as parse_header
from zo2core.checkpoint.shards import require_own_file as require_own_file
from zo2core.checkpoint.shards import require_unused as require_unused
from zo2core.checkpoint.shards import same_samples as same_samples
from zo2core.checkpoint.shards import write_checkpoint as write_checkpoint
from zo2core.checkpoint.snapshots import Snapshot as Snapshot
from zo2core.checkpoint.snapshots import Snapshots as Snapshots
