"""Cases of tests/torch/test_planned.py: the plan of a Linear against the general path, on a GPU or interpreted."""

from tests.torch.planned import bits, kept, running


def run(case, device):
    """Run ``(function name, arguments)`` on a device."""
    name, arguments = case
    module = next(module for module in (bits, kept, running) if hasattr(module, name))
    getattr(module, name)(device, *arguments)
