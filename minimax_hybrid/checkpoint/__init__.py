"""Checkpoints on disk: headers, strict loading, conversion, inspection, streaming to engines."""
