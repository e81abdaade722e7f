"""The algorithms, and the contract of `torch.optim`."""
