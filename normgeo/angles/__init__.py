"""Angles: statistics of the stream of hidden states, and the runs that measure a model."""
