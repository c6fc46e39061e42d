"""GGUF files (llama.cpp's format), read only: header, weights under their Hub names, and the tokenizer inside."""
