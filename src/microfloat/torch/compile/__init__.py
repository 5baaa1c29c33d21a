"""Operators over a schedule, for torch.compile and torch.export, and their FLOP."""
