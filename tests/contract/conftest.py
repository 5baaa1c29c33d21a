"""Says at the end which front ends and backends the contract ran over, and why others were left out."""

import contextlib

import pytest

from tests.jax.effort import effort_of


@pytest.fixture(autouse=True)
def compile_effort(request):
    """XLA's effort where JAX runs the test: test_pinned.py compiles as users do."""
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
