"""Files of runs: checkpoints, JSONL, locks, and the packing of tensors without pickle."""
