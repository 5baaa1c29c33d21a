"""Delayed scaling: amax histories and scales, the regions in which they move on, and amaxes over ranks."""
