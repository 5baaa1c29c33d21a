"""Parts of examples/study.py: text, model, the rows that are compared, one run of a row, intervals and verdicts."""
