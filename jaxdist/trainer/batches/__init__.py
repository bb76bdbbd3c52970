"""The data of a run: loaded, held against the model, and recorded by sample."""
