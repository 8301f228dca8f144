"""The operations of the method: one file per operation and backend, beside the XLA oracle of each."""
