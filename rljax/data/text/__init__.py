"""Text to tokens: tokenizers, chat templates, messages."""
