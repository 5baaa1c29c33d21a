"""How hard XLA tries: integer arithmetic and the order of float operations do not depend on it, the time does."""

import contextlib


@contextlib.contextmanager
def cheaper_passes(*, fusion_emitters=False):
    """XLA's cheaper passes while this is open; fusions by way of MLIR, two fifths of the time, only if asked for."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with contextlib.nullcontext() if fusion_emitters else _without_fusion_emitters():
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextlib.contextmanager
def _without_fusion_emitters():
    """As an option of every compilation; where JAX keeps its options elsewhere, or on a GPU, nothing changes."""
    import jax
    from jax._src import compiler

    usual = getattr(compiler, "get_compile_options", None)
    if usual is None or jax.default_backend() != "cpu":  # other platforms do not know the option
        yield
        return

    def without(*arguments, **given):
        options = usual(*arguments, **given)
        options.env_option_overrides = [*options.env_option_overrides, ("xla_cpu_use_fusion_emitters", False)]
        return options

    compiler.get_compile_options = without
    try:
        yield
    finally:
        compiler.get_compile_options = usual
