"""Generation of text: prompts, a key/value cache, drawing tokens, on one device or in a layout of training."""
