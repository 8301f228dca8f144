"""Other methods, to compare TCA with: a file each, registered by entry points of the group `tca_jax.methods`."""
