"""The test suite; a package, so that test modules share cases by `from tests.contract import ...`."""
