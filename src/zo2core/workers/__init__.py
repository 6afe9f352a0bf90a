"""Several workers on one run: shards of a step, losses combined alike, journals and snapshots in
agreement.

Something else on which workers must agree is a value of ``require_agreement``.
"""
