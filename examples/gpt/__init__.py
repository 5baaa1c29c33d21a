"""What both GPT examples share: options, text, the loop over runs, the report; and a model for each framework."""
