"""Files and host memory: direct I/O, record logs, durable writes, shared memory."""
