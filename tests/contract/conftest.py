"""Says at the end which front ends and backends the contract ran over, and why others were left out."""


def pytest_terminal_summary(terminalreporter):
    from tests.contract.adapters import ADAPTERS

    terminalreporter.section("contract adapters")
    for adapter in ADAPTERS:
        reason = adapter.unavailable()
        terminalreporter.line(f"{adapter.name}: {'ran' if reason is None else f'skipped, {reason}'}")
