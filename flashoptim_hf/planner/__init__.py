"""Bytes before the run: what a model, a way of training and an optimizer will take of GPU and host memory."""
