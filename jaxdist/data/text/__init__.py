"""Text as token ids: tokenizers of Hugging Face folders, chat templates, and examples for fine-tuning."""
