"""XLA's effort: integer arithmetic and the order of float operations do not depend on it, the time does."""

import contextlib
import functools
import os

_programs = {"cheaper": True}  # how those were compiled that JAX keeps in this process


def effort_of(item):
    """All passes while this is open for a test marked `as_users_compile` and for a thorough run, else cheaper ones."""
    import jax

    cheaper = not item.get_closest_marker("as_users_compile") and os.environ.get("HYPOTHESIS_PROFILE") != "thorough"
    if cheaper != _programs["cheaper"]:
        jax.clear_caches()
        _programs["cheaper"] = cheaper
    return cheaper_passes() if cheaper else contextlib.nullcontext()


# Where each operation was written stands in a program for profilers and dumps: a tenth of the time of a small one.
_CHEAPER = {
    "jax_disable_most_optimizations": True,
    "jax_include_full_tracebacks_in_locations": False,
    "jax_traceback_in_locations_limit": 0,
}


@contextlib.contextmanager
def cheaper_passes():
    """XLA's cheaper passes while this is open; without fusions by way of MLIR, which are two fifths of the time."""
    import jax

    before = {name: value for name in _CHEAPER if (value := _setting(name)) is not None}
    for name in before:
        jax.config.update(name, _CHEAPER[name])
    try:
        with _without_fusion_emitters(), _one_context_for_many_programs():
            yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _setting(name):
    """Value of one of JAX's settings, or None if this version does not have it."""
    import jax

    if hasattr(jax.config, name):  # those that a context manager may change for one thread
        return getattr(jax.config, name)
    return jax.config.values.get(name)


@functools.cache
def _known_options():
    """The cheaper options that this jaxlib has: it refuses those that a later one has dropped."""
    import jax

    known, plain = [], jax.jit(lambda x: x).lower(0.0)
    for name, value in (("xla_cpu_use_fusion_emitters", False), ("xla_cpu_parallel_codegen_split_count", 1)):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            plain.compile(compiler_options={name: value})
            known.append((name, value))
    return known


@contextlib.contextmanager
def _without_fusion_emitters():
    """As options of every compilation, in one piece; where JAX keeps them elsewhere, or on a GPU, nothing changes."""
    import jax
    from jax._src import compiler

    usual = getattr(compiler, "get_compile_options", None)
    if usual is None or jax.default_backend() != "cpu":  # other platforms do not know the options
        yield
        return

    cheaper = _known_options()

    def without(*arguments, **given):
        options = usual(*arguments, **given)
        options.env_option_overrides = [*options.env_option_overrides, *cheaper]
        return options

    compiler.get_compile_options = without
    try:
        yield
    finally:
        compiler.get_compile_options = usual


@contextlib.contextmanager
def _one_context_for_many_programs():
    """MLIR's context, in which JAX writes a program down, serves a hundred of them.

    To make one takes longer than to write a small program. It keeps constants and types of all of them, so not for
    ever. Where JAX makes contexts elsewhere, nothing changes.
    """
    from jax._src.interpreters import mlir

    usual = getattr(mlir, "make_ir_context", None)
    if usual is None:
        yield
        return
    mlir.make_ir_context = functools.partial(_shared_context, usual)
    try:
        yield
    finally:
        mlir.make_ir_context = usual


_contexts = []  # the same one for each of the next programs


def _shared_context(make):
    if not _contexts:
        _contexts.extend([make()] * 100)
    return _contexts.pop()
