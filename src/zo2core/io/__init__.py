"""Files and host memory: direct I/O, records with checksums, durable names, this process's memory.

What reads or writes a file, and knows nothing of models, is here.
"""
