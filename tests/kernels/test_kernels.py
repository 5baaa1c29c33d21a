"""Every kernel against the oracle: in Triton's interpreter here, compiled where there is a GPU (`cases.py`)."""

import pytest

from microfloat.recipes import Delayed

FAST = ["fp8_tensor", "fp8_tensor_e5m2", "fp8_row", "fp8_128x128"]
BLOCKS = ["fp8_1x128", "mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"]
ODD, EVEN, SPECIAL = (37, 75), (128, 128), {"special": True}
STOCHASTIC = (("rounding", "stochastic"),)
RHT = (("rht", True),)
FOLDED = ("folded", "folded"), ("tiles", "tiles")


def _rule(name):
    return (("scale_rule", name),)


def case(function, *arguments, **options):
    """A case and its name in reports."""
    words = [function, *(str(argument) for argument in arguments), *options]
    return pytest.param((function, arguments, options), id="-".join(words).replace(" ", "").replace("'", ""))


CASES = [
    # Odd sizes and every special value; whole tiles read as words; rounding by random bytes; column-major; float16.
    *[case("operands", name, ODD, "float32", **SPECIAL) for name in FAST + BLOCKS],
    *[case("operands", name, EVEN, "bfloat16") for name in ("fp8_tensor", "fp8_row", "fp8_128x128", "fp8_1x128",
    "mxfp8", "mxfp4")],
    # Whole tiles of E5M2, and of float32.
    case("operands", "fp8_tensor_e5m2", EVEN, "bfloat16", **SPECIAL),
    case("operands", "fp8_128x128", (128, 256), "float32", **SPECIAL),
    *[case("operands", name, (68, 140), "bfloat16", **SPECIAL) for name in ("fp8_tensor", "fp8_1x128", "mxfp8",
    "mxfp4")],
    *[case("operands", name, ODD, "float32", STOCHASTIC) for name in ("fp8_tensor", "fp8_1x128_e5m2", "mxfp8",
    "mxfp6_e3m2", "mxfp4")],
    *[case("operands", name, (40, 72), "bfloat16", transposed=True) for name in ("fp8_row", "fp8_1x128", "mxfp8")],
    *[case("operands", name, (32, 64), "float16") for name in ("fp8_tensor", "mxfp8", "nvfp4")],
    *[case("operands", name, (1, 1), "bfloat16") for name in ("fp8_tensor", "fp8_row", "mxfp4", "nvfp4")],
    # Squares: MX both ways in whole tiles, read once (256 x 64, or what else is even).
    *[case("operands", name, (256, 192), "bfloat16", **SPECIAL) for name in ("mxfp8", "mxfp8_e5m2", "mxfp6_e2m3")],
    *[case("operands", "mxfp8", EVEN, "bfloat16", _rule(rule), **SPECIAL) for rule in ("floor", "ceil", "even", "oas")],
    case("scale_orders"),
    *[case("row_alone", "fp8_row", shape, "bfloat16", **SPECIAL) for shape in ((7, 272), (8, 1024))],
    case("row_alone", "fp8_row_e5m2", (9, 48), "float16", _rule("amax"), **SPECIAL),
    # What `microfloat bench` multiplies.
    case("measured_products", ("delayed", "mxfp4", "nvfp4_row")),
    case("measured_products", ("fp8_row", "fp8_block", "mxfp8", "mxfp6", "nvfp4", "mxfp6_e2m3")),
    # Of gradients, whose scales tell of overflow.
    *[case("gradients", name) for name in ("fp8_tensor", "fp8_row", "fp8_128x128", "fp8_1x128", "mxfp8", "nvfp4",
    "nvfp4_row", "nvfp4_2d")],
    *[case("gradients", name, (), (128, 256), "bfloat16") for name in ("fp8_1x128_e5m2", "fp8_tensor_e5m2",
    "nvfp4_2d")],
    case("gradients", "nvfp4", RHT + STOCHASTIC, (48, 72), "bfloat16"),
    *[case("gradients", "nvfp4", _rule(rule), (40, 72), "bfloat16") for rule in ("one_level_e4m3", "four_over_six",
    "two_level_torchao")],
    case("gradients", "fp8_1x128", _rule("amax"), (40, 72), "bfloat16"),
    case("delayed_gradients"),
    *[case("fused_gradients", name) for name in ("delayed", "fp8_1x128")],
    case("fused_squares"),
    # Rules.
    *[case("operands", "mxfp8", (33, 66), "bfloat16", _rule(rule)) for rule in ("floor", "ceil", "even", "oas")],
    *[case("operands", name, ODD, "float32", _rule("amax"), **SPECIAL) for name in ("fp8_row", "fp8_1x128",
    "fp8_128x128")],
    case("operands", "fp8_tensor", ODD, "float32", _rule("amax_pow2"), **SPECIAL),
    # Blocks of other shapes; a transform for formats whose kernels have none.
    *[case("operands", name, (70, 90), "bfloat16", **SPECIAL) for name in ("mx_32x32", "mxfp4_32x32", "mx_1x16",
    "fp8_1x64")],
    *[case("operands", name, ODD, "float32", RHT) for name in ("mxfp8", "fp8_row")],
    # NVFP4.
    case("operands", "nvfp4", (64, 128), "bfloat16"),
    *[case("operands", name, ODD, "float32", **SPECIAL) for name in ("nvfp4", "nvfp4_row", "nvfp4_2d")],
    case("operands", "nvfp4", (48, 72), "bfloat16", RHT + STOCHASTIC),
    case("operands", "nvfp4", ODD, "float32", RHT + STOCHASTIC, **SPECIAL),
    case("operands", "nvfp4_2d", (40, 72), "bfloat16", STOCHASTIC),
    *[
        case("operands", "nvfp4", (40, 72), "bfloat16", _rule(rule), **SPECIAL)
        for rule in ("two_level_torchao", "one_level_e4m3", "two_level_17_16", "four_over_six", "four_over_six_mse_448")
    ],
    *[
        case("operands", "nvfp4", (40, 72), "bfloat16", _rule(rule) + RHT + STOCHASTIC)
        for rule in ("two_level_torchao", "one_level_e4m3", "two_level_17_16")
    ],
    *[
        case("sides", row, column)
        for row, column in (((), RHT + STOCHASTIC), (STOCHASTIC, RHT + STOCHASTIC), (RHT + STOCHASTIC, RHT))
    ],
    *[case("operands", name, (33, 47), "float32", _rule("four_over_six_mse_256")) for name in ("nvfp4_2d",
    "nvfp4_row")],
    # Whole 16 x 16 tiles, encoded once for both operands: 128 x 128 elements to a program, or 64 x 64.
    case("operands", "nvfp4_2d", EVEN, "bfloat16", **SPECIAL),
    case("operands", "nvfp4_2d", (64, 64), "bfloat16", spread=125),
    *[case("operands", "nvfp4_2d", (64, 64), "bfloat16", _rule(rule), **SPECIAL) for rule in ("two_level_torchao",
    "one_level_e4m3")],
    case("operands", "nvfp4_2d", (64, 64), "bfloat16", _rule("four_over_six_mse_256")),  # whose operands may differ
    case("saturated"),
    # Other forms.
    *[case("one_orientation", name) for name in ("mxfp8", "nvfp4")],
    *[case("given_amax", name) for name in ("fp8_tensor", "nvfp4", "nvfp4_2d")],
    case("delayed"),
    case("converted_once"),
    case("amaxes", (130, 300), "bfloat16"),
    case("amaxes", (33, 47), "float32", **SPECIAL),
    case("amax_in_pieces"),
    *[case("hidden_by_nan", name) for name in ("fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128", "nvfp4_row")],
    case("hidden_by_nan", "nvfp4", RHT),
    *[case("values_in_bf16", name) for name in ("mxfp8", "mxfp4", "nvfp4_2d")],
    case("values_in_bf16", "nvfp4", RHT + STOCHASTIC),
    case("values_in_bf16", "mxfp8", RHT),
    *[case("folded", name, tile) for name in ("mxfp8", "mxfp4") for tile in (False, True)],
    *[case("folded", name, False) for name in ("mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2")],
    case("folded", "mxfp8", False, STOCHASTIC),
    case("folded", "nvfp4", False, RHT + STOCHASTIC),
    *[case("folded", name, True) for name in ("nvfp4", "nvfp4_2d")],
    case("folded", "nvfp4_row", False),
    # As JAX starts them; with the words in which programs meet.
    case("cast_in_jax", "fp8_tensor", ("codes", "codes"), (("scaling", Delayed()),)),
    case("cast_in_jax", "nvfp4", ("codes", "codes"), RHT, (64, 96)),
    *[case("cast_in_jax", name, forms, special=True) for name in ("mxfp8", "mxfp4") for forms in FOLDED],
    case("cast_in_jax", "mxfp8", ("folded", "tiles"), shape=(256, 384)),
    case("cast_in_jax", "nvfp4", ("folded", "folded"), RHT + STOCHASTIC, special=True),
    *[case("cast_in_jax", name, ("tiles", "tiles"), special=True) for name in ("nvfp4", "nvfp4_2d")],
    case("cast_in_jax", "nvfp4_row", ("folded", "folded"), special=True),
    case("turned_codes"),
    *[case("dequantized", name) for name in ("fp8_tensor", "fp8_row_e5m2", "fp8_1x128", "fp8_128x128")],
    *[case("dequantized", name) for name in ("mxfp8", "mxfp6_e3m2", "mxfp4", "nvfp4", "nvfp4_row", "nvfp4_2d")],
    # All exponents: factors of blocks from the smallest normal number to the largest.
    *[
        case("operands", "nvfp4", (80, 144), dtype, options, spread=125)
        for dtype in ("bfloat16", "float32")
        for options in (STOCHASTIC, RHT + STOCHASTIC, ())
    ],
    case("odd_alignments"),
    case("wide_offsets"),
    case("swizzled"),
    case("empty"),
    case("guard_zones"),
    case("programs"),
    case("refusals"),
    # Fused producers.
    *[
        case("activations", name, "bfloat16")
        for name in ("silu", "gelu", "gelu_tanh", "relu", "qgelu", "srelu", "sigmoid")
    ],
    *[case("rotary", dtype, turned) for dtype, turned in (("bfloat16", False), ("float32", True))],
    *[case("losses", dtype) for dtype in ("bfloat16", "float32")],
    *[case("loss_of_a_head", name, "native") for name in ("fp8_current", "mxfp8")],
    case("activations", "silu", "float32"),
    *[case("fused_casts", name) for name in ("delayed", "fp8_tensor", "mxfp8", "mxfp4", "fp8_1x128")],
    *[case("fused_casts", name) for name in ("mxfp8 stochastic", "fp8_1x128 stochastic")],
    *[case("norms_alone", kind, name) for kind in ("rms", "layer") for name in ("mxfp8", "fp8_tensor")],
    *[
        case("fused_linears", "triton", name)
        for name in ("delayed", "fp8_current", "fp8_block", "mxfp8", "fp8_row", "noisy", "no wgrad")
    ],
    *[case("fused_linears", "native", name) for name in ("delayed", "fp8_current", "fp8_block", "mxfp8")],
    *[
        case("fused_linears", "triton", name, kind="layer", gated=False, bias=True, activation="gelu")
        for name in ("delayed", "mxfp8")
    ],
]  # fmt: skip

# What only hardware forms read in words: left out where the integer ones are interpreted.
WORDS = [
    *[case("beside_nan", name) for name in ("fp8_tensor", "fp8_row", "fp8_1x128", "nvfp4", "nvfp4_row", "nvfp4_2d")],
    *[case("beside_nan", "nvfp4", (), RHT, dtype=dtype) for dtype in ("bfloat16", "float16")],
    case("beside_nan", "nvfp4", RHT, ()),
    # Words of special halves, in all combinations.
    *[case("special_words", name) for name in (*FAST, *BLOCKS, "nvfp4", "nvfp4_row", "nvfp4_2d")],
    *[case("special_words", name, STOCHASTIC) for name in ("fp8_tensor", "mxfp8", "mxfp4", "nvfp4_row")],
    *[case("special_words", "nvfp4", options) for options in (RHT, RHT + STOCHASTIC, _rule("four_over_six"))],
    *[case("special_words", name, dtype="float16") for name in ("fp8_tensor", "fp8_1x128", "mxfp8", "nvfp4",
    "nvfp4_row")],
    *[case("special_words_folded", name, tile) for name in ("mxfp8", "nvfp4") for tile in (False, True)],
]  # fmt: skip


# Cases of seconds, whose kernels other cases run too.
LONG = (
    "cast_in_jax-*",
    "folded-mxfp8-False", "folded-nvfp4*", "scale_orders", "wide_offsets", "guard_zones", "odd_alignments", "programs",
    "fused_squares", "delayed_gradients", "gradients-nvfp4-((scale_rule,four_over_six),)-(40,72)-bfloat16",
    "operands-mxfp8_e5m2-(256,192)-*", "operands-mxfp6_e2m3-(256,192)-*", "operands-mxfp8-(128,128)-*-special",
    "operands-nvfp4-(80,144)-*stochastic*-spread", "sides-((*",
    "hidden_by_nan-nvfp4-*", "values_in_bf16-nvfp4-*", "operands-*-(68,140)-*", "operands-*-(70,90)-*",
    "operands-*-transposed", "operands-mxfp8-(256,192)-*", "rotary-bfloat16-*", "fused_linears-native-[df]*",
    "fused_linears-triton-delayed-kind*", "fused_linears-triton-fp8_*", "fused_linears-triton-nowgrad",
    "norms_alone-layer-*", "rotary-float32-True", "loss_of_a_head-fp8_current-*",
    "gradients-nvfp4_2d-()-*", "gradients-nvfp4-((rht,*", "operands-nvfp4-(80,144)-float32-*", "folded-mxfp8_e5m2-*",
    "folded-mxfp6_e3m2-*", "folded-mxfp4-True", "operands-nvfp4-*mse_448*", "operands-nvfp4_2d-(33,47)-*",
    "operands-nvfp4-(40,72)-*one_level*rht*", "operands-nvfp4-(40,72)-*17_16*rht*",
    "fused_linears-triton-delayed",
    "fused_casts-*stochastic", "folded-mxfp6_e2m3-*", "operands-nvfp4-(40,72)-*one_level*",
    "operands-nvfp4-(40,72)-*17_16*", "operands-nvfp4_2d-(64,64)-*", "operands-nvfp4-(80,144)-*",
    "operands-nvfp4-(64,128)-*", "operands-mxfp8-(128,128)-*", "operands-nvfp4_2d-(128,128)-*",
    "folded-mxfp8-False-*", "folded-mxfp4-False", "fused_linears-native-*", "fused_gradients-delayed",
    "hidden_by_nan-nvfp4_row", "fused_linears-triton-noisy", "gradients-nvfp4",
    "gradients-nvfp4_row", "gradients-nvfp4-*", "fused_casts-delayed", "fused_casts-fp8_tensor", "fused_casts-mxfp4",
    "gradients-fp8_tensor_e5m2-*", "sides-()-((rht*", "measured_products-(fp8_row*", "loss_of_a_head-mxfp8-*",
    "operands-fp8_row-*rht*",
)  # fmt: skip


@pytest.mark.slow_cases("long cases of the kernels, interpreted", cases=LONG)
@pytest.mark.xdist_group("triton-interpreter")
@pytest.mark.parametrize("what", CASES)
def test_interpreted(interpreted, what, record_property):
    record_property("conversions", interpreted(what))


@pytest.mark.gpu
@pytest.mark.parametrize("what", CASES + WORDS)
def test_compiled(what, record_property):
    from tests.kernels import cases

    record_property("conversions", cases.run(what, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["E4M3", "E5M2", "E3M2", "E2M3", "E2M1"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_both_forms_of_every_conversion_agree_on_all_float32(element, stochastic):
    import torch

    from microfloat.formats import ELEMENTS
    from tests.kernels.selfcheck import count_differences

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 conversions: only the integer form exists")
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")
    fmt = ELEMENTS[element]
    for check in range(4):
        count_differences[(1 << 22,)](counts[check:], check, fmt.mantissa_bits, fmt.bias, stochastic, 1024)
    assert counts.tolist() == [0, 0, 0, 0]  # pairs, quads, values, scales and bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["E4M3", "E5M2", "E3M2", "E2M3", "E2M1"])
def test_packed_conversions_agree_on_all_bfloat16(element):
    import torch

    from microfloat.formats import ELEMENTS
    from tests.kernels.selfcheck import count_packed_differences

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 conversions: only the integer form exists")
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")
    fmt = ELEMENTS[element]
    count_packed_differences[(64,)](counts, fmt.mantissa_bits, fmt.bias, 1024)
    assert counts.tolist() == [0, 0, 0, 0]  # pairs, quads, folded codes, marks of lossy elements


@pytest.mark.gpu
def test_short_reciprocals_are_rounded_correctly():
    import torch

    from tests.kernels.selfcheck import count_reciprocal_differences

    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    count_reciprocal_differences[(1 << 21,)](count, 1024)
    assert count.item() == 0
