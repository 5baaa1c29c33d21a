"""Metrics of a training or an inference, at sampled steps."""
