"""The operations of the method: a folder each, with its function, its XLA oracle and a file a backend."""
