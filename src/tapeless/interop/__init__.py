"""External formats: Hugging Face in and out, GGUF out."""
