"""After training: what is done with a model or an adapter that a run has left behind."""
