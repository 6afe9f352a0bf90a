"""Files and host memory, below everything: direct reads, records, durable names, page-aligned memory."""
