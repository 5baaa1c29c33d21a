"""The examples run, and what they promise holds."""
