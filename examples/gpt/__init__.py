"""The parts of examples/train_gpt.py: model, data, underflow, checkpointing, report."""
