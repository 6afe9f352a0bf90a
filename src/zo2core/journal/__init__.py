"""The journal: the header that identifies a run, and every step of it."""

from zo2core.journal.journal import Journal as Journal
from zo2core.journal.journal import branch_journal as branch_journal
from zo2core.journal.journal import copy_journal as copy_journal
from zo2core.journal.records import DRAWN as DRAWN
from zo2core.journal.records import digest as digest
from zo2core.journal.records import json_object as json_object
