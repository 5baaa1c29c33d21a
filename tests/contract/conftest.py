"""Says at the end which front ends and backends the contract ran over, and why others were left out."""

import contextlib
from pathlib import Path

import pytest

from tests import golden_cases
from tests.architecture import left_out
from tests.jax.effort import effort_of


def why_not(item):
    """Why the adapter of a test does not take its Cast, or what others of its cases stand for it; or None."""
    given = getattr(item, "callspec", None) and item.callspec.params
    if not given or "adapter" not in given:
        return None
    adapter, cast, marker = given["adapter"], given.get("cast"), item.get_closest_marker("left_to_others")
    if {"pin", "case"} & given.keys():
        cast = given["pin"].cast if "pin" in given else golden_cases.cast_of(given["case"])
    if cast is not None and not adapter.supports(cast, given.get("dtype", "any")):
        return f"tests/contract: {adapter.name} {adapter.left_out}"
    return f"tests/contract: {adapter.name} {marker.args[0]}" if marker and marker.args[1](**given) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what an adapter does not take, and count it."""
    folder, kept = Path(__file__).parent, []
    for item in items:
        reason = why_not(item) if item.path.parent == folder else None
        if reason is None:
            kept.append(item)
        else:
            config.stash[left_out.HERE][reason] += 1
    items[:] = kept


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
