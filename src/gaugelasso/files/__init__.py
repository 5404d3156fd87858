"""Files: durable writes, locks, and strict readers for files of unknown origin."""
