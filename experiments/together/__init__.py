"""Many models of one shape, trained as one batched model."""
