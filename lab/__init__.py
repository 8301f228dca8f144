"""What measures the library: evaluation, recall tasks, benchmarks, pictures of results. The core imports none of it."""
