"""The benchmarks, each a module with ``add_options`` and ``run``; ``tools/bench.py`` finds them by
their names.
"""
