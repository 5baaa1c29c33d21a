"""Rows of tokens go to the rows of their experts and are summed from there, as plain torch operations do it."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.xdist_group("triton-interpreter")
CASES = [(5, 1, 7, torch.float16, 5), (3, 8, 33, torch.bfloat16, 20), (2, 5, 600, torch.float32, 0)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}x{case[2]} by {case[1]}")
def test_kernels_give_the_bits_of_torch(interpreted, case) -> None:
    """One expert and many, widths that are a multiple of nothing, rows that belong to no expert here."""
    interpreted(("routed_rows", case, {}))


GATES = [(3, 33, torch.bfloat16, "silu"), (1, 128, torch.float16, "gelu_tanh"), (2, 1, torch.float32, "relu")]


@pytest.mark.parametrize("case", GATES, ids=lambda case: case[3])
def test_gates_of_rows_are_those_of_torch(interpreted, case) -> None:
    interpreted(("gates_of_rows", case, {}))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*GATES, (9000, 2048, torch.bfloat16, "silu"), (77, 2881, torch.float16, "gelu")])
def test_gates_of_rows_are_those_of_torch_on_a_gpu(case) -> None:
    from tests.kernels import cases

    cases.run(("gates_of_rows", case, {}), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (700, 8, 7168, torch.bfloat16, 5000), (900, 6, 2880, torch.float16, 5400)])
def test_kernels_give_the_bits_of_torch_on_a_gpu(case) -> None:
    from tests.kernels import cases

    cases.run(("routed_rows", case, {}), "cuda")
