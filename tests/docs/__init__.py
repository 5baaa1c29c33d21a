"""The documentation's code runs."""
