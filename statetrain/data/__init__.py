"""Loaders that go on at the next batch."""
