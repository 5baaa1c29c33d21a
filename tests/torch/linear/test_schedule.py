"""Schedules by launches give the bytes of casts by torch operations: interpreted here, compiled on a GPU."""

import pytest

from tests.interpreter import interpreting

# Neither torch nor triton is imported here: a process of its own must first say that kernels are to be interpreted.
OTHER_INPUTS = (
    "odd rows", "odd rows in blocks", "odd features", "misaligned", "transposed", "another recipe", "expanded dy",
    "strided x",
)  # fmt: skip
NAMES = ("delayed", "fp8_current", "fp8_row", "fp8_block", "mxfp8", "mxfp8_exact", "mxfp6", "mxfp4", "nvfp4")
OF_MATRICES = ("delayed", "fp8_current", "fp8_row")  # scales of whole groups, or of their rows and columns
CASES = [
    *[("same_bits", (name, (32, 48), 64, False, "bfloat16")) for name in NAMES],
    *[("same_bits", (name, (2, 16, 48), 64, True, "float16")) for name in ("delayed", "fp8_row", "fp8_block", "nvfp4")],
    *[("same_bits", (name, (32, 48), 64, True, "float32")) for name in ("fp8_current", "mxfp8", "mxfp8_exact")],
    ("same_bits", ("fp8_block", (48, 400), 144, False, "bfloat16")),
    *[("same_bits", ("nvfp4_folded", *sizes, False, "bfloat16")) for sizes in (((32, 48), 64), ((80, 144), 272))],
    ("same_bits", ("nvfp4_folded dequantized", (3, 40, 400), 144, False, "float32")),
    # features P14: backward reads the operands of fprop, as codes, as values, folded, and as tiles.
    *[("same_bits", (f"{name} dequantized", (32, 48), 64, True, "bfloat16")) for name in NAMES],
    ("same_bits", ("mxfp8 dequantized", (3, 40, 400), 144, False, "float32")),
    ("same_bits", ("fp8_block dequantized", (48, 400), 144, False, "bfloat16")),
    ("same_bits", ("nvfp4 high_precision", (32, 48), 64, True, "bfloat16")),
    *[("reads_what_fprop_read", (name,)) for name in NAMES],
    *[("named_operators", (name,)) for name in ("delayed", "mxfp8", "mxfp8_exact dequantized", "nvfp4")],
    *[("same_bits", (name, (80, 144), 272, False, "bfloat16")) for name in ("fp8_current", "fp8_row", "mxfp8")],
    # Histories, parts of buffers, counts of folding, seeds: what is given by address besides operands and scales.
    *[("one_cast_without_a_kernel", (name,)) for name in ("nvfp4", "mxfp8")],
    *[("same_bits_by_addresses", (name,)) for name in ("fp8_current", "delayed", "fp8_row", "mxfp8", "nvfp4")],
    *[("operators", (name,)) for name in ("fp8_current", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "nvfp4_folded")],
    *[("fewer_gradients_than_planned", (name,)) for name in ("fp8_current", "fp8_row", "fp8_block", "mxfp8", "nvfp4")],
    *[("overflow", (name,)) for name in NAMES],
    ("counts_change_the_schedule", ()),
    *[("any_input_is_served", (what,)) for what in OTHER_INPUTS],
    *[("values_in_the_order_of_x", (name,)) for name in ("mxfp8_exact", "nvfp4")],
    ("negated_views", ()),
    ("only_what_is_wanted", ()),
    ("a_changed_setting_finds_another_schedule", ()),
    *[("microbatches", (name,)) for name in ("fp8_current", "delayed", "nvfp4")],
    ("kept_weights_serve_other_sizes", ()),
    ("equal_recipes_share_schedules", ()),
    ("every_call_casts_its_input", ()),
    ("kept_weights_and_fused_optimizers", ()),
    ("regions", ()),
    ("saved_tensors_may_travel", ()),
    ("in_place_after_three_dimensions", ()),
    ("double_backward_is_refused", ()),
    ("operands_are_checked_once_for_all", ()),
    ("a_computed_bias_is_not_dropped", ()),
    ("transforms_are_refused", ()),
    *[("every_group_is_cast_alone", (name,)) for name in ("fp8_block", "mxfp8", *OF_MATRICES)],
    *[("all_groups_at_once", (name,)) for name in ("fp8_block", "mxfp8", "mxfp8_hybrid", *OF_MATRICES)],
    ("groups_of_nvfp4", ()),
    ("groups_of_nvfp4_at_once", ()),
    *[("all_groups_at_once", (name, "float32")) for name in ("fp8_block", "fp8_row")],
]


def _run(case: tuple) -> None:
    from tests.torch.linear import scheduled

    scheduled.run(case, "cpu")


@pytest.fixture(scope="module")
def interpreted():
    for name in ("torch", "triton"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    return interpreting(_run)


def _name(case: tuple) -> str:
    return "-".join([case[0], *map(str, case[1])]).replace(" ", "")


@pytest.mark.slow_cases(
    "further cases of planned calls, interpreted",
    cases=("microbatches-nvfp4", "saved_tensors_may_travel", "overflow-nvfp4", "overflow-mx*4", "overflow-mxfp6",
    "overflow-fp8_*", "overflow-mxfp8*", "overflow-delayed",
    "microbatches-fp8_current", "every_group_is_cast_alone-mxfp8", "every_group_is_cast_alone-fp8_current",
    "every_group_is_cast_alone-fp8_block", "every_group_is_cast_alone-delayed",
    "same_bits-*(80,144)*", "kept_weights_*", "same_bits_by_addresses-nvfp4",
    "fewer_gradients_than_planned-[fn]*", "same_bits-*-float16", "same_bits-fp8_block*-(48,400)*",
    "same_bits-mxfp6dequantized*", "same_bits-mxfp4dequantized*", "same_bits-fp8_rowdequantized*",
    "same_bits-nvfp4_folded*",
    "reads_what_fprop_read-[fm]*", "named_operators-delayed", "named_operators-nvfp4",
    "named_operators-mxfp8",
    "same_bits-*-64-True-float32", "same_bits_by_addresses-fp8_row", "same_bits_by_addresses-mxfp8",
    "all_groups_at_once-*", "groups_of_nvfp4*",
    "operators-*", "negated_views", "same_bits-fp8_row-*", "same_bits-mxfp6-*",
    "same_bits-mxfp4-(32,48)*", "same_bits-mxfp8_exact-(32,48)*"),
)  # fmt: skip
@pytest.mark.xdist_group("schedules-interpreted")
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_interpreted(interpreted, case: tuple) -> None:
    interpreted(case)


ON_GPUS = [
    *[("same_bits", (name, (208, 1040), 1552, False, "bfloat16")) for name in NAMES], ("graphs_and_streams", ()),
    ("threads", ()),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own forward-mode AD uses it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does so
@pytest.mark.parametrize("case", [*CASES, *ON_GPUS], ids=_name)
def test_on_the_gpu(case: tuple) -> None:
    from tests.torch.linear import scheduled

    scheduled.run(case, "cuda")
