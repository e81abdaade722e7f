"""How a rule is applied to tensors that are already in place."""
