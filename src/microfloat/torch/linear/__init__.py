"""What a Linear does in a call: its schedule, the autograd Function that runs it, and the weight between calls."""
