"""Measurements of the library: evaluation, recall tasks, benchmarks, pictures. The core imports none of it."""
