"""Where language models come from: the bundled one, Hugging Face folders and hub names, GGUF files, training."""
