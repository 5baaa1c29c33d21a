"""Models in place: layers swapped and fused, what each of them runs, and why."""
