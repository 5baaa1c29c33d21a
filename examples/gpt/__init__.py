"""Shared by both GPT examples: options, text, the loop over runs, the report; and a model for each framework."""
