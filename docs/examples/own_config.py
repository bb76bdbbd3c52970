"""The model of own_blocks.py for scripts/train.py, with model.name=own_config.my_gpt in this folder."""

from own_blocks import GPT

from jaxdist import model_def


def my_gpt(config, *, max_length, param_dtype):
    """config: the section `model`. max_length: data.seq_len."""
    sizes = {"layers": config.layers, "width": config.width, "vocab": config.vocab, "length": max_length}
    return model_def(lambda rngs: GPT(rngs, **sizes), tied=True, param_dtype=param_dtype)
