"""Cases of tests/torch/linear/test_schedule.py: launches against casts by torch operations, on a GPU or interpreted."""

from tests.torch.linear.scheduled import bits, grouped, kept, running


def run(case, device):
    """Run ``(function name, arguments)`` on a device."""
    name, arguments = case
    module = next(module for module in (bits, grouped, kept, running) if hasattr(module, name))
    getattr(module, name)(device, *arguments)
