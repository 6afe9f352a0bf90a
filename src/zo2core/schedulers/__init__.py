"""Schedulers: the order of upload, compute and offload. Each satisfies ``Scheduler``.

The devices on which segments are computed, and the queues of their work, are here, too. A new
scheduler is a file here, chosen in ``open_scheduler``; a new device is one that
``choose_device`` names.
"""
