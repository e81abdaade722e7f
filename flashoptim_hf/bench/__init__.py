"""Measurements: speed, memory and fidelity, each as ratios side by side in one run."""
