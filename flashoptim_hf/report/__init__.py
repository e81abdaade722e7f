"""The report of a run: one HTML file with curves, memory, page traffic, settings, samples and warnings, which needs no network."""
