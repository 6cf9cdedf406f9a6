"""Bytes to batches: sources, tokenizer, packing, streams, held-out data."""
