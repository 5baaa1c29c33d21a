"""Says at the end which front ends and backends the contract ran over, and why others were left out."""

import contextlib

import pytest

from tests.jax.effort import effort_of


def pytest_collection_modifyitems(config, items):
    """Pinned cases compile as users do where slow tests run too; tests/jax/test_every_cast.py has some in every run."""
    if "not slow" not in config.option.markexpr:
        for item in items:
            if item.path.name == "test_pinned.py":
                item.add_marker(pytest.mark.as_users_compile)


@pytest.fixture(autouse=True)
def compile_effort(request):
    """XLA's effort where JAX runs the test."""
    adapter = request.node.callspec.params.get("adapter") if hasattr(request.node, "callspec") else None
    runs_jax = adapter and adapter.name == "jax" and not adapter.unavailable()
    with effort_of(request.node) if runs_jax else contextlib.nullcontext():
        yield


def pytest_terminal_summary(terminalreporter):
    from tests.contract.adapters import ADAPTERS

    terminalreporter.section("contract adapters")
    for adapter in ADAPTERS:
        reason = adapter.unavailable()
        terminalreporter.line(f"{adapter.name}: {'ran' if reason is None else f'skipped, {reason}'}")
